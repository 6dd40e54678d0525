"""The commands. The environment is read here."""

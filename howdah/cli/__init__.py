"""The commands of the command line, and the environment variables that they read."""

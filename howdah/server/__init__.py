"""The parameter server: consistency between workers and servers that do not wait for each other."""

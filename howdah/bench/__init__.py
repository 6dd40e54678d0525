"""The `bench` command: collectives compared with gloo and with the limit of the machine."""

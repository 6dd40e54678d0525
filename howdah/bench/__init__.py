"""The `bench` command: collectives measured beside gloo and the machine's limit."""

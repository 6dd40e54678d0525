"""The runtime: groups that count every byte, over transports."""

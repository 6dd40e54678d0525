"""Collective algorithms as data: programs of messages, proved, run in one process, and counted."""

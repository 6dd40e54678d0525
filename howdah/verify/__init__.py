"""A layout against one device: the same gradients, proved and not assumed."""

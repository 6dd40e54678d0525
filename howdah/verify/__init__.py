"""Compares a layout with one device: proves that both compute the same gradients."""

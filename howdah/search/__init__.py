"""Searches: layouts that fit their devices, cuts of a model into stages, and token slices."""

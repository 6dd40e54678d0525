"""Pieces to files and back, on any layout."""

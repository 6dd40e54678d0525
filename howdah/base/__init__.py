"""Helpers that every package of howdah uses: errors, files, quantities, signals, output."""

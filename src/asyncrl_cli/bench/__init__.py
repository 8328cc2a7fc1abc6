"""Compares profiles on the same work and tunes settings: runs, figures, bounds, tables and
recommendations."""

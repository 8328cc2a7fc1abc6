"""Compares profiles on the same work and tunes settings: measured figures, the bound of each profile, reports, pictures."""

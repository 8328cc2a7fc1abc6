"""Compares profiles on the same work and tunes settings: measurements, each profile's bound, reports,
pictures."""

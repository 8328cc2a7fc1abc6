"""Runs a profile as a Ray job: placement groups, actors, the ports of the loop. This `__init__` imports
neither ray nor torch."""

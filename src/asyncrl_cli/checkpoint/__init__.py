"""A run's state on disk: its directory, and its checkpoints, which are written, found, verified and read
here."""

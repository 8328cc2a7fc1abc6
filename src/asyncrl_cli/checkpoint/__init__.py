"""A run's state on disk: its directory, its checkpoints, what is inside them, and whether they are whole."""

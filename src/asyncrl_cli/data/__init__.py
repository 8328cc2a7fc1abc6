"""The data plane: the schema of what travels with a trajectory, and the stores that hold it."""

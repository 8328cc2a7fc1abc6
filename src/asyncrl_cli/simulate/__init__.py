"""The loop on a virtual clock: an event loop that jumps to the next timer, workers and a trainer that only take time."""

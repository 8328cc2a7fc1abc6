"""Engines behind one port, and the group runner that turns prompts into rewarded trajectories. Knows nothing of Ray."""

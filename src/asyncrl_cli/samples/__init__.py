"""What a rollout produces: trajectories, their arrays and how they are stored."""

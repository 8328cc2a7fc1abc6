"""What a run shows of itself: metrics, sinks, the live screen, the status of a run. Knows nothing of ray and torch."""

"""What a run shows of itself: metrics, log files, the live screen, status.json. This room does not import ray
or torch."""

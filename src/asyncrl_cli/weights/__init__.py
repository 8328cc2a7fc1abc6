"""Weights on their way from the trainer to the rollout workers: buckets, fingerprints, probes, kept versions."""

"""Weights on their way from the trainer to the rollout workers: buckets, transports, fingerprints, probes,
kept versions."""

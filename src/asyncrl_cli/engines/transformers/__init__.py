"""Continuous batching over a transformers model."""

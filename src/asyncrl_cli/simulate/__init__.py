"""Simulated runs: the real loop on a virtual clock, with workers and a trainer that compute nothing and only take time."""

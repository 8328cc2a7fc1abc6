"""Simulated runs: the real loop on a virtual clock. Workers and trainer compute nothing and only take
(virtual) time."""

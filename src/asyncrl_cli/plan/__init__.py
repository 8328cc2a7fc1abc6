"""A job's counts, bundles and memory, worked out without Ray."""

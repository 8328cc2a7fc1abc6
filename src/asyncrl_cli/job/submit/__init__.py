"""Runs without a terminal of their own: detached on this machine, or as a job of a Ray cluster. This
`__init__` imports no ray."""

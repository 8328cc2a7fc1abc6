"""Ray around a job: its session, the placement of the actors, calls to them, and what ends it all. This
`__init__` imports no ray."""

"""A profile becomes a job: plan, placement groups, Ray actors, ports. This package imports neither ray nor torch."""

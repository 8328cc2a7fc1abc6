"""A run on Ray. Modules named `driver_*` run in the driver, `rollout_host` and `rank_host` (with
`rollout_weights`, `rank_sending`, `host_process`) in the actors, `node_probe` on the nodes
of a cluster. `ray/`: the session, placement, calls to actors, and the reaper. `submit/`: jobs on a
cluster. This `__init__` imports neither ray nor torch."""

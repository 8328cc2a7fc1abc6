"""The eight machines of the pipeline, by the names of the Async-RL pipeline, and whose states are theirs.

    dataloader -> generate -> rollout -> logp, ref_logp -> reward -> train -> param_update

A process may have several of them. Each has states of its own, whose times add up to the elapsed time.
docs/concepts.md says what each state of each machine means.
"""

from __future__ import annotations

GENERATE, LOGP, REF_LOGP, PARAM_UPDATE = "generate", "logp", "ref_logp", "param_update"
MACHINES = {
    "dataloader": ("feed",),
    GENERATE: (GENERATE,),
    "rollout": ("rollout",),
    LOGP: (LOGP, "prox"),
    REF_LOGP: (REF_LOGP, "ref"),
    "reward": ("reward",),
    "train": ("trainer",),
    PARAM_UPDATE: (PARAM_UPDATE,),
}
"""Machine -> the roles of the executors whose states are its own; a scorer goes by its name. A run has those
machines of which an executor reports."""
_BY_SOURCE = {source: machine for machine, sources in MACHINES.items() for source in sources}


def machine_of(name: str, role: str) -> str:
    """The machine of an executor; "" for a critic, a teacher or a user's scorer, which are none of the
    eight."""
    return _BY_SOURCE.get(name if role == "scorer" else role, "")


def shown_name(name: str, role: str) -> str:
    """The executor's name and, unless that begins with it, its machine: `rollout-0`, `feed (dataloader)`."""
    machine = machine_of(name, role)
    return name if machine in ("", name.split("-")[0]) else f"{name} ({machine})"

"""What a job's plan adds to the profile, for the processes that compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one of a role's `workers` computes: `device`, `threads`, and the model of `model_dir`, whose weights are `version`."""

    model_dir: str
    device: str = "cpu"
    threads: int = 1
    workers: int = 1
    version: int = 0

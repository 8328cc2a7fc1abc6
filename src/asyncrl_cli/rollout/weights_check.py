"""Whether received weights fit a model: looked at before anything is copied, so that a failed load changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl_cli.models.names import first_names
from asyncrl_cli.models.saved_form import SavedForm


def check_fit(form: SavedForm, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """ValueError unless `weights` has every parameter (tied ones once or more), nothing else, and the same shapes.

    Dtypes may differ (a copy casts), but not in kind: what is floating point is so on both sides.
    """
    own = form.known
    problems = [
        _listed("missing", sorted(form.required.keys() - weights.keys())),
        _listed("unknown", sorted(weights.keys() - own.keys())),
        _listed("wrong shape", [name for name in weights if name in own and weights[name].shape != own[name].shape]),
        _listed("wrong dtype", [name for name in weights if name in own and _kinds_differ(weights[name], own[name])]),
    ]
    if found := "; ".join(problem for problem in problems if problem):
        raise ValueError(f"weights of version {version} do not fit the engine's model: {found}")


def _kinds_differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_floating_point() != other.is_floating_point()


def _listed(what: str, names: list[str]) -> str:
    return f"{what} {first_names(names)}" if names else ""

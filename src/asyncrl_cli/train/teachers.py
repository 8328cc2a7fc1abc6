"""The teachers of on-policy distillation: frozen models that give the policy's own sampled tokens their
logprobs, at the sampling temperature.

    distill advantage of a token = distill_coef * (log teacher - log theta)      (policy_loss.py)

Its mean over the policy's samples is minus the reverse KL(theta || teacher), of which it is the
policy-gradient estimate: no gradient flows through it. A token is judged by itself, not by what follows.

Each prompt has one teacher, which the value TEACHER_NAME of its trajectories names. All ranks ask all
teachers, in the same order, because every forward pass is a collective.

Source: Agarwal et al. 2023 (arXiv:2306.13649) for distillation on the student's own samples; Gu et al. 2023,
MiniLLM (arXiv:2306.08543), and Lu, Thinking Machines Lab 2025, "On-Policy Distillation", for the reverse KL
as an advantage.

What it is not: only the sampled token's logprob is compared, not the whole vocabulary or its top k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.contracts.item import Item
from asyncrl_cli.data.sample_fields import TEACHER_NAME
from asyncrl_cli.data.trajectories import GroupPayload
from asyncrl_cli.profile.schema import LoraSection, ProcessPlace, Profile
from asyncrl_cli.train.policy_model import PolicyModel
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.sharded_model import every_trajectory
from asyncrl_cli.train.step_plan import PlannedTrajectory


class Teachers:
    """One rank's part of all teachers: in the trainer, or in processes of their own."""

    def __init__(self, profile: Profile, place: ProcessPlace, ranks: Ranks) -> None:
        profile = profile.model_copy(update={"lora": LoraSection()})
        self.models = {name: PolicyModel(profile, path, ranks) for name, path in place.teacher_dirs.items()}

    def arrays(
        self, planned: Sequence[PlannedTrajectory], payloads: Mapping[int, GroupPayload]
    ) -> list[NDArray[np.float32]]:
        """The logprobs of each of these trajectories' sampled tokens, by its prompt's teacher. A
        collective."""
        found: dict[PlannedTrajectory, NDArray[np.float32]] = {}
        for name, model in self.models.items():
            mine = [one for one in planned if self._name(payloads[one.group]) == name]
            found |= zip(mine, model.arrays(mine, payloads), strict=True)
        return [found[one] for one in planned]

    def score(self, groups: Sequence[GroupPayload], items: Sequence[Item]) -> list[Any]:
        """As `ShardedModel.score`."""
        payloads = dict(enumerate(groups))
        planned = every_trajectory(payloads)
        left = iter(self.arrays(planned, payloads))
        return [tuple(next(left) for _ in group.trajectories) for group in groups]

    def fixed_logprob(self) -> float:
        """As `PolicyModel.fixed_logprob`, the mean over the teachers."""
        return float(np.mean([model.fixed_logprob() for model in self.models.values()]))

    def _name(self, payload: GroupPayload) -> str:
        only, *others = self.models
        return teacher_of(payload) if others else only


def teacher_of(payload: GroupPayload) -> str:
    """Of several teachers, the name of the group's."""
    return str(payload.trajectories[0].values[TEACHER_NAME])

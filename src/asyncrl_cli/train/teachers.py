"""The teachers of on-policy distillation: frozen models that give the policy's own sampled tokens their
logprobs, at the sampling temperature.

    sampled   distill advantage of a token = distill_coef * (log teacher - log theta)
    full      distill loss of a token = distill_coef * KL(theta || teacher) of the distributions before it

`algorithm.distill_loss` chooses; policy_loss.py adds them. The advantage's mean over the policy's samples is
minus the reverse KL(theta || teacher), of which it is the policy-gradient estimate: no gradient flows through
it. The loss is this KL itself in the states that samples visited. Both judge a token by itself, not by what
follows.

Each prompt has one teacher, which the value TEACHER_NAME of its trajectories names. All ranks ask all
teachers, in the same order, because every forward pass is a collective.

Source: Agarwal et al. 2023 (arXiv:2306.13649) for distillation on the student's own samples, over the whole
vocabulary; Gu et al. 2023,
MiniLLM (arXiv:2306.08543), and Lu, Thinking Machines Lab 2025, "On-Policy Distillation", for the reverse KL
as an advantage.

What it is not: no credit flows to earlier tokens, which led to a state. There is no top k of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl_cli.contracts.item import Item
from asyncrl_cli.data.sample_fields import TEACHER_NAME
from asyncrl_cli.data.trajectories import GroupPayload
from asyncrl_cli.profile.schema import LoraSection, ProcessPlace, Profile
from asyncrl_cli.train.batch import TEACHER_NUMBER, Microbatch
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

    def whole_NV(self, microbatch: Microbatch, vocab_size: int) -> torch.Tensor:
        """Of each sampled token's teacher, the logprobs of the whole vocabulary there. A collective."""
        numbers_N, found_NV = microbatch.columns.get(TEACHER_NUMBER), torch.empty(0)
        for number, model in enumerate(self.models.values()):
            its_NV = model.whole_NV(microbatch, vocab_size)
            if numbers_N is not None and number:
                its_NV = torch.where((numbers_N == number).unsqueeze(-1), its_NV, found_NV)
            found_NV = its_NV
        return found_NV

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

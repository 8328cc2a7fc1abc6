"""The reference with processes of its own: one object per process. All of them make the same calls in the same order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl_cli.profile.schema import Place, Profile
from asyncrl_cli.samples import GroupPayload
from asyncrl_cli.train.policy_model import reference_model
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.scores import REF, Column, score


class Reference:
    """The model is divided between the processes, as the trainer's is between its ranks. `init_method` is tcp://host:port or
    file://path. OSError or ValueError, from transformers, if `place.ref_dir` is not a model."""

    def __init__(self, profile: Profile, place: Place, *, rank: int, init_method: str) -> None:
        if place.device == "cpu":
            torch.set_num_threads(place.threads)
        self._ranks = Ranks(
            rank=rank,
            world_size=place.workers,
            device=torch.device(place.device),
            init_method=init_method,
            timeout_s=profile.rollout.call_timeout_s,
        )
        self._max_tokens = profile.trainer.max_tokens_per_microbatch
        self._model = reference_model(profile, place.ref_dir or place.model_dir, self._ranks)

    def score(self, payloads: Mapping[int, GroupPayload]) -> Column:
        """The column of these groups. A collective; every process may have groups of its own, or none."""
        return score(REF, self._model.logprobs_N, payloads, max_tokens=self._max_tokens, ranks=self._ranks)

    def close(self) -> None:
        """Leave the process group."""
        self._ranks.close()

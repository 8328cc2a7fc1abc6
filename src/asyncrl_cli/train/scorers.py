"""The reference and prox with processes of their own: one object per process. All of them make the same calls in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.profile.arithmetic import MAX_LOGPROB_DIFF
from asyncrl_cli.profile.schema import Place, Profile
from asyncrl_cli.samples import GroupPayload
from asyncrl_cli.train.batch import scoring_microbatch
from asyncrl_cli.train.policy_model import reference_model
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.scores import REF, score
from asyncrl_cli.weights.buckets import Bucket, unpack
from asyncrl_cli.weights.versions import Manifest, mean_abs_diff


class LogprobScorer:
    """`ref` or `prox`. The model is divided between the processes, as the trainer's is between its ranks. OSError or
    ValueError, from transformers, if the model's directory holds none."""

    def __init__(self, task: str, profile: Profile, place: Place, ranks: Ranks) -> None:
        self._task, self._profile, self._ranks = task, profile, ranks
        model_dir = (place.ref_dir if task == REF else "") or place.model_dir
        self._model = reference_model(profile, model_dir, ranks)

    def load(self, manifest: Manifest, buckets: Iterable[Bucket]) -> None:
        """Take in a published version. A collective. ExecutorFailed if its probes do not have the trainer's logprobs then."""
        self._model.load({name: tensor for bucket in buckets for name, tensor in unpack(bucket).items()}, manifest.version)
        if not manifest.probe_tokens:
            return
        logprobs = iter(self._model.logprobs_N(scoring_microbatch(manifest.probe_tokens, self._ranks.device)).tolist())
        found = [[next(logprobs) for _ in theirs] for theirs in manifest.probe_logprobs]
        if (off := mean_abs_diff(found, manifest.probe_logprobs)) > MAX_LOGPROB_DIFF[self._profile.model.dtype]:
            raise ExecutorFailed(f"version {manifest.version} gives other logprobs than in the trainer, by {off:.2g} on average")

    def score(self, groups: Sequence[GroupPayload], items: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Each group's column. A collective; every process may have groups of its own, or none."""
        model, max_tokens = self._model, self._profile.trainer.max_tokens_per_microbatch
        payloads = dict(enumerate(groups))
        column = score(self._task, model.logprobs_N, payloads, max_tokens=max_tokens, ranks=self._ranks, are_packed=model.is_packed)
        return list(column.values())

"""The policy trainer: one object per rank. All ranks make the same calls in the same order.

    train(...)                  one train step (policy_update.py)
    gather(version)             full parameters -> host buckets (rank 0) + probe logprobs
    published(version)          manifest and buckets (rank 0)
    snapshot / write / load     trainer state to the host, to disk, back

Threads. `train`, `gather`, `snapshot`, `load` and the methods of `model` must run in one thread (the
trainer's). `published` and `write` may run in another thread at the same time: they only use the copies made
by gather and snapshot. Once `gather` reports a bucket as full, any thread may use it: nothing writes to it
again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import parse_json
from asyncrl_cli.contracts.train_step import TrainReport
from asyncrl_cli.contracts.trajectories import GroupPayload
from asyncrl_cli.profile.arithmetic import MAX_LOGPROB_DIFF
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.profile.sharing import CRITIC, is_apart
from asyncrl_cli.train.balance import RankPlan
from asyncrl_cli.train.batch import scoring_microbatch
from asyncrl_cli.train.critic import Critic
from asyncrl_cli.train.policy_model import PolicyModel, frozen_model
from asyncrl_cli.train.policy_update import PolicyUpdate
from asyncrl_cli.train.ranks import PolicyOptimizer, Ranks
from asyncrl_cli.train.scores import REF, Scores
from asyncrl_cli.train.trainer_state import (
    ANOTHER_MODEL,
    Counters,
    HostState,
    SavedState,
    random_state,
    restore,
    restore_random_state,
    to_host,
    write_state,
)
from asyncrl_cli.weights.buckets import BYTES_PER_MB, Bucket, BucketEntry, Packing, plan_layout
from asyncrl_cli.weights.model_files import PUBLISHED_FILE, write_weights
from asyncrl_cli.weights.senders import BufferPool
from asyncrl_cli.weights.versions import Manifest, make_probes

FROZEN_PROBES = 4
FROZEN = {
    "base_logprob": ("a base model", "model.path"),
    "reference_logprob": ("a reference", "ref.path, or model.path,"),
}
"""Weights that are never trained or saved, by the counter that identifies them: what they are, and the key
that names them."""


class Publication(NamedTuple):
    """The newest gathered version, on rank 0. `packing` does not change once it is filled, so any thread may
    read it.

    `manifest` has no fingerprints yet. Its `previous_logprobs` are not saved, and are empty for a process's
    first version.
    """

    manifest: Manifest
    packing: Packing


class PolicyTrainer:
    """One rank of the trainer; see the module's docstring. `init_method` is tcp://host:port or file://path.
    The learning rate schedule ends after `total_optimizer_steps`. `probe_text`: token ids for the probes.
    OSError or ValueError, from transformers, if `place.model_dir` is not a model.
    """

    def __init__(
        self,
        profile: Profile,
        place: ProcessPlace,
        *,
        rank: int,
        init_method: str,
        total_optimizer_steps: int,
        probe_text: Sequence[int] = (),
    ) -> None:
        self.profile = profile
        sequence_size = profile.trainer.sequence_parallel_size
        self.ranks = Ranks(profile, place, rank=rank, init_method=init_method, sequence_size=sequence_size)
        self.model = PolicyModel(profile, place.model_dir, self.ranks)
        algorithm, head_start = profile.algorithm, profile.critic.head_start_steps
        self.optimizer = PolicyOptimizer(
            profile.trainer,
            self.ranks,
            self.model.parameters,
            total_optimizer_steps=total_optimizer_steps - head_start,
        )
        is_mine = algorithm.has_reference and not is_apart(profile, REF)
        self.reference = frozen_model(REF, profile, place, self.ranks) if is_mine else None
        has_critic = algorithm.has_critic and not is_apart(profile, CRITIC)
        self.critic = (
            Critic(profile, place, self.ranks, total_optimizer_steps=total_optimizer_steps)
            if has_critic
            else None
        )
        self._update = PolicyUpdate(
            profile, self.ranks, self.model, self.optimizer, self.reference, self.critic
        )
        self._publication: Publication | None = None
        self._layout = plan_layout(self.model.specs, profile.weights.gather_bucket_size_mb * BYTES_PER_MB)
        self._buffers = BufferPool(pins=self.ranks.device.type == "cuda")
        num_probes = profile.weights.probe_sequences
        self._probes = make_probes(num_probes, self.model.vocab_size, profile.run.seed, text=probe_text)
        self._frozen_logprobs = self._score_frozen()
        self._snapshots: dict[int, tuple[HostState, Counters, Publication | None]] = {}
        self._hand_over()

    def close(self) -> None:
        """Leave the process group."""
        self.ranks.close()

    def train(
        self,
        step_in_window: int,
        plan: RankPlan,
        payloads: Mapping[int, GroupPayload],
        scores: Scores | None = None,
    ) -> TrainReport:
        """Run the train step's optimizer steps, skipping those whose gradient is not finite. A collective.

        `payloads` maps indices in the train step to groups. It has at least those in `plan.groups`, and so
        have the columns in `scores`, which are not computed again.
        """
        return self._update.run(step_in_window, plan, payloads, scores)

    def gather(
        self, version: int, on_full: Callable[[Packing, int], None] = lambda packing, index: None
    ) -> float:
        """Copy the full parameters, in the engine's dtype, into host buckets that nobody uses on rank 0, and
        score the probes.

        Returns seconds. A collective. Rank 0 holds only the newest version: each gather replaces the previous
        one. On rank 0, `on_full(packing, index)` is called in this thread for each bucket as soon as it is
        full, and should return at once.
        """
        started_s = time.monotonic()
        packing = Packing(self._layout, self._buffers.take) if self.ranks.rank == 0 else None
        with torch.no_grad():
            for part in self.model.full():
                if packing is None:
                    continue
                for name, tensor in self.model.form.to_files(part).items():
                    if (index := packing.put(name, tensor)) is not None:
                        on_full(packing, index)
        probe_logprobs = tuple(map(tuple, self.model.logprobs(self._probes)))
        if packing is not None:
            before = self._publication.manifest if self._publication is not None else None
            manifest = Manifest(
                version=version,
                num_bytes=packing.num_bytes,
                fingerprints=(),
                temperature=self.profile.rollout.temperature,
                probe_tokens=self._probes,
                probe_logprobs=probe_logprobs,
                previous_logprobs=before.probe_logprobs
                if before is not None and before.version < version
                else (),
            )
            self._publication = Publication(manifest, packing)
        self._hand_over()
        return time.monotonic() - started_s

    def published(self, version: int) -> tuple[Manifest, list[Bucket]]:
        """Manifest and buckets of the newest gathered version (rank 0), with their fingerprints. Safe in any
        thread.

        Raises ValueError if rank 0 does not hold `version`.
        """
        publication = self._publication
        if publication is None or publication.manifest.version != version:
            held = "none" if publication is None else publication.manifest.version
            raise ValueError(f"version {version} is not held by rank {self.ranks.rank} (held: {held})")
        buckets = publication.packing.seal()
        return replace(
            publication.manifest, fingerprints=tuple(bucket.fingerprint for bucket in buckets)
        ), buckets

    def snapshot(self, step: int) -> None:
        """Copy this rank's state to the host under the name `step`."""
        counters = Counters(
            schema_version=2,
            ranks=self.ranks.world_size,
            step=step,
            optimizer_steps=self.optimizer.steps_made,
            has_window_first=int(self._update.window_first is not None),
            **self._frozen_logprobs,
        )
        if self.critic is not None:
            counters["critic_steps"] = self.critic.optimizer.steps_made
        state = to_host(self._parameters(), self._state_tensors(), self._buffers.take) | random_state(
            self.ranks
        )
        self._snapshots[step] = (state, counters, self._publication)

    def write(self, step: int, directory: Path, with_published: bool) -> None:
        """Write the snapshot of `step` and drop it. Safe in any thread, but in one at a time.

        Raises ValueError if there is no such snapshot, or if `with_published` is set and it was made before
        the first gather.
        """
        if step not in self._snapshots:
            raise ValueError(f"there is no snapshot of step {step} to write")
        state, counters, publication = self._snapshots.pop(step)
        if with_published and self.ranks.rank == 0:
            if publication is None:
                raise ValueError(f"snapshot of step {step}: no version was gathered before it")
            directory.mkdir(parents=True, exist_ok=True)
            manifest = json.dumps(asdict(replace(publication.manifest, previous_logprobs=())))
            write_weights(publication.packing.tensors(), directory / PUBLISHED_FILE, manifest=manifest)
        write_state(self.ranks.rank, state, counters, directory)

    def load(self, directory: Path) -> None:
        """Restore weights, moments, counters, RNG, the window's first weights, and the published version if
        saved.

        RefusedError if the directory holds no trainer state of this model.
        """
        saved = SavedState(directory)
        counters = saved.counters
        self._check_frozen(directory, counters)
        if counters["has_window_first"]:
            shards = self.model.locals()
            self._update.window_first = {
                name: torch.empty_like(t, device="cpu") for name, t in shards.items()
            }
        elif self._update.needs_window_first and counters["step"]:
            raise RefusedError(
                f"{directory}: lacks the weights of the window's start, which algorithm.old_logprobs = "
                "recompute needs",
                hint="resume with the profile that wrote it",
            )
        restore(self._parameters(), self._state_tensors(), saved)
        restore_random_state(self.ranks, saved)
        self.optimizer.restore_steps(counters["optimizer_steps"])
        if self.critic is not None:
            self.critic.optimizer.restore_steps(saved.critic_steps)
        if self.ranks.rank == 0:
            self._publication = _load_published(directory / PUBLISHED_FILE, self._layout)
        self._hand_over()

    def _hand_over(self) -> None:
        """Colocate: from here on a rollout worker has the device, and needs all that `asyncrl plan` gives
        it."""
        if self.profile.placement.colocate:
            self.ranks.release_cache()

    def _score_frozen(self) -> dict[str, float]:
        """Mean logprobs of fixed tokens under the base model and the reference, by counter name. A
        collective. Call it before anything is trained or loaded: LoRA's adapters are still zero then, so the
        policy equals its base model."""
        base = self.model if self.profile.lora.rank else None
        models = {"base_logprob": base, "reference_logprob": self.reference}
        return {name: self._mean_logprob(model) for name, model in models.items() if model is not None}

    def _mean_logprob(self, model: PolicyModel) -> float:
        tokens = make_probes(FROZEN_PROBES, model.vocab_size, self.profile.run.seed)
        return model.numbers_N(scoring_microbatch(tokens, self.ranks.device)).mean().item()

    def _check_frozen(self, directory: Path, saved: Mapping[str, float]) -> None:
        """Raises RefusedError if the base model or the reference had other weights when the state in
        `directory` was saved."""
        for name, now in self._frozen_logprobs.items():
            if abs(now - saved.get(name, now)) > MAX_LOGPROB_DIFF[self.profile.model.dtype]:
                what, where = FROZEN[name]
                raise RefusedError(
                    f"{directory}: was trained with {what} that had other weights",
                    hint=f"resume with the model that {where} held when the run began",
                )

    def _parameters(self) -> dict[str, DTensor]:
        """Parameters of the policy and the critic, by their names in the trainer's state."""
        return self.model.parameters | (self.critic.state_parameters() if self.critic is not None else {})

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's live shards by `<kind>/<parameter>`."""
        weights = {f"weight/{name}": local for name, local in self.model.locals().items()}
        tensors = (
            weights
            | self.optimizer.moments()
            | (self.critic.state_tensors() if self.critic is not None else {})
        )
        tensors |= {
            f"window_first/{name}": local for name, local in (self._update.window_first or {}).items()
        }
        return tensors


def _load_published(path: Path, layout: Sequence[tuple[BucketEntry, ...]]) -> Publication | None:
    """The saved version, packed as by `gather`; None if none was saved. RefusedError if it is of another
    model."""
    if not path.exists():
        return None
    packing, names = Packing(layout), {entry.spec.name for entries in layout for entry in entries}
    with safe_open(path, framework="pt") as saved:
        if set(saved.keys()) != names:
            raise RefusedError(f"{path}: published weights are of another model", hint=ANOTHER_MODEL)
        for name in names:
            packing.put(name, saved.get_tensor(name))
        return Publication(parse_json(saved.metadata()["manifest"], Manifest), packing)

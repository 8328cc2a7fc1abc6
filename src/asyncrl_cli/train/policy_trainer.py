"""The policy trainer: one object per rank. All ranks make the same calls in the same order.

    train(...)                  one train step
    gather(version)             what this rank sends -> host buckets, + probe logprobs
    published(version)          manifest and buckets of this rank
    snapshot / write / load     trainer state to the host, to disk, back

A train step:

    microbatches -> [ref] -> [teacher] -> [critic] -> [prox] -> [advantages] -> [the critic learns]
                 -> per optimizer step: forward, loss, backward, AdamW

Threads. `train`, `gather`, `snapshot`, `load` and the methods of `model` must run in one thread (the
trainer's). `published` and `write` may run in another thread at the same time: they only use the copies made
by gather and snapshot. Once `gather` reports a bucket as full, any thread may use it: nothing writes to it
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.contracts.prompt_group import TrainReport
from asyncrl_cli.data.sample_fields import schema_of
from asyncrl_cli.data.trajectories import GroupPayload
from asyncrl_cli.measure.values import Sum, Value
from asyncrl_cli.profile.arithmetic import MAX_LOGPROB_DIFF, is_apart
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train.batch import PROX, REF, TEACHER, TEACHER_NUMBER, VALUES, StepBatch, step_batches
from asyncrl_cli.train.critic import Critic, credit
from asyncrl_cli.train.kl_coefficient import KlCoefficient
from asyncrl_cli.train.losses import Metric
from asyncrl_cli.train.optimizer import PolicyOptimizer, StepResult, finite, host_like, step_metrics
from asyncrl_cli.train.policy_loss import PolicyLoss, effective_ratio
from asyncrl_cli.train.policy_model import PolicyModel, frozen_model
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.step_plan import RankPlan, needs_columns
from asyncrl_cli.train.teachers import Teachers, teacher_of
from asyncrl_cli.train.trainer_state import (
    Counters,
    HostState,
    SavedState,
    published_rows,
    random_state,
    read_published,
    restore,
    restore_random_state,
    to_host,
    write_state,
)
from asyncrl_cli.weights.buckets import BYTES_PER_MB, Bucket, BufferPool, Packing, plan_layout
from asyncrl_cli.weights.senders import Publication
from asyncrl_cli.weights.versions import Manifest, make_probes

LossFields = dict[tuple[int, int], dict[str, NDArray[Any]]]
"""What losses write, by group and trajectory of the train step, and by field: one value per sampled
token, all segments end to end."""


class PolicyTrainer:
    """One rank of the trainer; see the module's docstring. `init_method` is tcp://host:port or file://path.
    The learning rate schedule ends after `total_optimizer_steps`. `probe_text`: token ids for the probes.
    `reference`, `teachers` and `critic`: None if there is none, or if it has processes of its own.
    `frozen_logprobs`: by counter (`trainer_state.FROZEN`), also of those processes.
    `publication`: None before the first `gather`. `loss_fields`: of the last train step. `scoring(column)`
    surrounds the computation of a column, for meters. OSError or ValueError, from transformers, if
    `place.model_dir` is not a model.
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
        scoring: Callable[[str], AbstractContextManager[None]] = lambda column: nullcontext(),
    ) -> None:
        self.profile, self._scoring = profile, scoring
        sequence_size = profile.trainer.sequence_parallel_size
        self.ranks = Ranks(profile, place, rank=rank, init_method=init_method, sequence_size=sequence_size)
        self.model = PolicyModel(profile, place.model_dir, self.ranks, replays=True)
        algorithm, policy_steps = profile.algorithm, total_optimizer_steps - profile.critic.head_start_steps
        self.optimizer = PolicyOptimizer(
            profile.trainer, self.ranks, self.model.parameters, total_optimizer_steps=policy_steps
        )
        self.reference: PolicyModel | None = None
        if algorithm.has_reference and not is_apart(profile, REF):
            self.reference = frozen_model(REF, profile, place, self.ranks)
        self.teachers: Teachers | None = None
        if profile.teacher.paths and not is_apart(profile, TEACHER):
            self.teachers = Teachers(profile, place, self.ranks)
        self.critic: Critic | None = None
        if algorithm.has_critic and not is_apart(profile, VALUES):
            self.critic = Critic(profile, place, self.ranks, total_optimizer_steps=total_optimizer_steps)
        self.schema = schema_of(profile)
        self._loss, self._kl = PolicyLoss(profile, self.schema), KlCoefficient(algorithm)
        self.loss_fields: LossFields = {}
        self._window_first: dict[str, torch.Tensor] | None = None
        """A host copy of this rank's shards at the window's start, if prox needs it."""
        self.publication: Publication | None = None
        self._layout = plan_layout(self.model.specs, profile.weights.gather_bucket_size_mb * BYTES_PER_MB)
        self._buffers = BufferPool(pins=self.ranks.device.type == "cuda")
        num_probes = profile.weights.probe_sequences
        self._probes = make_probes(num_probes, self.model.vocab_size, profile.run.seed, text=probe_text)
        # Before anything is trained or loaded: LoRA's adapters are still zero, so the policy is its base.
        base = self.model if profile.lora.rank else None
        frozen = {"base_logprob": base, "reference_logprob": self.reference, "teacher_logprob": self.teachers}
        self.frozen_logprobs = {name: model.fixed_logprob() for name, model in frozen.items() if model}
        self.snapshots: dict[int, tuple[HostState, Counters, Publication | None]] = {}
        self._hand_over()

    @property
    def _models(self) -> list[PolicyModel | Critic]:
        return [model for model in (self.model, self.reference, self.critic) if model is not None]

    @property
    def shares(self) -> bool:
        """Whether what trajectories share is computed once, by all models that take the microbatches."""
        return all(model.shares for model in self._models)

    def close(self) -> None:
        """Leave the process group."""
        self.ranks.close()

    def train(
        self,
        step_in_window: int,
        plan: RankPlan,
        payloads: Mapping[int, GroupPayload],
        columns: Sequence[str] = (),
        dumped: Collection[int] = (),
    ) -> TrainReport:
        """Run the train step's optimizer steps, skipping those whose gradient is not finite. A collective.

        `payloads` maps indices in the train step to groups. It has at least those in `plan.groups`, with the
        `columns` that were computed elsewhere. `dumped`: the groups whose fields, which losses write, go
        into `loss_fields`.
        """
        began_s, algorithm, ranks = time.monotonic(), self.profile.algorithm, self.ranks
        batches = step_batches(
            plan,
            payloads,
            columns,
            max_tokens=self.profile.trainer.max_tokens_per_microbatch,
            ranks=ranks,
            # all of them take the same microbatches
            are_packed=all(model.is_packed for model in self._models),
            are_trees=self.shares,
            schema=self.schema,
        )
        # Columns come first, while no weights have changed. Those that were passed in are not computed.
        column_s = dict[str, float]()
        for name, model in ((REF, self.reference), (VALUES, self.critic)):
            if model is not None:
                with self._timed(name, column_s):
                    for batch in batches:
                        batch.fill(name, model.numbers_N)
        if self.teachers is not None:
            with self._timed(TEACHER, column_s):
                for batch in batches:
                    arrays = self.teachers.arrays(batch.plan.trajectories, payloads)
                    values_F = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *arrays]))
                    batch.set_column(TEACHER, values_F.to(ranks.device))
        if len(names := [*self.profile.teacher.paths]) > 1:
            for batch in batches:
                named = [teacher_of(payloads[one.group]) for one in batch.plan.trajectories]
                numbers_F = np.repeat(np.array([names.index(name) for name in named], int), batch.counts_P)
                batch.set_column(TEACHER_NUMBER, torch.from_numpy(numbers_F).to(ranks.device))
        with self._timed("old_logprob", column_s):
            scored_tokens = self._fill_prox(batches, step_in_window, plan.critic_only)
        metrics, skipped_steps = dict[str, Value](), 0
        if needs_columns(algorithm):
            metrics |= credit(batches, algorithm, self._kl, ranks)
        if self.critic is not None:  # after `credit`, which takes the values that it gave before it learned
            critic_metrics, skipped_steps = self.critic.update(batches)
            metrics |= critic_metrics

        seen, results = list[dict[str, Metric]](), list[StepResult]()
        steps = batches * self.profile.trainer.ppo_epochs
        trained = steps[plan.critic_only :]  # in its head start, the critic learns alone
        for steps_done, batch in enumerate(trained, step_in_window * len(steps) + plan.critic_only):
            normalizer = self._loss.weight_normalizer(batch, ranks)
            for microbatch in batch.microbatches:
                self.model.gathered.before_backward(is_last=microbatch is batch.microbatches[-1])
                teacher_NV = None
                if self.teachers is not None and algorithm.distill_loss == "full":
                    teacher_NV = self.teachers.whole_NV(microbatch, self.model.vocab_size)
                scored = self.model.scored(microbatch, teacher_NV)
                loss, found = self._loss(microbatch, scored, batch.plan, steps_done, normalizer)
                # FSDP averages gradients over ranks, but the loss is a share of all ranks' mean already.
                (loss * ranks.world_size).backward()
                seen.append(found)
            results.append(self.optimizer.step())
        if results:
            metrics |= step_metrics("train", ranks, seen, results)
            skipped_steps += sum(result.is_skipped for result in results)
        metrics |= effective_ratio(metrics, sum(batch.plan.num_loss_tokens for batch in trained))
        if scored_tokens:
            metrics["train/old_logprob_tokens"] = Sum(float(scored_tokens))
        self.loss_fields = self._loss_fields_of(trained[: len(batches)], dumped)
        ranks.synchronize()  # or the seconds would be those in which the work was queued
        optimizers = [self.optimizer, *([self.critic.optimizer] if self.critic is not None else [])]
        if self.profile.placement.lend:
            self._hand_over()
        return TrainReport(
            train_s=time.monotonic() - began_s - sum(column_s.values()),
            column_s=column_s,
            tokens=sum(batch.plan.num_loss_tokens for batch in batches),
            metrics=finite(metrics),
            skipped_steps=skipped_steps,
            skipped_in_a_row=max(optimizer.skipped_in_a_row for optimizer in optimizers),
        )

    def _loss_fields_of(self, batches: Sequence[StepBatch], dumped: Collection[int]) -> LossFields:
        found: LossFields = {}
        for field in (field for field in self.schema.values() if field.by == "trainer"):
            for batch in batches if dumped else ():
                if any(field.name not in microbatch.columns for microbatch in batch.microbatches):
                    continue
                values_F = batch.column(field.name).cpu().numpy().astype(field.dtype)
                begins = np.cumsum([0, *batch.counts_P])
                for one, begin, end in zip(batch.plan.trajectories, begins, begins[1:], strict=False):
                    if one.group in dumped:
                        values_n = values_F[begin:end]
                        found.setdefault((one.group, one.trajectory), {})[field.name] = values_n
        return found

    @contextmanager
    def _timed(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        began_s = time.monotonic()
        with self._scoring(name):
            yield
            self.ranks.synchronize()
        seconds[name] = time.monotonic() - began_s

    def _fill_prox(self, batches: Sequence[StepBatch], step_in_window: int, critic_only: int) -> int:
        """Add the column of prox logprobs. Returns how many tokens needed a forward pass for it. Where there
        is no column, theta's detached logprobs equal prox, or prox is estimated from theta's logprobs in the
        first epoch."""
        algorithm, live = self.profile.algorithm, self.model.locals()
        if algorithm.old_logprobs == "rollout":
            for microbatch in (microbatch for batch in batches for microbatch in batch.microbatches):
                microbatch.columns[PROX] = microbatch.logp_mu_N
        if algorithm.old_logprobs != "recompute" or PROX in batches[0].microbatches[0].columns:
            return 0
        if step_in_window > 0:
            # The weights have moved since the window's start: exchange them for those of then, for a moment.
            assert self._window_first is not None, "the window's first train step was not seen"
            current = {name: local.clone() for name, local in live.items()}
            try:
                _copy_into(live, self._window_first)
                for batch in batches:
                    batch.fill(PROX, self.model.numbers_N)
            finally:
                _copy_into(live, current)
            return sum(batch.plan.num_loss_tokens for batch in batches)
        if self._needs_window_first:
            self._window_first = self._window_first or host_like(live)
            _copy_into(self._window_first, live)
        # The first optimizer step starts from the weights that define prox, so its forward pass gives both
        # theta and prox. (Normalized weights are needed before that pass.)
        first = None if algorithm.rollout_is_batch_normalize else batches[critic_only % len(batches)]
        missing = [batch for batch in batches if batch is not first]
        for batch in missing:
            batch.fill(PROX, self.model.numbers_N)
        return sum(batch.plan.num_loss_tokens for batch in missing)

    @property
    def _needs_window_first(self) -> bool:
        """Whether later train steps of a window need the weights of its start, to compute prox."""
        is_mine = self.profile.algorithm.old_logprobs == "recompute" and not is_apart(self.profile, PROX)
        return is_mine and self.profile.async_training.trigger_parameter_sync_step > 1

    def gather(
        self, version: int, on_full: Callable[[Packing, int], None] = lambda packing, index: None
    ) -> float:
        """Copy what this rank sends (`model.specs`), in the engine's dtype, into host buckets that nobody
        uses, and score the probes.

        Returns seconds. A collective. A rank holds only the newest version: each gather replaces the previous
        one. `on_full(packing, index)` is called in this thread for each bucket as soon as it is full, and
        should return at once.
        """
        started_s = time.monotonic()
        packing = Packing(self._layout, self._buffers.take)
        with torch.no_grad():
            for name, tensor in self.model.sent():
                if (index := packing.put(name, tensor)) is not None:
                    on_full(packing, index)
        before = self.publication.manifest if self.publication is not None else None
        manifest = Manifest(
            version=version,
            num_bytes=packing.num_bytes,
            fingerprints=(),
            temperature=self.profile.rollout.temperature,
            probe_tokens=self._probes,
            probe_logprobs=tuple(map(tuple, self.model.logprobs(self._probes))),
            previous_logprobs=before.probe_logprobs if before and before.version < version else (),
        )
        self.publication = Publication(manifest, packing)
        self._hand_over()
        return time.monotonic() - started_s

    def published(self, version: int) -> tuple[Manifest, list[Bucket]]:
        """Manifest and buckets of what this rank sends of the newest gathered version, with their
        fingerprints. Safe in any thread.

        Raises ValueError if this rank does not hold `version`.
        """
        publication = self.publication
        if publication is None or publication.manifest.version != version:
            held = "none" if publication is None else publication.manifest.version
            raise ValueError(f"version {version} is not held by rank {self.ranks.rank} (held: {held})")
        return publication.sealed()

    def snapshot(self, step: int) -> None:
        """Copy this rank's state to the host under the name `step`."""
        counters = Counters(
            schema_version=2,
            ranks=self.ranks.world_size,
            step=step,
            optimizer_steps=self.optimizer.steps_made,
            has_window_first=int(self._window_first is not None),
        )
        counters |= cast(Counters, self.frozen_logprobs)
        if self.profile.algorithm.kl_target is not None:
            counters["kl_coef"] = self._kl.value
        if self.critic is not None:
            counters["critic_steps"] = self.critic.optimizer.steps_made
        state = to_host(self._parameters(), self.state_tensors(), self._buffers.take)
        self.snapshots[step] = (state | random_state(self.ranks), counters, self.publication)

    def write(self, step: int, directory: Path, with_published: bool) -> None:
        """Write the snapshot of `step` and drop it. Safe in any thread, but in one at a time.

        Raises ValueError if there is no such snapshot, or if `with_published` is set and it was made before
        the first gather.
        """
        if step not in self.snapshots:
            raise ValueError(f"there is no snapshot of step {step} to write")
        state, counters, publication = self.snapshots.pop(step)
        if with_published:
            if publication is None:
                raise ValueError(f"snapshot of step {step}: no version was gathered before it")
            state |= published_rows(publication.packing)
            counters["published"] = replace(publication.manifest, previous_logprobs=())
        write_state(self.ranks.rank, state, counters, directory)

    def load(self, directory: Path) -> None:
        """Restore weights, moments, counters, RNG, the window's first weights, and the published version if
        saved.

        RefusedError if the directory holds no trainer state of this model.
        """
        saved = SavedState(directory)
        counters = saved.counters
        saved.check_frozen(self.frozen_logprobs, MAX_LOGPROB_DIFF[self.profile.model.dtype])
        if counters["has_window_first"]:
            self._window_first = host_like(self.model.locals())
        elif self._needs_window_first and counters["step"]:
            why = "the weights of the window's start, which algorithm.old_logprobs = recompute needs"
            raise RefusedError(f"{directory}: lacks {why}", hint="resume with the profile that wrote it")
        restore(self._parameters(), self.state_tensors(), saved)
        restore_random_state(self.ranks, saved)
        self.optimizer.restore_steps(counters["optimizer_steps"])
        if self.profile.algorithm.kl_target is not None:
            self._kl.value = counters.get("kl_coef", self._kl.value)
        if self.critic is not None:
            self.critic.optimizer.restore_steps(saved.critic_steps)
        self.publication = None
        if (manifest := saved.counters.get("published")) is not None:
            packing = Packing(self._layout)
            read_published(packing, saved)
            self.publication = Publication(replace(manifest, num_bytes=packing.num_bytes), packing)
        self._hand_over()

    def _hand_over(self) -> None:
        """Colocate, or lending: from here on a rollout worker may have the device, and needs all that
        `asyncrl plan` gives it."""
        if self.profile.placement.colocate or self.profile.placement.lend:
            self.ranks.release_cache()

    def _parameters(self) -> dict[str, DTensor]:
        """Parameters of the policy and the critic, by their names in the trainer's state."""
        return self.model.parameters | (self.critic.state_parameters() if self.critic is not None else {})

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's live shards by `<kind>/<parameter>`."""
        weights = {f"weight/{name}": local for name, local in self.model.locals().items()}
        window_first = {f"window_first/{name}": t for name, t in (self._window_first or {}).items()}
        critic = self.critic.state_tensors() if self.critic is not None else {}
        return weights | self.optimizer.moments() | critic | window_first


def _copy_into(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])

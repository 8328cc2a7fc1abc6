"""The trainer actor: one rank of the policy trainer, in threads.

    group main     one thread: start, load, train, gather, snapshot. All ranks get the same calls in the same order
    group publish  rank 0: fingerprints and sends the weights that gather copied, beside training (or beside gather)
    group write    writes snapshots and dumps of samples to disk, beside training
    group direct   rank 0: sends weights to a rollout worker that asks for them (`nccl`, `ipc`), beside training
    group control  report, meeting_point, free_address, leave: answered at once, whatever else runs

Who waits for whom: collectives in `main` for the other ranks' `main`; `direct` for the vLLM processes of the
calling worker, for `weights.timeout_s` at most, and in a `turn` for the workers before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl_cli.base.safe_files import MIB
from asyncrl_cli.base.storage import telling_storage
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.trajectories import GroupPayload, joined, overlaid
from asyncrl_cli.engines.port import kind_of
from asyncrl_cli.job.rank_actors import RankActor, taken
from asyncrl_cli.job.transports import ObjectStoreSender, Sending
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train.sample_dump import SampledGroup, dump_samples

if TYPE_CHECKING:
    from asyncrl_cli.contracts.ports import Cut
    from asyncrl_cli.contracts.train_step import TrainReport
    from asyncrl_cli.train.batch import Column
    from asyncrl_cli.train.step_plan import RankPlan
    from asyncrl_cli.weights.versions import Manifest, Sender

WEIGHTS_DIR, VERSIONS_DIR = "weights", "versions"
"""In the run's directory: versions on their way to the workers, if `weights.transport` is `disk`; versions
that are kept."""


class TrainerActor(RankActor):
    """One rank. Its methods mirror `loop.ports.Trainer`; `RayTrainer` calls them on all ranks.

    workers.py adds `direct` to `THREADS`: a thread for each rollout worker, which makes one call at a time.
    """

    THREADS = RankActor.THREADS | {"publish": 1, "write": 1}
    NEEDS = "asyncrl_cli.train.policy_trainer"
    ROLE, INPUT = "trainer", "groups"

    def __init__(
        self,
        rank: int,
        profile: Profile,
        place: ProcessPlace,
        run_dir: Path,
        probe_items: Sequence[Item] = (),
        *,
        log_path: Path,
    ) -> None:
        """`run_dir`: the directory for versions that are kept or that travel as files. `probe_items`: their
        prompts are the probes' text."""
        super().__init__("trainer", rank, profile, place, log_path)
        self._run_dir = run_dir
        self._probe_items = probe_items

    def _start(self, init_method: str) -> None:
        from asyncrl_cli.envs.chat import render_prompts
        from asyncrl_cli.train.policy_trainer import PolicyTrainer

        self._trainer = PolicyTrainer(
            self._profile,
            self._place,
            rank=self._rank,
            init_method=init_method,
            total_optimizer_steps=Schedule.of(self._profile).optimizer_steps,
            probe_text=list(chain.from_iterable(render_prompts(self._tokenizer, self._probe_items))),
        )
        self._sending = Sending(self._make_sender(), overlap=self._profile.weights.overlap)

    def _warnings(self) -> list[str]:
        if self._trainer.model.attention == "sdpa" or self._trainer.ranks.device.type != "cuda":
            return []
        return [
            "the trainer attends by the model's own function (eager), not by sdpa: slow on a GPU, with all "
            "scores in memory "
            "and padded rows; the log of trainer-0 says why"
        ]

    @ray.method(concurrency_group="main")
    def restore(self, directory: str) -> None:
        """Load a checkpoint's trainer state."""
        with self._meter.doing(State.BUSY, "a checkpoint to be read"):
            self._trainer.load(Path(directory))

    @ray.method(concurrency_group="main")
    def train(
        self, step: int, step_in_window: int, plan: RankPlan, names: Sequence[str], *given: Any
    ) -> tuple[TrainReport, ExecutorReport]:
        """One train step on the groups of `plan.groups`. `given`: their columns and parts."""
        began_s = time.monotonic()
        with self._meter.doing(State.BUSY):
            payloads, columns = taken(plan, names, given)
            report = self._trainer.train(
                step_in_window=step_in_window, plan=plan, payloads=payloads, columns=columns
            )
        self._meter.add(
            busy_s=time.monotonic() - began_s, trained_tokens=report.tokens, gauges={"step": step}
        )
        return report, self._meter.report()

    @ray.method(concurrency_group="main")
    def gather(self, version: int, wanted: Sequence[int] = ()) -> tuple[float, ExecutorReport]:
        """Gather this version's weights. Returns the seconds, and this rank's report to save the loop another
        call.

        `wanted`: older versions that a worker may still ask for; rank 0 drops all others.
        """
        with self._meter.doing(State.SYNCING, "weights to be gathered"):
            gather_s = self._trainer.gather(version, self._sending.of(version, wanted))
        return gather_s, self.report()

    @ray.method(concurrency_group="main")
    def snapshot(self, step: int) -> None:
        with self._meter.doing(State.BUSY, "a checkpoint's snapshot"):
            self._trainer.snapshot(step)

    @ray.method(concurrency_group="publish")
    def publish(self, version: int) -> tuple[Manifest, list[Any]]:
        """Rank 0: send the gathered buckets. Returns the manifest and the refs by which workers get the
        buckets."""
        from asyncrl_cli.weights.senders import keep_version

        manifest, buckets = self._trainer.published(version)
        refs = self._sending.sent(manifest, buckets)
        if num_kept := self._profile.weights.keep_versions:
            with telling_storage():
                keep_version(
                    self._run_dir / VERSIONS_DIR, manifest, buckets, Path(self._place.model_dir), num_kept
                )
        return manifest, refs

    @ray.method(concurrency_group="direct")
    def direct(self, call: str, worker: str, *args: Any) -> Any:
        """Rank 0: call `join`, `turn`, `broadcast` or `export` of the engine's `EngineKind.rank_zero_end` for
        `worker`."""
        return getattr(self._end, call)(worker, *args)

    @ray.method(concurrency_group="control")
    def leave(self, worker: str) -> None:
        self._end.leave(worker)

    def _make_sender(self) -> Sender:
        weights = self._profile.weights
        if self._rank > 0 or weights.transport == "object-store":
            return ObjectStoreSender()
        if weights.transport == "disk":
            from asyncrl_cli.weights.senders import DiskSender

            return DiskSender(self._run_dir / WEIGHTS_DIR, Path(self._place.model_dir))
        from asyncrl_cli.weights.senders import HeldVersions

        held = HeldVersions()
        self._end = kind_of(self._profile).rank_zero_end(weights, held, self._trainer.ranks.device)
        return held

    @ray.method(concurrency_group="write")
    def write(self, directory: str, cut: Cut) -> None:
        """Write the snapshot of the cut's step to `directory`; rank 0 adds the arrays of untrained groups."""
        from asyncrl_cli.checkpoint.payloads import write_payloads

        with telling_storage():
            self._trainer.write(cut.step, Path(directory), not cut.at_window_boundary)
            if self._rank == 0:
                whole = [joined(ray.get([*parts]))[0] for parts in cut.payloads]
                so_far = chain.from_iterable(ray.get([*cut.so_far]))
                write_payloads(Path(directory), [*whole, *overlaid(cut.kept, so_far)])

    @ray.method(concurrency_group="main")
    def logprobs(self, indices: Sequence[int], *parts: GroupPayload) -> Column:
        """Logprobs of these groups' sampled tokens under the current weights. A collective: a rank has its
        own groups, or none."""
        with self._meter.doing(State.BUSY, "samples to be scored"):
            return self._trainer.model.column(dict(zip(indices, joined(parts), strict=True)))

    @ray.method(concurrency_group="write")
    def dump(
        self,
        directory: str,
        step: int,
        window: int,
        facts: Mapping[int, Mapping[str, Any]],
        part_refs: list[Any],
        *of: Column,
    ) -> None:
        """Rank 0: write trajectories of a train step as text lines, beside training.

        `facts`: what the driver knows of each chosen group, by its index in the step, in the order of
        `part_refs`: fields of `SampledGroup`. `of`: the logprobs that the ranks have computed, if any.
        """
        payloads, known = (
            joined(ray.get(part_refs)),
            {index: arrays for column in of for index, arrays in column.items()},
        )
        groups = [
            SampledGroup(payload=payload, logprobs=known.get(index), **own)
            for payload, (index, own) in zip(payloads, facts.items(), strict=True)
        ]
        max_bytes = self._profile.logging.samples_max_mb * MIB
        with telling_storage():
            dump_samples(
                Path(directory),
                step,
                groups,
                window=window,
                decode=self._tokenizer.decode,
                max_bytes=max_bytes,
            )

    @cached_property
    def _tokenizer(self) -> Any:
        from asyncrl_cli.envs.chat import load_tokenizer

        return load_tokenizer(self._place.model_dir, trust_remote_code=self._profile.model.trust_remote_code)

    @ray.method(concurrency_group="main")
    def stop(self) -> None:
        self._trainer.close()

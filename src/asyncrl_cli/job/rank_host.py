"""The actor of one process of the trainer or of a scorer (`ref`, `teacher`, `prox`, `critic`, the reward
model, a class of the user's). Runs in that process; the driver's side is driver_ranks.py.

    group main     joint computation, in one thread: start, train, gather, snapshot, restore, load, score.
                   All processes get the same calls in the same order (except `judge`: one process alone
                   scores an eval's trajectories)
    group publish  trainer: fingerprints and sends the weights that gather copied, beside training
    group write    writes snapshots and dumps of samples to disk, beside training
    group direct   trainer, rank 0: sends weights to a rollout worker that asks for them (`nccl`, `ipc`)
    group control  report, meeting_point, free_address, leave: answered at once, whatever else runs

Who waits for whom: collectives in `main` for the other processes' `main`; `direct` for the vLLM processes of
the calling worker, for `weights.timeout_s` at most, and in a `turn` for the workers before it.

A process gets its share of a train step as arguments of the call: its plan, and what it takes to get the data
of the plan's groups (`data.store.Stored`). It gets the fields that it needs, of all groups in one call.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import ray
from ray import ObjectRef

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.base.named_code import describe
from asyncrl_cli.base.safe_files import MIB
from asyncrl_cli.base.storage import as_storage_errors
from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.prompt_group import attempt_of
from asyncrl_cli.data.backends import store_at
from asyncrl_cli.data.ray_store import shipped
from asyncrl_cli.data.sample_fields import KEPT_TOKENS, MASK, REQUIRED, ROUTED_EXPERTS, TOKENS
from asyncrl_cli.data.step_files import write_step
from asyncrl_cli.data.store import Stored
from asyncrl_cli.data.trajectories import Arrays, GroupPayload, joined_by_index
from asyncrl_cli.data.transferqueue_client import Address
from asyncrl_cli.engines.port import kind_of
from asyncrl_cli.job.host_process import Refs, arriving, merging, no_collection_while_starting, set_up_process
from asyncrl_cli.job.rank_sending import ObjectStoreSender, Sending
from asyncrl_cli.measure.meters import CallMeter, TrainerMeter
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.plan.cluster import LOOPBACK
from asyncrl_cli.plan.job_plan import TRAINER
from asyncrl_cli.profile.arithmetic import (
    CRITIC,
    PROX,
    REWARD,
    TEACHER,
    Schedule,
    sends_deltas,
    trainer_columns,
)
from asyncrl_cli.profile.schema import FILE_TRANSPORTS, ProcessPlace, Profile
from asyncrl_cli.train.sample_dump import SampledGroup, dump_samples
from asyncrl_cli.weights.versions import VERSIONS

if TYPE_CHECKING:  # torch: the driver imports this module
    from transformers import PreTrainedTokenizerBase

    from asyncrl_cli.contracts.ports import LoopSnapshot
    from asyncrl_cli.contracts.prompt_group import TrainBatch, TrainReport
    from asyncrl_cli.train.batch import Column
    from asyncrl_cli.train.critic import CriticApart
    from asyncrl_cli.train.policy_model import PolicyModel
    from asyncrl_cli.train.policy_trainer import LossFields
    from asyncrl_cli.train.reward_model import RewardModel
    from asyncrl_cli.train.step_plan import RankPlan
    from asyncrl_cli.train.teachers import Teachers
    from asyncrl_cli.weights.versions import Manifest, Sender

logger = logging.getLogger(__name__)

THREADS = {"main": 1, "control": 1, "publish": 1, "write": 1}
"""Threads of each concurrency group. driver_crew.py adds `direct`: a thread for each rollout worker, which
makes one call at a time."""
EAGER = (
    "the trainer attends by the model's own function (eager), not by sdpa: slow on a GPU, with all scores in "
    "memory and padded rows; the log of trainer-0 says why"
)


SCORED_FIELDS = (TOKENS, MASK)
"""What a critic or a reward model needs."""
LOGPROB_FIELDS = (*SCORED_FIELDS, KEPT_TOKENS)
"""What logprobs need."""
POLICY_FIELDS = (*LOGPROB_FIELDS, ROUTED_EXPERTS)
"""What the policy's logprobs need, and prox."""
Keys = Sequence[Stored]
"""A group's data: that of its parts, in order."""


class SampleFacts(TypedDict):
    """What the driver knows of a group to dump: fields of `SampledGroup`."""

    advantages: Sequence[float | None]
    rewards: Sequence[float]
    parts: Sequence[Mapping[str, float]]
    answer: str | None


class RankHost:
    """One process. `role`: `trainer`, or a scorer's name. `run_dir`: where versions are kept, or travel as
    files. `probe_items`: their prompts are the probes' text.

    The methods mirror `Trainer` and `Scorer` of contracts/ports.py. Which of them a process gets depends on
    its role.
    """

    def __init__(
        self,
        rank: int,
        role: str,
        profile: Profile,
        place: ProcessPlace,
        run_dir: Path,
        probe_items: Sequence[Item] = (),
        address: Address | None = None,
        *,
        log_path: Path,
    ) -> None:
        set_up_process(threads=place.threads, log_path=log_path)
        self._rank = rank
        self._role = role
        self._profile = profile
        self._place = place
        self._run_dir = run_dir
        self._probe_items = probe_items
        self._store = store_at(profile, address)
        self._end_ranks: Callable[[], None] = lambda: None
        self._meter = CallMeter(role, "scorer", "finished groups", time.monotonic)
        if role == TRAINER:
            columns = trainer_columns(profile) if rank == 0 else ()  # one rank speaks for all: they keep step
            self._trainer_meter = TrainerMeter(role, repr(self), columns, time.monotonic)
            self._meter = self._trainer_meter

    def __repr__(self) -> str:
        return f"{self._role}-{self._rank}"

    # --- start and end

    @ray.method(concurrency_group="control")
    def meeting_point(self) -> str:
        """An address on this process's node. In a local session it is a file in the session's directory:
        torch would listen on all interfaces."""
        if ray.util.get_node_ip_address() == LOOPBACK:
            session_dir = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
            return f"file://{tempfile.mkdtemp(dir=session_dir)}/ranks"
        return "tcp://{}:{}".format(*self.free_address())

    @ray.method(concurrency_group="control")
    def free_address(self) -> tuple[str, int]:
        """This node's address and a port that is free there now, for a group that vLLM's processes join."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind(("", 0))
            return host, free.getsockname()[1]

    @ray.method(concurrency_group="main")
    def prepare(self) -> str:
        """Import what `start` needs, separately because this takes each process a different time. Returns the
        node's address."""
        modules = {TRAINER: "policy_trainer", REWARD: "reward_model"}
        with no_collection_while_starting():
            if self._role not in self._profile.task.scorers:  # whose modules are the user's
                import_module(f"asyncrl_cli.train.{modules.get(self._role, 'critic')}")
        return str(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="main")
    def start(self, init_method: str, nodes: Sequence[str]) -> list[str]:
        """Join the other processes and load the model. `nodes`: the node of every process. Returns warnings
        for the user: the same text on all processes that warn of the same."""
        warnings: list[str] = []
        with no_collection_while_starting(), naming_nodes(nodes):
            if self._role == TRAINER:
                self._make_trainer(init_method)
                is_on_gpu = self.trainer.ranks.device.type == "cuda"
                warnings += attention_warnings(self.trainer.model.attention, is_on_gpu=is_on_gpu)
            else:
                self._make_scorer(init_method)
        logger.info("%r started at %s", self, self._place)
        return warnings

    def _make_trainer(self, init_method: str) -> None:
        from asyncrl_cli.envs.chat import render_prompts
        from asyncrl_cli.train.policy_trainer import PolicyTrainer
        from asyncrl_cli.weights.directory import versions_at
        from asyncrl_cli.weights.directory_buckets import DirectorySender
        from asyncrl_cli.weights.senders import DeltaSender, DeltaTransport, HeldVersions

        def with_deltas(sender: DeltaTransport) -> Sender:
            return DeltaSender(sender) if sends_deltas(self._profile) else sender

        self.trainer = PolicyTrainer(
            self._profile,
            self._place,
            rank=self._rank,
            init_method=init_method,
            total_optimizer_steps=Schedule.of(self._profile).optimizer_steps,
            probe_text=list(chain.from_iterable(render_prompts(self.tokenizer, self._probe_items))),
            scoring=self._trainer_meter.scoring,
        )
        self._end_ranks = self.trainer.close
        weights = self._profile.weights
        if self._rank > 0 or weights.transport == "object-store":
            sender: Sender = with_deltas(ObjectStoreSender())
        elif weights.transport in FILE_TRANSPORTS:
            sender = with_deltas(DirectorySender(versions_at(weights, self._run_dir)))
        else:  # with `nccl` and `ipc` the buckets stay here until a worker asks for them (`direct`)
            sender = held = HeldVersions()
            make_end = kind_of(self._profile).rank_zero_end
            assert make_end is not None, "the profile's checks let only engines with these transports pass"
            self._direct_end = make_end(weights, held, self.trainer.ranks.device)
        # comparing with the version before would slow the gather down, for which only `sync` makes up
        overlap = weights.overlap and not (sends_deltas(self._profile) and weights.mode == "async")
        in_memory = weights.transport not in FILE_TRANSPORTS
        self._sending = Sending(sender, overlap=overlap, in_memory=in_memory)

    def _make_scorer(self, init_method: str) -> None:
        role, profile, place = self._role, self._profile, self._place
        if role in profile.task.scorers:  # its processes do not work together, nor do a reward model's
            scorer = place.scorers[role].load()
            self._scorer: PolicyModel | CriticApart | RewardModel | Teachers = scorer(profile, place)
            return
        self._whole = merging(profile, place) if role == PROX else iter
        if role == REWARD:
            from asyncrl_cli.train.reward_model import RewardModel

            decode = partial(self.tokenizer.decode, skip_special_tokens=True)
            self._scorer = RewardModel(profile, place, decode)
            return
        from asyncrl_cli.train.critic import CriticApart
        from asyncrl_cli.train.policy_model import frozen_model
        from asyncrl_cli.train.ranks import Ranks
        from asyncrl_cli.train.teachers import Teachers

        ranks = Ranks(profile, place, rank=self._rank, init_method=init_method)
        self._end_ranks = ranks.close
        if role == CRITIC:
            self._scorer = self._critic = CriticApart(profile, place, ranks)
        elif role == TEACHER:
            self._scorer = teachers = Teachers(profile, place, ranks)
            self._fixed_logprob = teachers.fixed_logprob
        else:
            self._scorer = self._frozen = frozen_model(role, profile, place, ranks)
            self._fixed_logprob = self._frozen.fixed_logprob

    @ray.method(concurrency_group="main")
    def fixed_logprob(self) -> float:
        """Of the reference, or of the teachers: what identifies their weights."""
        return self._fixed_logprob()

    @ray.method(concurrency_group="main")
    def add_frozen_logprobs(self, logprobs: Mapping[str, float]) -> None:
        """Those of the scorers, which the trainer's checkpoints have and are compared with."""
        self.trainer.frozen_logprobs |= logprobs

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from asyncrl_cli.envs.chat import load_tokenizer

        return load_tokenizer(self._place.model_dir, trust_remote_code=self._profile.model.trust_remote_code)

    @ray.method(concurrency_group="main")
    def shares_prefixes(self) -> bool:
        """Trainer and critic: whether the models compute once what trajectories share."""
        return (self._critic if self._role == CRITIC else self.trainer).shares

    @ray.method(concurrency_group="main")
    def stop(self) -> None:
        self._end_ranks()

    @ray.method(concurrency_group="control")
    def report(self) -> ExecutorReport:
        return self._report()

    def _report(self) -> ExecutorReport:
        report = self._meter.report()
        return replace(report, sums={**report.sums, **self._store.traffic.sums})

    # --- trainer and critic: they learn, and have state in checkpoints

    @ray.method(concurrency_group="main")
    def train(
        self,
        step: int,
        step_in_window: int,
        dumped: Sequence[int],
        plan: RankPlan,
        names: Sequence[str],
        groups: Sequence[Keys],
    ) -> tuple[TrainReport, ExecutorReport]:
        """One train step on the groups of `plan.groups`, whose data is in `groups`. `names`: fields that
        scorers have added to it. `dumped`: groups of which `loss_fields` is asked for."""
        began_s = time.monotonic()
        with self._meter.doing(State.BUSY):
            fields = [
                *REQUIRED,
                *POLICY_FIELDS,
                *names,
                *(field.name for field in self._store.schema.in_losses),
            ]
            payloads = dict(zip(plan.groups, self._payloads(groups, fields), strict=True))
            if self._role == CRITIC:
                report = self._critic.learn(plan, payloads, names)
            else:
                report = self.trainer.train(
                    step_in_window=step_in_window,
                    plan=plan,
                    payloads=payloads,
                    columns=names,
                    dumped=dumped,
                )
        if self._role == TRAINER:
            busy_s, gauges = time.monotonic() - began_s, {"step": step}
            self._meter.add(busy_s=busy_s, trained_tokens=report.tokens, gauges=gauges)
        return report, self._report()

    def _payloads(self, groups: Sequence[Keys], fields: Collection[str] | None = None) -> list[GroupPayload]:
        """The groups' trajectories, with these fields."""
        found = iter(self._store.get([*chain.from_iterable(groups)], fields))
        payloads = []
        for keys in groups:
            uid, epoch, attempt = attempt_of(keys[0].key)
            whole = tuple(chain.from_iterable([next(found) for _ in keys]))
            payloads.append(GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=whole))
        return payloads

    @ray.method(concurrency_group="main")
    def snapshot(self, step: int) -> None:
        with self._meter.doing(State.BUSY, "a checkpoint's snapshot"):
            (self._critic if self._role == CRITIC else self.trainer).snapshot(step)

    @ray.method(concurrency_group="write")
    def write(
        self, directory: str, snapshot: LoopSnapshot, whole: Sequence[Keys], partial: Sequence[Stored]
    ) -> None:
        """Write the snapshot of the loop's step to `directory`; the trainer's rank 0 adds the data of
        untrained groups: `whole` and `partial` are the snapshot's `payloads` and `partial_tokens`."""
        from asyncrl_cli.checkpoint.payloads import write_payloads

        with as_storage_errors():
            if self._role == CRITIC:
                self._critic.write(snapshot.step, Path(directory))
                return
            self.trainer.write(snapshot.step, Path(directory), not snapshot.at_window_boundary)
            if self._rank == 0:
                by_key = dict(zip([one.key for one in partial], self._store.get(partial), strict=True))
                begun = joined_by_index(snapshot.partial_groups, by_key)
                write_payloads(Path(directory), [*self._payloads(whole), *begun], self._store.schema)

    @ray.method(concurrency_group="main")
    def restore(self, directory: str) -> None:
        with self._meter.doing(State.BUSY, "a checkpoint to be read"):
            if self._role == CRITIC:
                self._critic.restore(Path(directory))
            else:
                self.trainer.load(Path(directory))

    # --- trainer: versions of the weights

    @ray.method(concurrency_group="main")
    def gather(self, version: int, wanted: Sequence[int] = ()) -> tuple[float, ExecutorReport]:
        """Gather this version's weights. Returns the seconds, and this rank's report to save the loop another
        call.

        `wanted`: older versions that a worker may still ask for; a rank drops all others.
        """
        with self._trainer_meter.gathering():
            gather_s = self.trainer.gather(version, self._sending.of(version, wanted))
        return gather_s, self._report()

    @ray.method(concurrency_group="publish")
    def publish(self, version: int) -> tuple[Manifest, Refs]:
        """Send the gathered buckets of this rank. Returns their manifest and the refs by which workers get
        the buckets."""
        from asyncrl_cli.weights.senders import keep_version

        with self._trainer_meter.update.doing(State.SENDING, "buckets to be sent"):
            manifest, buckets = self.trainer.published(version)
            refs = self._sending.sent(manifest, buckets)
            if (num_kept := self._profile.weights.keep_versions) and self._rank == 0:
                with as_storage_errors():
                    versions, model_dir = self._run_dir / VERSIONS, Path(self._place.model_dir)
                    keep_version(versions, manifest, buckets, model_dir, num_kept)
            return manifest, refs

    @ray.method(concurrency_group="direct")
    def direct(self, call: str, worker: str, *args: object) -> object:
        """Rank 0: call `join`, `turn`, `broadcast` or `export` of the engine's `EngineKind.rank_zero_end` for
        `worker`."""
        sends = call in ("broadcast", "export")
        with self._trainer_meter.update.doing(State.SENDING, worker) if sends else nullcontext():
            return getattr(self._direct_end, call)(worker, *args)

    @ray.method(concurrency_group="control")
    def leave(self, worker: str) -> None:
        self._direct_end.leave(worker)

    # --- trainer: samples for the user

    @ray.method(concurrency_group="main")
    def logprobs(self, indices: Sequence[int], groups: Sequence[Keys]) -> Column:
        """Logprobs of these groups' sampled tokens under the current weights. A collective: a rank has its
        own groups, or none."""
        with self._meter.doing(State.BUSY, "samples to be scored"):
            payloads = self._payloads(groups, POLICY_FIELDS)
            return self.trainer.model.column(dict(zip(indices, payloads, strict=True)))

    @ray.method(concurrency_group="main")
    def loss_fields(self) -> LossFields:
        """What the loss has written in the last train step, of the groups to dump."""
        return self.trainer.loss_fields

    @ray.method(concurrency_group="write")
    def dump(
        self,
        directory: str,
        step: int,
        window: int,
        facts: Mapping[int, SampleFacts],
        groups: Sequence[Keys],
        loss_fields: list[ObjectRef],
        *columns: Column,
    ) -> None:
        """Rank 0: write trajectories of a train step as text lines, beside training.

        `facts`: of each chosen group, by its index in the step, in the order of `groups`. `loss_fields`:
        every rank's. `columns`: the logprobs that the ranks have computed, if any.
        """
        logprobs = {index: arrays for column in columns for index, arrays in column.items()}
        written: dict[int, dict[int, Arrays]] = {}
        for (index, trajectory), arrays in chain.from_iterable(one.items() for one in ray.get(loss_fields)):
            written.setdefault(index, {})[trajectory] = arrays
        schema = self._store.schema
        shown = [field.name for field in schema.values() if field.in_samples]
        sampled = [
            SampledGroup(
                payload=payload, logprobs=logprobs.get(index), loss_fields=written.get(index, {}), **known
            )
            for payload, (index, known) in zip(self._payloads(groups, shown), facts.items(), strict=True)
        ]
        decode, most = self.tokenizer.decode, self._profile.logging.samples_max_mb * MIB
        path = Path(directory)
        with as_storage_errors():
            dump_samples(path, step, sampled, window=window, decode=decode, max_bytes=most, schema=schema)

    @ray.method(concurrency_group="write")
    def record(
        self,
        directory: str,
        batch: TrainBatch,
        advantages: Sequence[Sequence[float | None]],
        groups: Sequence[Keys],
    ) -> None:
        """Rank 0: write all trajectories of a train step as arrays, beside training. `batch` without keys."""
        with as_storage_errors():
            write_step(Path(directory), batch, self._payloads(groups), advantages, self._store.schema)

    # --- scorers

    @ray.method(concurrency_group="main")
    def load(self, manifest: Manifest, bucket_refs: Refs) -> None:
        """`prox`: fetch a version's buckets and load this process's part of it."""
        with self._meter.doing(State.LOADING, "weights"):
            self._frozen.load(manifest, self._whole(arriving(manifest, bucket_refs)))

    @ray.method(concurrency_group="main")
    def score(self, num_tokens: int, items: Sequence[Item], groups: Sequence[Keys], most: int) -> object:
        """Adds this process's column to the groups' data. Returns its report and what it has added, and
        `most` further Ray objects; or its report and the rewards. `num_tokens`: sampled tokens that all
        processes together score in this call."""
        with self._meter.doing(State.BUSY):
            is_users = self._role in self._profile.task.scorers
            needs = {CRITIC: SCORED_FIELDS, REWARD: SCORED_FIELDS, PROX: POLICY_FIELDS}
            fields = needs.get(self._role, LOGPROB_FIELDS)
            payloads = self._payloads(groups, None if is_users else fields)
            try:
                columns = self._scorer.score(payloads, items)
            except Exception as error:
                if not is_users:
                    raise
                code = f'task.scorers.{self._role} = "{self._profile.task.scorers[self._role]}"'
                raise AsyncrlError(f"{code} failed: {describe(error)}") from error
            self._meter.add(scored_tokens=num_tokens)
            added = [] if self._role == REWARD else [*self._added(groups, payloads, columns)]
        report = self._report()
        if self._role == REWARD:
            return report, columns
        heads, objects = shipped(added, most)
        return ((report, heads), *objects) if most else (report, heads)  # Ray: as many as the call asked for

    def _added(
        self, groups: Sequence[Keys], payloads: Sequence[GroupPayload], columns: Sequence[Sequence[object]]
    ) -> Iterator[Stored]:
        """Add a column to the store: of each group an array for each trajectory. Raises ValueError if it is
        not as declared."""
        declared = self._store.schema[self._role]
        for keys, payload, column in zip(groups, payloads, columns, strict=True):
            pairs = zip(column, payload.trajectories, strict=True)
            left = iter([declared.array_of(values, one.num_sampled) for values, one in pairs])
            for key in keys:
                arrays = [*islice(left, key.num_trajectories)]
                yield self._store.add(key._replace(pieces=()), self._role, arrays)

    @ray.method(concurrency_group="main")
    def judge(self, items: Sequence[Item], key: Stored) -> list[float]:
        """The reward model's scores of an eval's trajectories."""
        with self._meter.doing(State.BUSY):
            (found,) = self._store.get([key], SCORED_FIELDS)
            groups = [
                GroupPayload(uid="", epoch=0, attempt=i, trajectories=(t,)) for i, t in enumerate(found)
            ]
            return [score for (score,) in self._scorer.score(groups, items)]


def attention_warnings(attention: str, *, is_on_gpu: bool) -> list[str]:
    return [EAGER] if is_on_gpu and attention != "sdpa" else []


@contextmanager
def naming_nodes(nodes: Sequence[str]) -> Iterator[None]:
    """Add each missing rank's node to the error about missing ranks. `nodes`: the node of every rank."""
    from asyncrl_cli.train.ranks import RanksMissing

    try:
        yield
    except RanksMissing as missing:
        where = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in missing.ranks)
        raise ExecutorFailed(f"{missing.cause}: {where}", hint=missing.hint) from missing

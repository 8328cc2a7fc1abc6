"""What the trainer's ranks and a scorer's processes have in common: the actor of one process, and all
processes as one executor.

    driver    RayRanks: makes the same calls to every process, in the same order, and collects all answers
    process   RankActor: group `main`, one thread, for joint computation; group `control` for calls that are answered at once

A process gets its share of a train step as arguments of a call (`_shares`, `taken`): its plan, and the
columns and parts of the plan's groups. Ray delivers the arguments before the call begins: small ones with the
call, large ones through the object store. A `ray.get` of each would be a call to its owner.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.prompt_group import GroupResult
from asyncrl_cli.contracts.train_step import TrainBatch
from asyncrl_cli.contracts.trajectories import GroupPayload, joined
from asyncrl_cli.job.calls import Limit, all_of, shown_host, start_limit
from asyncrl_cli.job.process import no_collection_while_starting, set_up_process
from asyncrl_cli.loop.worker_tasks import CALL_KEY
from asyncrl_cli.measure.meters import CallMeter
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.plan.cluster import LOOPBACK
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train.step_plan import RankPlan, plan_train_step, training_order
from asyncrl_cli.weights.versions import TIMEOUT_KEY as WEIGHTS_KEY

if TYPE_CHECKING:  # torch: the driver imports this module
    from asyncrl_cli.train.batch import Columns

logger = logging.getLogger(__name__)


class RankActor(ABC):
    """One process. `THREADS`: per concurrency group. `NEEDS`: the module that `start` needs. `ROLE`, `INPUT`:
    for its report."""

    THREADS: ClassVar[Mapping[str, int]] = {"main": 1, "control": 1}
    NEEDS: str
    ROLE: ClassVar[str]
    INPUT: ClassVar[str]

    def __init__(self, name: str, rank: int, profile: Profile, place: ProcessPlace, log_path: Path) -> None:
        set_up_process(threads=place.threads, log_path=log_path)
        self._name = name
        self._rank = rank
        self._profile = profile
        self._place = place
        self._meter = CallMeter(name, self.ROLE, self.INPUT, time.monotonic)

    def __repr__(self) -> str:
        return f"{self._name}-{self._rank}"

    @ray.method(concurrency_group="control")
    def meeting_point(self) -> str:
        """An address on this process's node. In a local session it is a file: torch would listen on all
        interfaces."""
        host = ray.util.get_node_ip_address()
        if host == LOOPBACK:
            return f"file://{tempfile.mkdtemp(dir=ray._private.worker._global_node.get_session_dir_path())}/ranks"
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
        with no_collection_while_starting():
            import_module(self.NEEDS)
        return str(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="main")
    def start(self, init_method: str, nodes: Sequence[str]) -> list[str]:
        """Join the other processes and load the model. `nodes`: the node of every process. Returns warnings
        for the user."""
        with no_collection_while_starting(), naming_nodes(nodes):
            self._start(init_method)
        logger.info("%r started at %s", self, self._place)
        return self._warnings()

    def _warnings(self) -> list[str]:
        """Of the start; the same text on all processes that have the same to say."""
        return []

    @abstractmethod
    def _start(self, init_method: str) -> None:
        """Join the other processes and create the trainer or scorer."""

    @ray.method(concurrency_group="control")
    def report(self) -> ExecutorReport:
        return self._meter.report()


@contextmanager
def naming_nodes(nodes: Sequence[str]) -> Iterator[None]:
    """Add each missing rank's node to the error about missing ranks. `nodes`: the node of every rank."""
    from asyncrl_cli.train.ranks import RanksMissing

    try:
        yield
    except RanksMissing as missing:
        where = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in missing.ranks)
        raise ExecutorFailed(f"{missing.cause}: {where}", hint=missing.hint) from missing


class RayRanks(ABC):
    """All processes of the trainer or of a scorer as one executor."""

    def __init__(self, name: str, actors: Sequence[Any], profile: Profile) -> None:
        self.name = name
        self.actors = list(actors)
        self._profile = profile
        self._calls = Limit(profile.rollout.call_timeout_s, CALL_KEY)
        self._weights = Limit(profile.weights.timeout_s, WEIGHTS_KEY)
        self._starts = start_limit(profile)
        self._steps = Limit(profile.trainer.step_timeout_s, "trainer.step_timeout_s")
        self._checkpoints = Limit(profile.checkpoint.timeout_s, "checkpoint.timeout_s")
        self._hosts: dict[int, str] = {}
        self.warnings: list[str] = []
        """Of the last start, for the user."""

    async def prepare(self) -> list[str]:
        """Wait until every process exists and has imported what it needs; none uses its device yet. Returns
        their nodes."""
        return await self.collective("its imports", "prepare", limit=self._starts)

    async def start(self) -> None:
        self._hosts = {}
        nodes = await self.prepare()
        init_method = await self._answer(
            self.actors[0].meeting_point.remote(), "its start", limit=self._starts
        )
        answers = await self.collective("its start", "start", init_method, nodes, limit=self._starts)
        self.warnings = list(dict.fromkeys(chain.from_iterable(answers)))
        self._hosts = {rank: shown_host(node) for rank, node in enumerate(nodes)}

    async def report(self) -> ExecutorReport:
        return await self._answer(self.actors[0].report.remote(), "a report", limit=self._calls)

    async def stop(self, timeout_s: float) -> None:
        await self.collective("its shutdown", "stop", limit=Limit(timeout_s))

    async def collective(self, call: str, method: str, *args: Any, limit: Limit | None = None) -> list[Any]:
        """Call `method` on all processes and return their answers. `call`: its name in errors; `limit`:
        `weights.timeout_s`."""
        return await self._answers(
            call, [getattr(actor, method).remote(*args) for actor in self.actors], limit or self._weights
        )

    def _shares(
        self, batch: TrainBatch, names: Sequence[str]
    ) -> tuple[list[GroupResult], list[RankPlan], list[list[Any]]]:
        """Returns the batch's groups in training order, each process's plan, and the arguments of its call:
        the plan, `names`, the handles of each named column for the plan's groups, and the handles of these
        groups' parts."""
        minibatches, seed = self._profile.async_training.require_batches, self._profile.run.seed
        groups = training_order(batch.groups, num_minibatches=minibatches, seed=seed, step=batch.step)
        plans = plan_train_step(
            groups, self._profile, ranks=len(self.actors), step=batch.step, window=batch.window
        )
        given: list[list[Any]] = []
        for plan in plans:
            own = [groups[index] for index in plan.groups]
            columns = [batch.columns[group.key][name] for name in names for group in own]
            given.append([plan, names, *columns, *chain.from_iterable(group.payload for group in own)])
        return groups, plans, given

    async def _answers(self, call: str, refs: Sequence[Any], limit: Limit) -> list[Any]:
        return await all_of(self._answer(ref, call, rank, limit) for rank, ref in enumerate(refs))

    @abstractmethod
    async def _answer(self, ref: Any, call: str, rank: int = 0, limit: Limit | None = None) -> Any:
        """Await the answer of a process. By default within `rollout.call_timeout_s`."""


def taken(
    plan: RankPlan, names: Sequence[str], values: Sequence[Any]
) -> tuple[dict[int, GroupPayload], Columns]:
    """Payloads by group and columns by name, from the values of the arguments that follow `names`
    (`RayRanks._shares`)."""
    groups, left = plan.groups, iter(values)
    columns = {name: {group: next(left) for group in groups} for name in names}
    return dict(zip(groups, joined(left), strict=True)), columns

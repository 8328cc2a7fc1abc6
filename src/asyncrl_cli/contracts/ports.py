"""The ports of the loop: what the loop asks of the outside world, and the values that it exchanges with it.

Adapters implement the Protocols: `job/` on Ray actors, `simulate/` on a virtual clock. Every call may raise
`ExecutorFailed`; adapters put a timeout on every call and name the executor in the error. (`evaluate` and the
drain of a `load` have none, because they take as long as the responses: `next_update` shows whether the
worker still works.) Values are small: the arrays of groups are in a store (`DataStore`), and the loop has
their keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from asyncrl_cli.contracts.item import Item
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    DataKey,
    GroupResult,
    PartialResponse,
    PartKey,
    PartRequest,
    PartResult,
    Prompt,
    TrainBatch,
    TrainReport,
    TrajectoryFailure,
    TrajectoryMeta,
)
from asyncrl_cli.contracts.weight_version import LoadReport, Published
from asyncrl_cli.measure.states import ExecutorReport
from asyncrl_cli.profile.schema import Interrupt

CALL_KEY = "rollout.call_timeout_s"
"""The limit of most calls to a worker or scorer, as messages name it."""
LONGEST_TEXT = 4000
"""Characters of a prompt, or of an answer, that an eval's event has."""
Json = dict[str, Any]
"""State that JSON can hold."""


class EvalTry(NamedTuple):
    """One trajectory of an eval: sample `sample` of an item. `eval_set`: a name in `eval.sets`, or "" for the
    held-out split. `is_shown`: people read it, so its text is wanted."""

    item: Item
    eval_set: str = ""
    sample: int = 0
    is_shown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Generate and score `tries` with the weights of `version`. One eval makes many such requests."""

    version: int
    tries: tuple[EvalTry, ...]
    seed: int


EvalOutcome = TrajectoryMeta | TrajectoryFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """`outcomes`: one per try of the request, in order. `payload`: the key of the data of the tries that
    have not failed, for a reward model. `texts`: what the model wrote in the tries that are shown and have
    not failed, by their position."""

    outcomes: tuple[EvalOutcome, ...]
    texts: Mapping[int, str] = field(default_factory=dict)
    payload: DataKey | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUpdate:
    """What changed on a worker. Pass `seen` to the next call.

    `freed_slots`: how many responses of each running part need no slot now, because they have ended or
    (`rollout.hold_slots = false`) wait for their environment; parts with no such response are left out.
    `ended`: the results of parts that have ended; each result is returned once.
    """

    seen: int
    freed_slots: Mapping[PartKey, int]
    reports: tuple[ExecutorReport, ...]
    ended: tuple[PartResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialResult:
    """What the running parts of a worker have generated so far. `responses`: those that another worker can
    continue, by part and index; `keys`: of the tokens of each of these parts, which the caller clears. (The
    last parts may have none: their responses have not begun here, and continue from what they were given.)
    `rest_tokens`: the number of tokens of all others, which would start again. `stopped`: the parts that a
    `pause` has stopped, of which the worker returns no results."""

    responses: Mapping[PartKey, Mapping[int, PartialResponse]] = field(default_factory=dict)
    rest_tokens: int = 0
    keys: tuple[DataKey, ...] = ()
    stopped: tuple[PartKey, ...] = ()


class RolloutWorker(Protocol):
    """One rollout worker: an engine, its group runner and its rewards."""

    name: str
    slots: int

    def submit(self, request: PartRequest) -> None:
        """Start a part and return at once. The part runs through any number of weight loads; `next_update`
        returns its result. If the worker has failed, `next_update` raises the error."""

    async def partial_responses(self) -> PartialResult:
        """Return what the running parts have generated, for a checkpoint. Answers within seconds or fails."""

    async def abort(self, key: AttemptKey) -> None:
        """Stop all parts of a group. `next_update` soon returns their results, without trajectories. Unknown
        keys are ignored."""

    async def next_update(self, seen: int) -> WorkerUpdate:
        """Return when something changed since `seen` (at most every 100 ms while parts run), or after one
        second at the latest.

        The loop always has one of these calls in flight, so an adapter may send requests and results of parts
        along with it.
        """

    async def prefetch(self, published: Published) -> float:
        """Receive and check the buckets into the second buffer while generation goes on. Returns seconds.

        Refuses a version that is not newer than the one that the worker holds or has received. Without a
        second buffer (`weights.dual_buffer = false`), or if they come from the trainer's GPU (`nccl`, `ipc`),
        the buckets are only noted, and `load` fetches them.
        """

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        """Interrupt, copy the prefetched weights in, resume, score the probes. If it fails, the old version
        stays, or the worker is lost. `interrupt`: running responses end first (`drain`), or freeze and then
        continue with the new weights (`keep-kv`, `recompute-kv`)."""

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Generate and reward the request's tries, beside the running groups. The loop begins no load
        meanwhile."""

    async def abort_evals(self) -> None:
        """Stop the running `evaluate` calls. They soon return, but the eval has no result."""

    async def pause(self) -> PartialResult:
        """Give the resources to the trainer. Colocate: before a window's first train step, when nothing runs.
        A lent worker stops what runs, and forgets its weights."""

    async def resume(self) -> None:
        """Take the resources: in colocate after the window's gather, as a lent worker before a load."""

    async def end(self) -> None:
        """End a lent worker that has failed, for good. Its processes have left their device then; raises
        ExecutorLost if they do not."""

    async def node_is_gone(self) -> bool:
        """After the loss of this worker: whether its node is gone too, and with it the arrays of all parts
        that had ended there."""

    async def restart(self) -> None:
        """End this worker for good and start another in its place: same name and slots, nothing running,
        nothing paused.

        Calls to the old worker fail. The new one holds initial weights, which the loop replaces before it
        asks for anything else. Raises NoRoom if the cluster has no place for it; the call may be repeated
        later.
        """


class Scorer(Protocol):
    """All processes of one scorer as one, if its column has processes of its own (`placement.tasks`); else
    the trainer computes the column. While other groups are trained, it computes a number for every sampled
    token of finished groups (`reward`: for every trajectory). `load`, `judge` and `learn` are each called on
    one kind of scorer only.

    A critic with processes of its own is never restarted: what it has learned is saved in the trainer's
    checkpoints only, and is lost with its process.

    `name` names both executor and column: `ref`, `teacher`, `prox` and so on. `call_tokens`: how many tokens
    of prompts and responses fill one call.
    """

    name: str
    call_tokens: int

    async def load(self, published: Published) -> None:
        """`prox` only: load a version's weights and score with them from now on. (Those of `ref` and `reward`
        never change.)"""

    async def score(
        self, groups: Sequence[GroupResult], items: Sequence[Item]
    ) -> tuple[Sequence[tuple[float, ...]], ExecutorReport]:
        """Add the groups' columns to their data. `reward` returns the scores themselves, one per trajectory
        of each group; the others return nothing for each. `items`: the groups' prompts."""

    async def judge(self, result: EvalResult, items: Sequence[Item]) -> Sequence[float]:
        """`reward` only: score the trajectories of an eval that have not failed, in order. `items`: their
        prompts."""

    async def learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        """`critic` only: make its optimizer steps on the groups that the trainer trains. Later scores use the
        updated critic."""

    async def report(self) -> ExecutorReport: ...

    async def restart(self) -> None:
        """End this scorer's processes for good and start others in their place. Calls to the old ones
        fail."""


class Trainer(Protocol):
    """All trainer ranks as one."""

    async def train(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        """Plan the step from the metadata (advantages, if they need no values per token; which rank trains
        what), and make the optimizer steps on its groups."""

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        """Copy the full parameters into host buckets as `version` and score the probes; stalls training.
        Returns its seconds."""

    async def publish(self, version: int) -> Published:
        """Hand out the gathered buckets; runs beside training."""

    async def snapshot(self, step: int) -> None:
        """Copy what a checkpoint needs to the host, including a separate critic's state (stalls training)."""

    async def report(self) -> ExecutorReport: ...


class DataStore(Protocol):
    """The driver's directory of all data of groups (data/store.py)."""

    def clear(self, keys: Iterable[DataKey]) -> None:
        """Forget keys, at once or soon after nothing pins them. Unknown ones are ignored. Never waits."""

    def pinned(self, keys: Collection[DataKey]) -> AbstractContextManager[object]:
        """The data of these keys outlives a `clear` until the end of the block."""

    async def keys(self) -> Collection[DataKey]:
        """All keys that hold memory and are not cleared, also those of a worker that died before it could
        report them."""

    def stats(self) -> Mapping[str, int]:
        """How many `keys` and `bytes` the driver knows of. Never waits."""


class Feed(Protocol):
    """An endless supply of prompts, shuffled per epoch. A resumed run neither repeats nor skips a prompt."""

    def next(self) -> Prompt: ...

    def find(self, uid: str, epoch: int) -> Prompt:
        """Return a prompt that `next` returned earlier, in this run or the one it resumes. RefusedError for
        an unknown uid."""

    def state(self) -> Json:
        """The feed's position as JSON: `restore` continues after exactly the prompts that `next` has
        returned."""

    def restore(self, state: Json) -> None: ...

    def ended(self, group: GroupResult) -> None:
        """A group has its rewards: which prompts come next may depend on them."""

    def figures(self) -> Mapping[str, float]:
        """The feed's metrics now, by name."""


class CheckpointWriter(Protocol):
    """Writes the loop's snapshot, and the trainer's of the same step, as a directory. The loop makes one call
    at a time, beside training; a failed write raises."""

    async def write(self, snapshot: LoopSnapshot) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSnapshot:
    """The loop's part of a checkpoint: the run between an optimizer step and the next take, frozen in one
    turn of the event loop.

    `at_window_boundary`: no group of the window is taken, so the trainer's weights are those of `version`.
    `loop_state` is JSON, with all that the driver knows of the untrained groups. `payloads`: the keys of each
    finished group, then of each ended part of a running group, in the same order. `partial_groups`: the
    running groups with responses that a resumed run continues, and the keys of these responses' tokens, by
    index. The loop pins all keys until they are written.
    """

    step: int
    version: int
    at_window_boundary: bool
    loop_state: Json
    payloads: tuple[tuple[DataKey, ...], ...] = ()
    partial_groups: Mapping[AttemptKey, Mapping[int, DataKey]] = field(default_factory=dict)

    @property
    def partial_tokens(self) -> tuple[DataKey, ...]:
        """The keys in `partial_groups`, each once."""
        return tuple(dict.fromkeys(key for keys in self.partial_groups.values() for key in keys.values()))

"""The ports of the loop: what the loop asks of the outside world, and the values that are exchanged.

Adapters implement the Protocols: `job/` on Ray actors, `simulate/` on a virtual clock. Every call may raise
`ExecutorFailed`; adapters put a timeout on every call and name the executor in the error. (There is none on `evaluate` and the
drain of a `load`, which take as long as the responses: the loop sees from `progress` whether the worker still works.)
Values are small: token payloads stay behind the opaque `payload` / `handle` fields, which the loop passes on and never opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from asyncrl_cli.loop.attempts import AttemptKey, Failure, GroupResult, Kept, PartKey, PartResult, Prompt, TrajectoryMeta
from asyncrl_cli.loop.states import ExecutorReport
from asyncrl_cli.loop.values import Value
from asyncrl_cli.profile.schema import Interrupt

LoadVerdict = Literal["loaded", "not loaded", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """Generate and reward some responses of a group, by their index in it (ascending).

    `seed` is the group's: response i uses the i-th number that it yields, so its sampling does not depend on where it runs.
    `goes_on`: what responses of a resumed group go on from, by index; `so_far` is the handle of the tokens.
    """

    key: PartKey
    item: Mapping[str, Any]
    indices: tuple[int, ...]
    seed: int
    goes_on: Mapping[int, Kept] = field(default_factory=dict)
    so_far: Any = None


class EvalTry(NamedTuple):
    """One trajectory of an eval: sample `sample` of an item. `eval_set`: a name in `eval.sets`, or "" for the held-out split."""

    item: Mapping[str, Any]
    eval_set: str = ""
    sample: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Play `tries` with the weights of `version`; part of one eval."""

    version: int
    tries: tuple[EvalTry, ...]
    seed: int


EvalOutcome = TrajectoryMeta | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """`outcomes`: of the request's tries, in their order. `payload`: handle of the tokens of those that have not failed."""

    outcomes: tuple[EvalOutcome, ...]
    payload: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What changed on a worker. `seen` goes into the next call.

    `freed_slots`: how many responses of each running part need no slot now, because they have ended or (`rollout.hold_slots =
    false`) wait for their environment; parts without any are left out. `ended`: the results of the parts that have ended, each in
    one answer only.
    """

    seen: int
    freed_slots: Mapping[PartKey, int]
    reports: tuple[ExecutorReport, ...]
    ended: tuple[PartResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """What the running parts of a worker have so far. `kept`: by part and index, the responses that a resumed run can go on with;
    `rest_tokens`: of those that would start again; `handle`: of the tokens."""

    kept: Mapping[PartKey, Mapping[int, Kept]] = field(default_factory=dict)
    rest_tokens: int = 0
    handle: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One version's weights, ready to be sent. `handle` is the transport's (Ray object refs and a manifest)."""

    version: int
    num_bytes: int
    publish_s: float
    handle: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One worker's load. `pause_s`: how long no sequence ran; `send_s`: the part of it in which weights were fetched (0 with a
    second buffer, which is filled before); `logprob_abs_diff`: trainer against worker on the probe sequences, if scored; `verdict`
    and `loaded_share`: where the worker's logprobs lie between those of the version before and of this one, if both were known
    (weights/versions.py)."""

    version: int
    send_s: float
    load_s: float
    pause_s: float
    logprob_abs_diff: float | None
    verdict: LoadVerdict | None = None
    loaded_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The R groups of one train step, in take order. `window` is the version they are trained in. `columns`: handles of what
    scorers have computed for each group, by scorer."""

    step: int
    window: int
    step_in_window: int
    groups: tuple[GroupResult, ...]
    columns: Mapping[AttemptKey, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What a train step reports. Seconds are the trainer's, or one rank's: `train_s`, and `column_s` for the columns that were
    computed before training, by name (`old_logprob`, `ref`, `values`). `tokens` (sampled tokens trained, also by skipped steps) and
    `metrics` are of all ranks; `metrics` are typed and finite, and go into the step's line unchanged.

    `skipped_steps`: its optimizer steps that were skipped because the gradient was not finite; metrics that this spoils are
    absent. `skipped_in_a_row`: how many of the run's latest optimizer steps in a row were skipped, across train steps."""

    train_s: float
    tokens: int
    metrics: Mapping[str, Value]
    column_s: Mapping[str, float] = field(default_factory=dict)
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


class RolloutWorker(Protocol):
    """One rollout worker: an engine, its group runner and its rewards."""

    name: str
    slots: int

    def submit(self, request: PartRequest) -> None:
        """Begin a part, which runs to its end through any number of weight loads; `progress` brings its result. Returns at once; if
        the worker has failed, `progress` says so."""

    async def so_far(self) -> SoFar:
        """What its running parts have, for a checkpoint; answered within seconds or not at all."""

    async def abort(self, key: AttemptKey) -> None:
        """Stop all parts of a group; their results come soon after, without trajectories. Unknown keys are ignored."""

    async def progress(self, seen: int) -> Progress:
        """Return when something changed since `seen` (at most every 100 ms), or after one second at the latest.

        The loop always has one of these calls under way, so an adapter may send requests and results of parts along with it.
        """

    async def prefetch(self, published: Published) -> float:
        """Receive and check the buckets into the second buffer while generation goes on. Returns seconds.

        A version that is not newer than what the worker holds, or has received, is refused. Without a second buffer
        (`weights.dual_buffer = false`) the buckets are only noted, and `load` fetches them.
        """

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport:
        """Interrupt, copy the prefetched weights in, resume, score the probes. If it fails, the old version stays."""

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Generate one answer per item beside the running groups and reward it."""

    async def abort_evals(self) -> None:
        """Stop what `evaluate` runs; its calls return soon after, with what they have."""

    async def pause(self) -> None:
        """Colocate: give the resources to the trainer (nothing is running)."""

    async def resume(self) -> None:
        """Colocate: take the resources back."""

    async def node_is_gone(self) -> bool:
        """Whether this worker, which was lost, was lost with its node, and with it the arrays of all parts that had ended there."""

    async def restart(self) -> None:
        """End this worker for good and start another in its place: same name and slots, nothing runs, nothing is paused.

        Calls to the old worker fail. The new one holds initial weights, which the loop replaces before it asks for anything. Raises
        NoRoom if there is no place for it; it may be called again later.
        """


class Scorer(Protocol):
    """All processes of one scorer as one. It computes a number for every sampled token of finished groups, its column, while others
    are trained; `reward` a number for every trajectory. `load`, `judge` and `learn` are asked of one scorer each.

    What a critic has learned is in the trainer's checkpoints, and is lost with its process: it is never restarted.

    `name` is the executor's and the column's: `ref`, `prox`, `critic`, `reward`. `call_tokens`: how many tokens, of prompts and
    responses, fill it.
    """

    name: str
    call_tokens: int

    async def load(self, published: Published) -> None:
        """`prox`: take a version's weights; it scores with these from now on. The weights of others never change."""

    async def score(
        self, groups: Sequence[GroupResult], items: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Any], ExecutorReport]:
        """Handles of the groups' columns, in order; of `reward` the scores themselves, a tuple per group. `items`: the groups'
        prompts."""

    async def judge(self, result: EvalResult, items: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        """`reward`: the scores of an eval's trajectories that have not failed, in their order. `items`: their prompts."""

    async def learn(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        """`critic`: its optimizer steps on the groups that the trainer trains. It scores with what it has learned from then on."""

    async def report(self) -> ExecutorReport: ...

    async def restart(self) -> None:
        """End this scorer's processes for good and start others in their place. Calls to the old ones fail."""


class Trainer(Protocol):
    """All trainer ranks as one."""

    async def train(self, batch: TrainBatch) -> tuple[TrainReport, ExecutorReport]:
        """`require_batches` optimizer steps on the groups of one train step."""

    async def gather(self, version: int) -> tuple[float, ExecutorReport]:
        """Copy the full parameters into host buckets as `version` and score the probes; stalls training. Returns seconds, too."""

    async def publish(self, version: int) -> Published:
        """Hand out the gathered buckets; runs beside training."""

    async def snapshot(self, step: int) -> None:
        """Copy what a checkpoint needs to the host, also of a critic apart (stalls training)."""

    async def report(self) -> ExecutorReport: ...


class Feed(Protocol):
    """An endless supply of prompts, shuffled per epoch. A resumed run neither repeats nor skips a prompt."""

    def next(self) -> Prompt: ...

    def find(self, uid: str, epoch: int) -> Prompt:
        """A prompt that `next` returned earlier, in this run or in the one resumed. Raises RefusedError for an unknown uid."""

    def state(self) -> dict[str, Any]:
        """The feed's position as JSON: `restore` continues after exactly the prompts that `next` has returned."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


class CheckpointWriter(Protocol):
    """Writes a cut as a directory, with the trainer's snapshot of its step. Called once at a time, beside training; raises on
    failure."""

    async def write(self, cut: Cut) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The run between an optimizer step and the next take, frozen in one turn of the event loop.

    `loop_state` is JSON, with all that the driver knows of the untrained groups. Handles are pinned until written. `payloads`: of
    each finished group's parts, then of each ended part of a running group, in the same order. `kept`: the running groups with
    responses that a resumed run goes on with, whose tokens are among those of `so_far`.
    """

    step: int
    version: int
    at_window_boundary: bool
    loop_state: Mapping[str, Any]
    payloads: tuple[tuple[Any, ...], ...] = ()
    kept: tuple[AttemptKey, ...] = ()
    so_far: tuple[Any, ...] = ()

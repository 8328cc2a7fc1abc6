"""The engine port: what a rollout worker asks of an inference engine, and the values that cross. A profile's engine by its kind:
checked before it is made, and made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.plugins import engine_kind
from asyncrl_cli.profile.schema import Interrupt, Place, Profile, RolloutSection, WeightsSection

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.weights.buckets import Bucket
    from asyncrl_cli.weights.held import HeldVersions
    from asyncrl_cli.weights.versions import RankZero

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How responses are sampled.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `stop` strings end a response and stay in it.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    max_response_tokens: int
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_response_tokens < 1:
            raise ValueError(f"sampling out of range: {self}")

    @classmethod
    def of(cls, rollout: RolloutSection, temperature: float) -> Sampling:
        return cls(
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_response_tokens=rollout.max_response_tokens,
            stop=rollout.stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Response tokens only; the three lists have the same length.

    `logprobs` are of the temperature-scaled, untruncated distribution (of the unscaled one if greedy). `versions` are
    those of the weights that sampled each token.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseReport:
    """`load_s`: copying the weights; `pause_s`: how long no sequence ran; `fetch_s`: the part of that in which weights came in."""

    load_s: float
    pause_s: float
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """`logprobs` of the tokens 1, 2, ... of each sequence; `pause_s`: how long no sequence ran for it."""

    logprobs: list[list[float]]
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Further figures of an engine, by name: `sums` since its start, momentary `gauges`. An engine tells what it has.

    sums    preemptions: responses that lost their KV cache to others and had to compute it again
    gauges  kv_cache_usage: used share of the cache; engine_running, engine_waiting: the engine's own queues
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """An inference engine on one asyncio loop.

    Engines derive from this class, and may leave out `counters`, `connect`, `load_in_place`, `sleep` and `wake`.
    """

    slots: int
    running: int
    """Sequences now generating."""
    version: int
    """Of the weights it samples with right now."""
    sampled_tokens: int
    """Since the start."""
    decode_steps: int
    """Forward passes since the start that sampled a token: sampled_tokens / decode_steps is their mean batch."""
    stops_to_score: bool
    """Whether no sequence runs during `score`."""

    def counters(self) -> EngineCounters:
        return EngineCounters()

    def tokens_of(self, request_id: str) -> int:
        """Tokens so far of a request that waits or runs; 0 for others."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Ends all requests with an error."""

    async def generate(self, request_id: str, prompt_tokens: list[int], sampling: Sampling, seed: int) -> Completion:
        """Wait for a free slot (first come, first served) and sample a response.

        Raises ValueError for what the engine was not made for, ExecutorFailed once the engine has failed or is closed.
        """

    async def abort(self, request_id: str) -> None:
        """Its `generate` returns what it has, with finish reason `abort`. Unknown ids are ignored."""

    async def connect(self, rank_zero: RankZero) -> None:
        """For direct transports: agree with rank 0 on how weights come. After `start`, before the first load."""
        raise NotImplementedError

    def receive(self, buckets: Iterable[Bucket]) -> Mapping[str, torch.Tensor]:
        """Copy buckets, as they arrive, to where `load` takes them from, beside generation. In any thread; may take long."""

    async def load(self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt) -> PauseReport:
        """Swap the weights in place: what `receive` returned, or by a direct transport `AnnouncedWeights`. Always resumes.

        Names, shapes and kinds of dtypes are looked at before anything has changed: ValueError, and the old version goes
        on. (Damaged bytes are refused earlier, by their fingerprints.) A failure after that leaves layers of two versions
        in the model: it ends the engine, and what runs and what comes later raises ExecutorFailed.

        `drain`: start nothing, wait for the running ones. `keep-kv`: freeze, go on with the old KV cache.
        `recompute-kv`: freeze, go on with a cache rebuilt by the new weights.
        """

    async def load_in_place(self, fetch: Callable[[], Sequence[Bucket]], version: int, interrupt: Interrupt) -> PauseReport:
        """As `load`, with nothing held beside the model (`weights.dual_buffer = false`).

        `fetch` is called in a thread while no sequence runs. It returns all buckets, verified; what it raises is raised, and
        the old version goes on.
        """
        raise NotImplementedError

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        """Given tokens, scored by the current weights."""

    async def sleep(self) -> None:
        """The trainer has the device (colocate): lend it what memory can be lent. Nothing runs, and nothing comes before `wake`."""

    async def wake(self) -> None:
        """The device is back, with the weights that were there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What a worker takes, of an engine that manages memory by itself and lends it to the trainer on a shared GPU."""

    name: str
    batch_tokens: int
    """Of one forward pass, at most."""
    own_bytes: int
    """Host memory of the processes that it starts, with nothing loaded."""
    own_processes: str
    """Which processes these are."""
    num_caches: int
    """Processes on one device that have a KV cache each."""
    cache_bytes: int | None
    """Of one cache, where the engine is told; it then ignores `share`."""
    share: float
    """Of a device's memory, for all that the engine has there: the cache takes what the rest leaves."""
    default_share: float


def _fine(*args: object) -> None:
    """Nothing to refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What is known of an engine while none is made; importing it imports no inference library.

    An engine of another package is an entry point of `asyncrl.engines` that leads to one of these. Only `make` must be given.
    """

    make: Callable[[Profile, Place, Callable[[int], None]], Engine]
    """Not yet started. The last argument is called in the event loop with the number of generating sequences as it changes."""
    keys: frozenset[str] = frozenset()
    """Those of [rollout] that not every engine knows and this one does."""
    direct_transports: frozenset[str] = frozenset()
    """Values of `weights.transport` by which it takes weights from rank 0's GPU."""
    rank_zero_end: Callable[[WeightsSection, HeldVersions, torch.device], Any] | None = None
    """Of a direct transport: what serves the calls of `RankZero` on rank 0, each with the worker's name before its arguments."""
    loads_in_place: bool = False
    """Whether it does without a second buffer (`Engine.load_in_place`)."""
    memory: Callable[[Profile, str], EngineMemory | None] = lambda profile, device: None
    """What a worker takes on that device; None: the cache has half of what is free, as with the transformers engine."""
    conflicts: Callable[[Profile], Iterable[ConfigError]] = lambda profile: ()
    """What in a profile it cannot do."""
    check_arguments: Callable[[Profile, str], None] = _fine
    """ConfigError for arguments that it would refuse on that device."""
    check_here: Callable[[str], None] = _fine
    """PreflightError if it cannot run on this machine, on that device."""
    check_driver: Callable[[], None] = _fine
    """PreflightError for what breaks the driver of a job whose workers are on other machines."""


def kind_of(profile: Profile) -> EngineKind:
    kind: EngineKind = engine_kind(profile.rollout.engine)
    return kind


def make_engine(profile: Profile, place: Place, on_running: Callable[[int], None]) -> Engine:
    """Not yet started. Raises PreflightError if it cannot run on this machine."""
    kind = kind_of(profile)
    kind.check_here(place.device)
    return kind.make(profile, place, on_running)


def check_engine(profile: Profile, device: str, *, is_elsewhere: bool = False) -> None:
    """Raises PreflightError if the engine cannot run here, ConfigError if it would refuse its arguments.

    `is_elsewhere`: the workers run on the nodes of a cluster, and each looks on its own node when it starts.
    """
    kind = kind_of(profile)
    if is_elsewhere:
        kind.check_driver()
    else:
        kind.check_here(device)
        kind.check_arguments(profile, device)

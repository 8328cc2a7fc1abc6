"""The engine port: the `Engine` protocol that rollout workers call, and the values that cross it.

`EngineKind` describes an engine before one is made; `check_engine` and `make_engine` use it to check and make
a profile's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.base.named_code import engine_kind
from asyncrl_cli.measure.states import SlotInterval
from asyncrl_cli.profile.rollout_sections import RolloutSection, WeightsSection
from asyncrl_cli.profile.schema import Interrupt, ProcessPlace, Profile

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.weights.buckets import Bucket
    from asyncrl_cli.weights.senders import HeldVersions
    from asyncrl_cli.weights.versions import RankZero

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How responses are sampled.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 turn them off. They truncate in this order:
    temperature, min-p, top-k, top-p. `returns_kept`: the completion has the field KEPT_TOKENS, with the ids
    that truncation has kept of each token's distribution, and `logprobs` among these. A `stop` string ends a
    response and is kept in it.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    returns_kept: bool = False
    max_response_tokens: int
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_truncation = 0 < self.top_p <= 1 and 0 <= self.min_p <= 1 and self.top_k >= 0
        if self.temperature < 0 or not is_truncation or self.max_response_tokens < 1:
            raise ValueError(f"sampling out of range: {self}")

    @classmethod
    def of(cls, rollout: RolloutSection, temperature: float, *, is_eval: bool = False) -> Sampling:
        """Nothing is trained of what an eval samples, so it needs no masks."""
        return cls(
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            returns_kept=rollout.trains_kept_tokens and not is_eval,
            max_response_tokens=rollout.max_response_tokens,
            stop=rollout.stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Response tokens only; all lists have the same length.

    `logprobs` are from the temperature-scaled distribution (the unscaled one if greedy), untruncated unless
    `Sampling.returns_kept`.
    `versions` are the versions of the weights that sampled each token. `fields`: a value per token of
    declared fields that the engine writes (`data.sample_fields`); all completions of an engine have the same.
    `prompt_fields`: likewise, a value per token of the prompt.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    prompt_fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseReport:
    """`load_s`: time to copy the weights; `pause_s`: how long no sequence ran; `fetch_s`: the part of
    `pause_s` spent fetching."""

    load_s: float
    pause_s: float
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """`logprobs` of the tokens 1, 2, ... of each sequence; `pause_s`: how long scoring kept sequences from
    running."""

    logprobs: list[list[float]]
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Optional statistics of an engine, by name: `sums` since its start, and current `gauges`. Each engine
    reports those it has.

    sums    preemptions             how often a response lost its KV cache to others and had to recompute it
            prompt_tokens           of responses that have ended
            cached_prompt_tokens    those of them whose keys and values were in the cache
    gauges  kv_cache_usage          used share of the cache
            engine_running, engine_waiting    lengths of the engine's own queues
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """An inference engine on one asyncio loop.

    Engines derive from this class. They need not override `counters`, `take_slot_intervals`, `so_far`,
    `connect`, `fetch`, `load_in_place`, `sleep` and `wake`.
    """

    slots: int
    running: int
    """Number of sequences generating now."""
    version: int
    """Version of the weights that the engine currently samples with."""
    sampled_tokens: int
    """Tokens sampled since the start."""
    decode_steps: int
    """Forward passes since the start that sampled a token: sampled_tokens / decode_steps is the mean batch
    size."""
    stops_to_score: bool
    """Whether no sequence runs during `score`."""
    fetches_versions: bool = False
    """Whether the engine fetches versions itself, from files, by `fetch`."""

    def counters(self) -> EngineCounters:
        return EngineCounters()

    def take_slot_intervals(self) -> tuple[SlotInterval, ...]:
        """The intervals of sequences in slots that ended since the last call, if `logging.trace_sequences` is
        set."""
        return ()

    def tokens_of(self, request_id: str) -> int:
        """Number of tokens that a waiting or running request has so far; 0 for unknown ids."""

    def so_far(self, request_id: str) -> Completion | None:
        """The tokens that a waiting or running request has so far. None for unknown ids, and if `generate`
        could not continue them. The finish reason is `abort` unless the response is complete."""
        return None

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Stop the engine. All requests end with an error."""

    async def generate(
        self,
        request_id: str,
        prompt_tokens: list[int],
        sampling: Sampling,
        seed: int,
        *,
        first_version: int | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        """Wait for a free slot (first come, first served) and sample a response.

        `first_version`: for a later turn, the version that sampled its trajectory's first token (see `load`).
        `so_far`: tokens that another engine sampled for the same prompt. The response begins with them (and
        with the values of their fields), and they count towards `max_response_tokens`.

        Raises ValueError for a request that the engine is not configured for (for example, too long),
        ExecutorFailed once the engine has failed or is closed.
        """

    async def abort(self, request_id: str) -> None:
        """End a request: its `generate` returns the tokens so far, with finish reason `abort`. Unknown ids
        are ignored."""

    async def connect(self, rank_zero: RankZero) -> None:
        """Set up a direct transport of weights with rank 0. Called after `start`, before the first load."""
        raise NotImplementedError

    def fetch(self, where: str) -> Mapping[str, torch.Tensor]:
        """Have the version in the directory `where`, a path or a URL, fetched. Runs in a thread, and returns
        what `load` gets."""
        raise NotImplementedError

    async def load(
        self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt
    ) -> PauseReport:
        """Swap the weights in place, then resume generation.

        `weights` is `receivers.SharedWeights`, in read-only memory that the node's workers share, or
        `AnnouncedWeights` with a direct transport.

        Names, shapes and kinds of dtypes are checked before anything changes. On a mismatch, `load` raises
        ValueError and the engine keeps the old version. (Fingerprints catch damaged bytes earlier.) A later
        failure leaves layers of two versions in the model, so it ends the engine: running and later requests
        raise ExecutorFailed.

        `drain`: start no sequence and wait for the running ones. `keep-kv`: freeze them, then continue with
        the old KV cache. `recompute-kv`: freeze them, then continue with a cache rebuilt by the new weights.

        Cached prefixes: a request that begins after the load never uses keys or values computed by older
        weights, with one exception. After a `keep-kv` load, a later turn of a trajectory that began before it
        (`generate`'s `first_version`) may use the cache of its earlier turns. An engine that cannot make this
        distinction computes the whole prompt again.
        """

    async def load_in_place(
        self, fetch: Callable[[], Sequence[Bucket]], version: int, interrupt: Interrupt
    ) -> PauseReport:
        """Like `load`, but without a second copy of the weights beside the model (`weights.dual_buffer =
        false`).

        `fetch` is called in a thread while no sequence runs, and returns all buckets, verified. If `fetch`
        raises, the exception propagates and the engine keeps the old version.
        """
        raise NotImplementedError

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        """Logprobs of the given tokens under the current weights."""

    async def sleep(self) -> None:
        """Free device memory for the trainer (colocate). No request runs."""

    async def wake(self) -> None:
        """Take the device memory back. A `load` follows before the next request: the weights' values may be
        gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory that one worker takes. For engines that manage memory themselves and can free it for a trainer
    on the same GPU."""

    name: str
    batch_tokens: int
    """Largest number of tokens in one forward pass."""
    process_bytes: int
    """Host memory of the processes that the engine starts, with nothing loaded."""
    process_names: str
    """Names of those processes, for messages."""
    num_caches: int
    """Number of processes on one device with a KV cache of their own."""
    cache_bytes: int | None
    """Size of one cache if asyncrl sets it (the engine then ignores `share`), else None."""
    share: float
    """Share of the device's memory that the engine may use in all; the cache gets what weights and
    activations do not take."""
    default_share: float
    """The engine's own default for `share`."""
    adapter_rank: int | None = None
    """The rank that LoRA's adapters are padded to in its memory; None: their own."""


def cache_bytes_left(memory_bytes: int, share: float, held_bytes: int) -> int:
    """Bytes of the KV cache of an engine that may use this share of the memory and holds `held_bytes`
    besides."""
    return max(int(share * memory_bytes) - held_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What asyncrl needs to know about an engine before making one. Importing an EngineKind must not import
    an inference library.

    Another package adds an engine by an entry point in the group `asyncrl.engines` that names its kind. Only
    `make` has no default.
    """

    make: Callable[[Profile, ProcessPlace, Callable[[int], None]], Engine]
    """Makes an engine that is not yet started. Its last argument is a callback, called in the event loop with
    the number of generating sequences whenever that changes."""
    keys: frozenset[str] = frozenset()
    """Keys of [rollout] that this engine understands and some others do not."""
    direct_transports: frozenset[str] = frozenset()
    """Values of `weights.transport` with which the engine takes weights from rank 0's GPU."""
    rank_zero_end: Callable[[WeightsSection, HeldVersions, torch.device], Any] | None = None
    """Makes rank 0's end of a direct transport: an object with the methods that `RankZero` asks for, each
    taking the worker's name before its other arguments."""
    loads_in_place: bool = False
    """Whether the engine implements `Engine.load_in_place`, which needs no second buffer."""
    takes_adapters: Callable[[Profile, str], bool] = lambda profile, device: False
    """Whether, with `lora.sync = "adapter"`, an engine on that device takes the adapters as they are sent.
    Otherwise its worker merges them into the base model's weights."""
    returns_kept_tokens: bool = False
    """Whether the engine supports `Sampling.returns_kept`."""
    returns_routed_experts: bool = False
    """Whether the engine writes the field ROUTED_EXPERTS if `trainer.router_replay` is set."""
    finds_stops_in_continued: bool = True
    """Whether the engine, when it continues a response that another one began, finds a stop string that
    begins in the earlier tokens."""
    memory: Callable[[Profile, str], EngineMemory | None] = lambda profile, device: None
    """Memory that a worker takes on that device. None: the cache takes half of what is free, as in the
    transformers engine."""
    conflicts: Callable[[Profile], Iterable[ConfigError]] = lambda profile: ()
    """Yields an error for each setting in the profile that the engine does not support."""
    check_arguments: Callable[[Profile, str], None] = lambda profile, device: None
    """Raises ConfigError for arguments that the engine would refuse on that device."""
    check_here: Callable[[str], None] = lambda device: None
    """Raises PreflightError if the engine cannot run on this machine, on that device."""
    check_driver: Callable[[], None] = lambda: None
    """Raises PreflightError for what would break the driver of a job whose workers are on other machines."""
    check_servers: Callable[[Profile, Path | None], None] = lambda profile, model_dir: None
    """Raises PreflightError or RefusedError if servers that others have started cannot be used, for the model
    in this directory if it is known. Called where the driver is."""


def kind_of(profile: Profile) -> EngineKind:
    kind: EngineKind = engine_kind(profile.rollout.engine)
    return kind


def can_continue_responses(profile: Profile) -> bool:
    """Whether the profile's engine can continue responses that another run began, or another engine."""
    return not profile.rollout.stop or kind_of(profile).finds_stops_in_continued


def worker_merges(profile: Profile, device: str) -> bool:
    """Whether adapters arrive at a rollout worker that must make whole weights of them."""
    return profile.lora.sync == "adapter" and not kind_of(profile).takes_adapters(profile, device)


def make_engine(profile: Profile, place: ProcessPlace, on_running: Callable[[int], None]) -> Engine:
    """The profile's engine, not yet started. Raises PreflightError if it cannot run on this machine."""
    kind = kind_of(profile)
    kind.check_here(place.device)
    return kind.make(profile, place, on_running)


def check_engine(profile: Profile, device: str, *, is_elsewhere: bool = False) -> None:
    """Raises PreflightError if the engine cannot run here, ConfigError if it would refuse its arguments.

    `is_elsewhere`: the workers run on other nodes of a cluster. Each makes these checks on its own node when
    it starts. Servers of others are asked in any case.
    """
    kind = kind_of(profile)
    if is_elsewhere:
        kind.check_driver()
    else:
        kind.check_here(device)
        kind.check_arguments(profile, device)
    kind.check_servers(profile, None)

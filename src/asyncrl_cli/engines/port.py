"""The engine port: what a rollout worker asks of an inference engine, and the values that cross."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from asyncrl_cli.loop.ports import Interrupt

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.weights.buckets import Bucket

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
    """`load_s`: copying the weights; `pause_s`: how long no sequence ran; `fetch_s`: the part of that in which weights arrived."""

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

    sums: Mapping[str, float]
    gauges: Mapping[str, float]


NO_COUNTERS = EngineCounters(sums={}, gauges={})


def check_request(
    request_id: str,
    prompt_tokens: list[int],
    sampling: Sampling,
    so_far: Completion | None,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> None:
    """ValueError for a request that an engine of these sizes cannot serve."""
    asked, longest = sampling.max_response_tokens, max_prompt_tokens + max_response_tokens
    if not prompt_tokens or len(prompt_tokens) + asked > longest:
        why = f"{len(prompt_tokens)} tokens, and {asked} more are asked: the engine was made for {longest} together"
        raise ValueError(f"prompt of {request_id} has {why}")
    if so_far is not None and len(so_far.tokens) >= asked:
        raise ValueError(f"{request_id} has {len(so_far.tokens)} tokens already, and {asked} are asked: nothing is left to do")


class Engine(Protocol):
    """An inference engine on one asyncio loop. `version` is that of the weights it samples with right now."""

    slots: int
    stops_to_score: bool
    """Whether no sequence runs during `score`."""

    @property
    def version(self) -> int: ...

    @property
    def running(self) -> int:
        """Sequences now generating."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled since the start."""

    @property
    def decode_steps(self) -> int:
        """Forward passes since the start that sampled a token: sampled_tokens / decode_steps is their mean batch."""

    def counters(self) -> EngineCounters: ...

    def tokens_of(self, request_id: str) -> int:
        """Tokens so far of a request that waits or runs; 0 for others."""

    def so_far(self, request_id: str) -> Completion | None:
        """What a request that waits or runs has by now, as if it were aborted; None for others."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Ends all requests with an error."""

    async def generate(
        self, request_id: str, prompt_tokens: list[int], sampling: Sampling, seed: int, so_far: Completion | None = None
    ) -> Completion:
        """Wait for a free slot (first come, first served) and sample a response.

        With `so_far`, go on after its tokens: they are part of the result, and of `max_response_tokens`.
        """

    async def abort(self, request_id: str) -> None:
        """Its `generate` returns what it has, with finish reason `abort`. Unknown ids are ignored."""

    def receive(self, buckets: Iterable[Bucket], load_bucket_size_bytes: int) -> Mapping[str, torch.Tensor]:
        """Copy buckets, as they arrive, to where `load` takes them from, beside generation. In any thread; may take long."""

    async def prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Do beside generation what of the next `load` of these very weights can be done there (`load` does what was not).

        Raises what `load` would; nothing has changed then. A version that was prepared and never loaded is forgotten.
        """

    async def load(self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt) -> PauseReport:
        """Swap the weights in place. Always resumes.

        Names, shapes and kinds of dtypes are looked at before anything has changed: ValueError, and the old version goes
        on. (Damaged bytes are refused earlier, by their fingerprints.) A failure after that, with layers of two versions
        in the model, raises the engine's own error; an engine that cannot put the old layers back ends with it: what
        runs and what comes later raises ExecutorFailed.

        `drain`: start nothing, wait for the running ones. `keep-kv`: freeze, go on with the old KV cache.
        `recompute-kv`: freeze, go on with a cache rebuilt by the new weights.
        """

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        """Given tokens, scored by the current weights."""

    async def sleep(self) -> None:
        """The trainer has the device (colocate): lend it what memory can be lent. Nothing runs, and nothing comes before `wake`."""

    async def wake(self) -> None:
        """The device is back, with the weights that were there before."""


@runtime_checkable
class OneBufferEngine(Engine, Protocol):
    """An engine that can also do without a second buffer (`weights.dual_buffer = false`)."""

    async def load_in_place(
        self, fetch: Callable[[], Sequence[Bucket]], version: int, interrupt: Interrupt, load_bucket_size_bytes: int
    ) -> PauseReport:
        """As `load`, with nothing held beside the model but one slice of at most `load_bucket_size_bytes`.

        `fetch` is called in a thread while no sequence runs. It returns all buckets, verified; what it raises is raised, and
        the old version goes on.
        """

"""Translates requests and outputs between asyncrl and vLLM: prompts, sampling parameters, versions, scores,
counters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl_cli.engines.base import Track
from asyncrl_cli.engines.port import EngineCounters, FinishReason, Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

SCORE_PREFIX = "score-"
"""Prefix of the ids of scoring requests. The token that such a request samples is discarded and not
counted."""


@dataclass(slots=True, eq=False, kw_only=True)
class VllmTrack(Track):
    aborted: bool = False
    state: Any = None
    """vLLM's state of the request, set by `state_of`. It stays readable after vLLM has forgotten the
    request."""

    def add(self, part: CompletionOutput) -> None:
        """Append new tokens and their logprobs. (`logprobs=0` gives the logprobs of the sampled tokens
        only.)"""
        self.tokens.extend(part.token_ids)
        if part.logprobs is not None:
            self.logprobs.extend(part.logprobs.logprobs)
        assert len(self.logprobs) == len(self.tokens), (
            f"{len(self.logprobs)} logprobs of {len(self.tokens)} tokens"
        )


class VllmCounters:
    """One engine's statistics, collected as a stat logger of vLLM: the scheduler and the frontend report
    every forward pass to it.

    `decode_steps`: passes that sampled a token of a response; passes that only scored do not count.
    `preemptions`: only those for lack of cache. (vLLM also preempts running requests when all caches are
    cleared for a load.) `prompt_tokens`: of responses that have ended; `cached_prompt_tokens`: those of them
    that vLLM found in its prefix cache.
    """

    def __init__(self) -> None:
        self.decode_steps = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self._cleared = 0
        self._gauges: dict[str, float] = {}

    def caches_cleared(self) -> None:
        """Call this during the pause: vLLM will report a preemption for each response that was running, which
        does not count."""
        self._cleared = int(self._gauges.get("engine_running", 0))

    def record(self, scheduler: Any, iteration: Any, **others: Any) -> None:
        """Called by vLLM with its `SchedulerStats` and `IterationStats`; either may be None."""
        if scheduler is not None:
            self._gauges = {
                "kv_cache_usage": scheduler.kv_cache_usage,
                "engine_running": scheduler.num_running_reqs,
                "engine_waiting": scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs,
            }
        if iteration is not None:
            cleared = min(self._cleared, iteration.num_preempted_reqs)
            self._cleared -= cleared
            self.preemptions += iteration.num_preempted_reqs - cleared
            ended = [
                request
                for request in iteration.finished_requests
                if not (request.request_id or "").startswith(SCORE_PREFIX)
            ]
            self.decode_steps += iteration.num_generation_tokens > len(iteration.finished_requests) - len(
                ended
            )
            self.prompt_tokens += sum(request.num_prompt_tokens for request in ended)
            self.cached_prompt_tokens += sum(request.num_cached_tokens for request in ended)

    def counters(self) -> EngineCounters:
        """Gauges are absent until the first forward pass."""
        names = ("preemptions", "prompt_tokens", "cached_prompt_tokens")
        return EngineCounters(sums={name: getattr(self, name) for name in names}, gauges=dict(self._gauges))

    def log_engine_initialized(self) -> None:
        """Required of vLLM's stat loggers; nothing to do."""

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...


def check_logprobs_exist(sampling: Sampling, *, truncated_sampling: bool) -> None:
    """Raises ValueError if vLLM's logprobs for this request would not be of the temperature-scaled,
    untruncated distribution."""
    truncates = sampling.top_p < 1 or sampling.top_k > 0
    possible = sampling.temperature == 1 if truncated_sampling else not truncates
    if sampling.temperature and not possible:
        made_for = "top-p or top-k at temperature 1" if truncated_sampling else "neither top-p nor top-k"
        raise ValueError(f"vLLM was started for {made_for}, and cannot give logprobs for {sampling}")


def prompt(tokens: list[int], version: int) -> Any:
    """`version` keeps this request's cached prefixes apart from those of other weights."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(tokens, cache_salt=f"version {version}")


def parameters(track: VllmTrack) -> SamplingParams:
    """vLLM's parameters: stream tokens with their logprobs; decode text only if stop strings must be found in
    it.

    A continued response gets another seed. Otherwise its next tokens would be drawn with the random numbers
    of its first ones.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = track.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens - track.num_kept,
        seed=(track.seed + track.num_kept) % 2**63,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )


def reason_of(reason: str | None) -> FinishReason:
    """vLLM's finish reason as ours. RuntimeError for any other (vLLM's `error`)."""
    if reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"vLLM ended a response with {reason!r}")
    return reason


def versions_of(spans: Iterable[Any] | None, num_tokens: int) -> list[int]:
    """One version per token, from vLLM's spans (version, start, end). A stop string may have cut the last
    tokens off."""
    versions = [
        int(span.version) for span in spans or () for _ in range(span.start, min(span.end, num_tokens))
    ]
    assert len(versions) == num_tokens, f"vLLM's version spans cover {len(versions)} of {num_tokens} tokens"
    return versions


def versions_so_far(track: VllmTrack) -> list[int]:
    """A running response's versions, one per token, as far as vLLM has reported them."""
    starts, num_new = getattr(track.state, "weight_version_starts", ()), len(track.tokens) - track.num_kept
    ends = [*(start for _, start in starts[1:]), num_new]
    new = [
        int(version)
        for (version, start), end in zip(starts, ends, strict=False)
        for _ in range(start, min(end, num_new))
    ]
    return track.versions[: track.num_kept] + new


def first_version(track: VllmTrack, part: CompletionOutput) -> int | None:
    """Version of the weights that sampled the response's first token; None if vLLM reports none."""
    spans = part.weight_versions or ()
    starts = [span.version for span in spans] or [
        version for version, _ in getattr(track.state, "weight_version_starts", ())
    ]
    return int(starts[0]) if starts else None


def num_tokens_so_far(llm: AsyncLLM, track: VllmTrack) -> int:
    """Number of tokens so far, including those that are in this process but that vLLM has not delivered
    yet."""
    state = state_of(llm, track)
    return len(track.tokens) if state is None else track.num_kept + int(state.detokenizer.num_output_tokens())


def state_of(llm: AsyncLLM, track: VllmTrack) -> Any:
    """vLLM's state of a request, kept in `track.state` once found; None before vLLM knows the request."""
    if track.state is None:
        processor = llm.output_processor
        internal_ids = processor.external_req_ids.get(track.request_id, [])
        track.state = next(
            (processor.request_states[name] for name in internal_ids if name in processor.request_states),
            None,
        )
    return track.state


async def score(
    llm: AsyncLLM, name: str, sequences: Sequence[list[int]], temperature: float
) -> list[list[float]]:
    """Logprobs of the tokens 1, 2, ... of each sequence.

    vLLM scores prompts at temperature 1 only. At other temperatures, each token is scored as a possible next
    sample after the tokens before it. These requests share cached prefixes with each other only, because each
    score has its own salt.
    """
    scored = _scored_as_prompt if temperature == 1 else _scored_as_samples
    return list(
        await asyncio.gather(
            *(scored(llm, f"{name}/{i}", tokens, temperature) for i, tokens in enumerate(sequences))
        )
    )


async def _scored_as_prompt(llm: AsyncLLM, name: str, tokens: list[int], temperature: float) -> list[float]:
    output = await _last(llm, name, tokens, name, prompt_logprobs=0)
    positions = output.prompt_logprobs or []
    return [position[token].logprob for position, token in zip(positions[1:], tokens[1:], strict=True)]


async def _scored_as_samples(llm: AsyncLLM, name: str, tokens: list[int], temperature: float) -> list[float]:
    async def one(count: int) -> float:
        how = {"temperature": temperature, "logprob_token_ids": [tokens[count]]}
        output = await _last(llm, f"{name}/{count}", tokens[:count], name, **how)
        return output.outputs[0].logprobs[0][tokens[count]].logprob

    return list(await asyncio.gather(*(one(count) for count in range(1, len(tokens)))))


async def _last(llm: AsyncLLM, request_id: str, tokens: list[int], salt: str, **how: Any) -> RequestOutput:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **how)
    outputs = [
        output async for output in llm.generate(tokens_input(tokens, cache_salt=salt), params, request_id)
    ]
    return outputs[-1]

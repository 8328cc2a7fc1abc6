"""In the rollout worker's process: requests and outputs translated between asyncrl and vLLM: prompts,
sampling parameters, versions, experts, scores, counters."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.environment import EpisodeFailed
from asyncrl_cli.data.sample_fields import KEPT_TOKENS, ROUTED_EXPERTS
from asyncrl_cli.engines.port import EngineCounters
from asyncrl_cli.engines.slotted_engine import Track
from asyncrl_cli.engines.vllm.plugin import ADAPTER_ID

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    from asyncrl_cli.models.experts import Routing

SCORE_PREFIX = "score-"
"""Prefix of the ids of scoring requests. The token that such a request samples is discarded and not
counted."""


@dataclass(slots=True, eq=False, kw_only=True)
class VllmTrack(Track):
    """`state`: vLLM's state of the request, once it is found. It stays readable after vLLM has forgotten the
    request. `routing`: the model's, if experts are recorded."""

    vocab_size: int = 0
    aborted: bool = False
    state: RequestState | None = None
    routing: Routing | None = None

    def find_state(self, llm: AsyncLLM) -> RequestState | None:
        """None before vLLM knows the request."""
        if self.state is None:
            processor = llm.output_processor
            names = processor.external_req_ids.get(self.request_id, [])
            known = (processor.request_states.get(name) for name in names)
            self.state = next((state for state in known if state is not None), None)
        return self.state

    @property
    def num_listed(self) -> int:
        """How many of the most likely tokens vLLM lists: twice as many as it keeps, because all that are as
        likely as the last one stay, too."""
        return min(2 * self.sampling.top_k, self.vocab_size) if self.sampling.returns_kept else 0

    @property
    def version_starts(self) -> Sequence[tuple[str, int]]:
        """(version, index of its first new token) for each version that has sampled the response so far."""
        return getattr(self.state, "weight_version_starts", ())

    def add(self, part: CompletionOutput) -> None:
        """Append new tokens with their logprobs and, if wanted, the tokens that were kept. Raises
        EpisodeFailed as `_add_kept` does."""
        self.tokens.extend(part.token_ids)
        if part.logprobs is not None:
            found = cast("FlatLogprobs", part.logprobs)
            if self.sampling.returns_kept:
                self._add_kept(found)
            else:  # nothing but the sampled tokens is listed
                self.logprobs.extend(found.logprobs)
        assert len(self.logprobs) == len(self.tokens), f"{len(self.logprobs)} of {len(self.tokens)} logprobs"

    def _add_kept(self, found: FlatLogprobs) -> None:
        """Append logprobs, and those of the most likely tokens that have a probability. Raises EpisodeFailed
        if there may be more of them."""
        for begin, end in zip(found.start_indices, found.end_indices, strict=True):
            # The sampled token comes first, and again among the most likely ones: but not in an output that
            # has waited, to which vLLM has appended this one.
            self.logprobs.append(found.logprobs[begin])
            listed = zip(found.token_ids[begin:end], found.logprobs[begin:end], strict=True)
            kept = [token for token, logprob in dict(listed).items() if logprob > -math.inf]
            if self.num_listed <= len(kept) < self.vocab_size:
                why = f"vLLM kept {len(kept)} tokens or more, of equal probability, and lists no more"
                raise EpisodeFailed("engine", f"{why} with rollout.top_k = {self.sampling.top_k}")
            self.fields.setdefault(KEPT_TOKENS, []).append(kept)

    def set_versions(self, spans: Iterable[tuple[str, int, int]] | None = None) -> None:
        """Set one version per token from vLLM's `spans` (version, start, end) of new tokens, or as far as
        vLLM has reported them. A stop string may have cut the last tokens off."""
        num_new = len(self.tokens) - self.num_kept
        if spans is None:
            starts = self.version_starts
            ends = [*(start for _, start in starts[1:]), num_new]
            spans = [(version, start, end) for (version, start), end in zip(starts, ends, strict=False)]
        new = [int(version) for version, start, end in spans for _ in range(start, min(end, num_new))]
        self.versions = self.versions[: self.num_kept] + new

    def set_experts(self, found: NDArray[Any] | None = None) -> None:
        """Set one row of experts per token that has a version, from what vLLM has `found` for a response that
        has ended, or as far as vLLM has reported them. The last one is unknown: it was no input yet. Raises
        ExecutorFailed as `expert_rows` does.

        vLLM gives each position those of the pass that sampled the token after it, also if the pass was made
        by older weights, or before a preemption; and of tokens with keys in its cache, those that led to
        them. Tokens that another engine sampled keep what that engine has recorded.
        """
        if self.routing is None or len(self.versions) == self.num_kept:
            return
        begin, count = len(self.prompt_tokens), len(self.prompt_tokens) + len(self.versions) - 1
        if found is None and (chunks := getattr(self.state, "routed_experts_chunks", None)):
            found = np.concatenate(chunks)[:count]  # of tokens that vLLM has not delivered yet, too
        rows = expert_rows(found, self.routing, count)
        earlier = self.fields.get(ROUTED_EXPERTS, [])[: max(self.num_kept - 1, 0)]
        self.prompt_fields[ROUTED_EXPERTS] = [*rows[:begin]]
        unknown = np.full(rows.shape[1], -1, np.int16)
        self.fields[ROUTED_EXPERTS] = [*earlier, *rows[begin + len(earlier) :], unknown]


def expert_rows(found: NDArray[Any] | None, routing: Routing, count: int) -> NDArray[np.int16]:
    """The experts of `count` positions, as the field ROUTED_EXPERTS has them (positions, layers with experts
    * experts per token), from vLLM's array (positions, all layers, experts per token).

    Raises ExecutorFailed if vLLM's array cannot be of these positions and this model: a layer that vLLM does
    not record has zeros, so experts that are there twice are refused, too.
    """
    shape, layers, top_k = (0, 0, 0) if found is None else found.shape, routing.layers, routing.top_k
    expected = f"{count} positions of {len(layers)} layers with {top_k} of {routing.num_experts} experts"
    if found is None or len(shape) != 3 or shape[::2] != (count, top_k) or shape[1] <= max(layers):
        raise ExecutorFailed(f"vLLM returned experts of the shape {shape} for {expected}")
    rows = found[:, layers]
    choices = np.ascontiguousarray(rows.reshape(-1, top_k).T)  # many times as fast to compare
    is_twice = any((choices[apart:] == choices[:-apart]).any() for apart in range(1, top_k))
    if is_twice or rows.min() < 0 or rows.max() >= routing.num_experts:
        raise ExecutorFailed(f"vLLM returned an expert twice, or one that does not exist, for {expected}")
    return rows.astype(np.int16).reshape(count, -1)


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

    def record(
        self, scheduler: SchedulerStats | None, iteration: IterationStats | None, **others: object
    ) -> None:
        """Called by vLLM."""
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
            finished = iteration.finished_requests
            ended = [one for one in finished if not (one.request_id or "").startswith(SCORE_PREFIX)]
            # each score that ended has sampled one token, which does not count
            self.decode_steps += iteration.num_generation_tokens > len(finished) - len(ended)
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


def prompt(tokens: list[int], version: int) -> Any:
    """`version` keeps this request's cached prefixes apart from those of other weights."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(tokens, cache_salt=f"version {version}")


def adapter_request() -> LoRARequest:
    """The adapters of whatever version is loaded. vLLM has them, so it does not look for the path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="adapter", lora_int_id=ADAPTER_ID, lora_path="loaded")


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
        min_p=sampling.min_p,
        max_tokens=sampling.max_response_tokens - track.num_kept,
        seed=(track.seed + track.num_kept) % 2**63,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        logprobs=track.num_listed,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )


async def score(
    llm: AsyncLLM,
    name: str,
    sequences: Sequence[list[int]],
    temperature: float,
    adapter: LoRARequest | None = None,
) -> list[list[float]]:
    """Logprobs of the tokens 1, 2, ... of each sequence.

    vLLM scores prompts at temperature 1 only. At other temperatures, each token is scored as a possible next
    sample after the tokens before it. These requests share cached prefixes with each other only, because each
    score has its own salt.
    """
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    async def last_output(request_id: str, tokens: list[int], salt: str, **asked: Any) -> RequestOutput:
        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=kind, **asked)
        scored = tokens_input(tokens, cache_salt=salt)
        outputs = llm.generate(scored, params, request_id, lora_request=adapter)
        return [output async for output in outputs][-1]

    async def scored_as_sample(salt: str, tokens: list[int], count: int) -> float:
        token, request_id = tokens[count], f"{salt}/{count}"
        asked = {"temperature": temperature, "logprob_token_ids": [token]}
        output = await last_output(request_id, tokens[:count], salt, **asked)
        return float(cast("list[dict[int, Any]]", output.outputs[0].logprobs)[0][token].logprob)

    async def scored(salt: str, tokens: list[int]) -> list[float]:
        if temperature == 1:
            output = await last_output(salt, tokens, salt, prompt_logprobs=0)
            found = cast("list[dict[int, Any]]", output.prompt_logprobs or [])
            return [position[token].logprob for position, token in zip(found[1:], tokens[1:], strict=True)]
        counts = range(1, len(tokens))
        return await asyncio.gather(*(scored_as_sample(salt, tokens, count) for count in counts))

    return await asyncio.gather(*(scored(f"{name}/{i}", tokens) for i, tokens in enumerate(sequences)))

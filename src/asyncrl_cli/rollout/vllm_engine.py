"""The engine `vllm`: vLLM's AsyncLLM in the rollout actor's event loop, behind the port of engine.py.

    generate() -> SlotGate -> AsyncLLM.generate ──ZMQ──> [engine process: scheduler ─> worker process: model]
                                   ^ tokens as they are sampled ──┘                        ^
    load() ──> pause ──> update_weights: "map this buffer" ────────────────────────────────┘ ──> version ──> resume

Who waits for whom: `generate` waits for a slot (given by `leave` of another, or by the end of a drain), then for its tokens.
`load` with `drain` waits for the running responses; a pause otherwise for one forward pass. If an engine process dies, vLLM
fails every request, and so do we.

Versions are vLLM's own: it labels the outputs of each step with the version that is set between steps, and reports them as spans.
Cached prefixes are keyed by the version that was current when a request began (`cache_salt`): a new request never meets those of
an older one. (A running request goes on with its own under `keep-kv`, which is what keep-kv means.)

A load that does not fit is refused before anything has changed. One that fails while layers are being overwritten leaves a model
of two versions: the engine then fails all requests, now and later, rather than sample from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.loop.ports import Interrupt
from asyncrl_cli.rollout import vllm_requests, vllm_settings
from asyncrl_cli.rollout.engine import Completion, FinishReason, PauseReport, Sampling, Scores, check_request
from asyncrl_cli.rollout.slot_gate import SlotGate
from asyncrl_cli.rollout.vllm_settings import VllmOptions
from asyncrl_cli.rollout.weights_check import check_fit
from asyncrl_cli.weights.buckets import Bucket
from asyncrl_cli.weights.shared import SharedWeights

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CLOSE_TIMEOUT_S = 5.0
LAST_OUTPUTS_S = 1.0
"""How long a close waits for its aborted requests to be told."""


@dataclass(slots=True, eq=False)
class VllmTrack:
    """One response in the making. `before`: what it went on from; `tokens` and `logprobs`: sampled since, `spans` over them."""

    request_id: str
    before: Completion
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    aborted: bool = False

    def completion(self, versions: list[int], finish_reason: FinishReason) -> Completion:
        count = len(versions)
        return Completion(
            tokens=self.before.tokens + self.tokens[:count],
            logprobs=self.before.logprobs + self.logprobs[:count],
            versions=self.before.versions + versions,
            finish_reason=finish_reason,
        )


class VllmEngine:
    """See `engine.Engine`. `model_dir` is a local Hugging Face directory.

    `truncated_sampling`: requests use top-p or top-k, and their temperature is 1 or 0. Without it they use neither, at any
    temperature. (vLLM gives logprobs of one or of the other distribution, for a whole engine.)
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        seed: int = 0,
        version: int = 0,
        trust_remote_code: bool = False,
        truncated_sampling: bool = False,
        options: VllmOptions | None = None,
        on_running: Callable[[int], None] = lambda running: None,
    ) -> None:
        self.slots = slots
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self._model_dir = str(model_dir)
        self._device = device
        self._dtype = dtype
        self._threads = threads
        self._seed = seed
        self._version = version
        self._trust_remote_code = trust_remote_code
        self._truncated_sampling = truncated_sampling
        self._options = options or VllmOptions()
        self._gate = SlotGate(slots, on_running)
        self._tracks: dict[str, VllmTrack] = {}
        self._sampled_tokens = 0
        self._num_scored = 0
        self._weights_lock = asyncio.Lock()
        self._llm: AsyncLLM | None = None
        self._shape: PreTrainedModel
        self._failure = ""

    @property
    def version(self) -> int:
        return self._version

    @property
    def running(self) -> int:
        return self._gate.running

    @property
    def sampled_tokens(self) -> int:
        return self._sampled_tokens

    def tokens_of(self, request_id: str) -> int:
        track = self._tracks.get(request_id)
        return len(track.before.tokens) + len(track.tokens) if track is not None else 0

    def so_far(self, request_id: str) -> Completion | None:
        track = self._tracks.get(request_id)
        if track is None:
            return None
        return track.completion(vllm_requests.versions_so_far(self._running_llm(), request_id, len(track.tokens)), "abort")

    async def start(self) -> None:
        """Start vLLM's processes and wait until they are ready: model loaded, cache allocated."""
        eager = vllm_settings.is_eager(self._options, self._device)
        vllm_settings.set_environment(device=self._device, threads=self._threads, eager=eager)
        self._shape, self._llm = await asyncio.gather(asyncio.to_thread(self._meta_model), asyncio.to_thread(self._start))
        await self._llm.update_weight_version(str(self._version))

    def _meta_model(self) -> PreTrainedModel:
        """The names and shapes that a trainer publishes: a model without memory."""
        config = AutoConfig.from_pretrained(self._model_dir, trust_remote_code=self._trust_remote_code)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=self._trust_remote_code)
        return model

    def _start(self) -> AsyncLLM:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from asyncrl_cli.weights.vllm_plugin import BACKEND

        vllm_settings.check_engine_args(self._options.engine_args)
        arguments = vllm_settings.engine_arguments(
            self._model_dir,
            self._options,
            slots=self.slots,
            max_tokens=self.max_prompt_tokens + self.max_response_tokens,
            device=self._device,
            dtype=self._dtype,
            seed=self._seed,
            trust_remote_code=self._trust_remote_code,
            truncated_sampling=self._truncated_sampling,
            kv_bytes_per_token=vllm_settings.kv_bytes_per_token(self._model_dir, self._dtype),
        )
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, weight_transfer_config=WeightTransferConfig(backend=BACKEND)))

    async def close(self) -> None:
        self._fail("the rollout engine is closed")
        self._gate.close()
        self._gate.give_up_all()
        if (llm := self._llm) is None:
            return
        for request_id in list(self._tracks):
            await self.abort(request_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_OUTPUTS_S):
                await self._gate.idle()
        self._llm = None
        await asyncio.to_thread(llm.shutdown, CLOSE_TIMEOUT_S)

    async def generate(
        self, request_id: str, prompt_tokens: list[int], sampling: Sampling, seed: int, so_far: Completion | None = None
    ) -> Completion:
        self._check(request_id, prompt_tokens, sampling, so_far)
        track = self._tracks[request_id] = VllmTrack(request_id=request_id, before=so_far or vllm_requests.NOTHING)
        try:
            if not await self._gate.entered(request_id):
                self._raise_failure()
                return track.completion([], "abort")
            try:
                return await self._stream(track, prompt_tokens, sampling, seed)
            finally:
                self._gate.leave()
        finally:
            del self._tracks[request_id]

    async def abort(self, request_id: str) -> None:
        track = self._tracks.get(request_id)
        if track is not None:
            track.aborted = True
            self._gate.give_up(request_id)
            await self._running_llm().abort(request_id)

    def receive(self, buckets: Sequence[Bucket], load_bucket_size_bytes: int) -> SharedWeights:
        """One copy, into memory that the engine's processes map. (They read it there, so no load bucket is needed.)"""
        return SharedWeights.of_buckets(buckets)

    async def load(self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt) -> PauseReport:
        async with self._weights_lock:
            self._raise_failure()
            check_fit(self._shape, weights, version)
            if not isinstance(weights, SharedWeights):
                weights = await asyncio.to_thread(SharedWeights.of_tensors, weights)
            required = {name for name, _ in self._shape.named_parameters()}
            self._gate.close()  # a request that came during a pause would look for prefixes of the old version
            try:
                if interrupt == "drain":
                    await self._gate.idle()
                return await self._swap(weights.describe(required), version, interrupt)
            finally:
                if not self._failure:
                    self._gate.open()

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        """Beside generation, by vLLM's own forward passes; `pause_s` is 0: nothing stops for it."""
        async with self._weights_lock:
            self._raise_failure()
            self._num_scored += 1
            name = f"score-{self._num_scored}"
            logprobs = await vllm_requests.score(self._running_llm(), name, sequences, temperature or 1.0)
            return Scores(logprobs=logprobs, pause_s=0.0)

    def _check(self, request_id: str, prompt_tokens: list[int], sampling: Sampling, so_far: Completion | None) -> None:
        self._raise_failure()
        if request_id in self._tracks:
            raise ValueError(f"request {request_id} is running already")
        check_request(
            request_id,
            prompt_tokens,
            sampling,
            so_far,
            max_prompt_tokens=self.max_prompt_tokens,
            max_response_tokens=self.max_response_tokens,
        )
        truncates = sampling.top_p < 1 or sampling.top_k > 0
        if sampling.temperature and (truncates, sampling.temperature == 1) not in self._possible():
            made_for = "top-p or top-k at temperature 1" if self._truncated_sampling else "neither top-p nor top-k"
            raise ValueError(f"vLLM was started for {made_for}, and gives no logprobs for {sampling}")

    def _possible(self) -> set[tuple[bool, bool]]:
        """(truncates, temperature is 1) of sampled requests whose logprobs are right."""
        return {(True, True), (False, True)} if self._truncated_sampling else {(False, True), (False, False)}

    async def _stream(self, track: VllmTrack, prompt_tokens: list[int], sampling: Sampling, seed: int) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        num_before = len(track.before.tokens)
        prompt = vllm_requests.prompt(prompt_tokens + track.before.tokens, self._version)
        params = vllm_requests.parameters(sampling, num_before, _seed_of(seed, num_before))
        versions: list[int] = []
        reason: FinishReason = "abort"
        try:
            async for output in self._running_llm().generate(prompt, params, track.request_id):
                part = output.outputs[0]
                track.tokens.extend(part.token_ids)
                track.logprobs.extend(vllm_requests.logprobs_of(part))
                self._sampled_tokens += len(part.token_ids)
                if track.aborted and not output.finished:
                    await self._running_llm().abort(track.request_id)  # it was not known to vLLM yet
                if output.finished:
                    versions = vllm_requests.versions_of(part.weight_versions, len(track.tokens))
                    reason = vllm_requests.reason_of(part.finish_reason)
        except (EngineDeadError, EngineGenerateError) as error:
            raise ExecutorFailed(f"vLLM failed {track.request_id}: {_told(error)}") from error
        self._raise_failure()
        return track.completion(versions, reason)

    async def _swap(self, announced: dict[str, Any], version: int, interrupt: Interrupt) -> PauseReport:
        """Resumes whatever happens; cancelled or failed before the load, the old version goes on."""
        llm = self._running_llm()
        paused_s = time.perf_counter()
        try:
            await llm.pause_generation(mode="wait" if interrupt == "drain" else "keep", clear_cache=interrupt != "keep-kv")
            began_s = time.perf_counter()
            await self._update(llm, announced, version)
            loaded_s = time.perf_counter()
        finally:
            await llm.resume_generation()
        return PauseReport(load_s=loaded_s - began_s, pause_s=time.perf_counter() - paused_s)

    async def _update(self, llm: AsyncLLM, announced: dict[str, Any], version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info=announced))
            await llm.finish_weight_update(weight_version=str(version))
        except BaseException as error:
            self._fail(f"loading version {version} failed half-way: {_told(error)}")
            for request_id in list(self._tracks):
                await self.abort(request_id)
            if isinstance(error, Exception):
                raise ExecutorFailed(f"vLLM: {self._failure}") from error
            raise
        self._version = version

    def _running_llm(self) -> AsyncLLM:
        if self._llm is None:
            raise ExecutorFailed(self._failure or "the rollout engine is not started")
        return self._llm

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why

    def _raise_failure(self) -> None:
        if self._failure:
            raise ExecutorFailed(self._failure)


def _seed_of(seed: int, num_before: int) -> int:
    """A continuation draws other numbers than the beginning did."""
    return random.Random(f"{seed}/{num_before}").getrandbits(63)


def _told(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__

"""In the rollout worker's process: the engine `vllm`, vLLM's AsyncLLM in the event loop, behind the engine
port.

    generate() -> SlotGate -> AsyncLLM.generate ──ZMQ──> [engine process: scheduler ─> model]
                                   ^ tokens as they are sampled ──┘                        ^
    load() -> pause -> "map this buffer and load it" (bucket_engine.py) ───────────────────┘
           -> version -> resume

(With tensor_parallel_size > 1 the model is in worker processes of the engine process.)

With `lora.sync = "adapter"` versions are adapters, which vLLM applies by its own LoRA support. It starts with
adapters of zero effect, and every request names them by the id that all versions share. So a running request
goes on with the adapters of a new version as it would with new weights.

Who waits for whom: `generate` waits for a slot (freed when another request leaves, or when a drain ends),
then for its tokens. `load` with `drain` waits for the running responses; otherwise its pause waits for one
forward pass. If an engine process dies, all of these waits end with the error that engine_processes.py finds,
and so does every later call.

vLLM keeps track of versions: it labels the outputs of each step with the version set between steps, and
reports spans. Cached prefixes are keyed by the version at which a request began (`cache_salt`), so a request
never uses prefixes computed by older weights. If a load happens between a request's start and its first
token, the request starts again. A later turn uses the key of its trajectory's first turn, so after a
`keep-kv` load it continues with the cache of its earlier turns, as a running request does. All other loads
clear the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, cast, get_args

import torch

from asyncrl_cli.base.errors import ConfigError, ExecutorFailed, timeout
from asyncrl_cli.engines.port import Completion, EngineCounters, FinishReason, PauseReport, Sampling, Scores
from asyncrl_cli.engines.slotted_engine import SlottedEngine
from asyncrl_cli.engines.vllm import requests
from asyncrl_cli.engines.vllm.engine_processes import answer, dead, end_processes, message_of, start_llm
from asyncrl_cli.engines.vllm.launch import (
    MERGE,
    has_raw_logprobs,
    set_environment,
    sleeps,
    takes_adapters,
)
from asyncrl_cli.engines.vllm.requests import SCORE_PREFIX, VllmCounters, VllmTrack
from asyncrl_cli.engines.vllm.worker_transports import DIRECT, SharedMemory, paused
from asyncrl_cli.models.experts import Routing
from asyncrl_cli.models.saved_form import AdapterForm, SavedForm, skeleton
from asyncrl_cli.profile.schema import Interrupt, ProcessPlace, Profile
from asyncrl_cli.weights.receivers import SharedWeights, packed
from asyncrl_cli.weights.versions import RankZero

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

CLOSE_TIMEOUT_S = 5.0
LAST_OUTPUTS_S = 1.0  # how long `close` waits for aborted requests to end


class VllmEngine(SlottedEngine[VllmTrack]):
    """Implements `engines.port.Engine`, which documents the public methods."""

    stops_to_score = False
    _make_track = VllmTrack

    def __init__(
        self, profile: Profile, place: ProcessPlace, on_running: Callable[[int], None] = lambda running: None
    ) -> None:
        super().__init__(profile, place, on_running)
        self.version = place.version
        self.sampled_tokens = 0
        self._counters = VllmCounters()
        self._num_scored = 0
        self.transport = SharedMemory()
        self._cache_sleeps = False
        self.llm: AsyncLLM | None = None
        self.form: SavedForm
        self._adapter: LoRARequest | None = None
        self._routing: Routing | None = None

    @property
    def decode_steps(self) -> int:  # type: ignore[override]
        return self._counters.decode_steps

    def counters(self) -> EngineCounters:
        return self._counters.counters()

    def _num_tokens(self, track: VllmTrack) -> int:
        """With those that are in this process but that vLLM has not delivered yet."""
        state = track.find_state(self._running_llm())
        if state is None or state.detokenizer is None:
            return len(track.tokens)
        return track.num_kept + int(state.detokenizer.num_output_tokens())

    async def start(self) -> None:
        """Start vLLM's processes and wait until they are ready: model loaded, cache allocated."""
        profile, place = self._profile, self._place
        set_environment(profile, place)
        # In its own thread: vLLM keeps errors raised during its import forever, with the frames of all
        # callers. An engine that such a frame refers to would live until the interpreter exits, too late to
        # clean up.
        await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")
        trusts = profile.model.trust_remote_code
        empty = await asyncio.to_thread(skeleton, place.model_dir, trust_remote_code=trusts)
        adapts = takes_adapters(profile, place.device)
        self.form = AdapterForm(empty, profile.lora) if adapts else SavedForm(empty)
        if profile.trainer.router_replay:
            self._routing = Routing(empty)
            if self._routing.top_k == 1:
                why = "whether vLLM has recorded a layer cannot be seen where a token has one expert"
                hint = "--set rollout.engine=transformers, or --set trainer.router_replay=false"
                raise ConfigError(f"trainer.router_replay = true: {why}", hint=hint)
        llm = await asyncio.to_thread(start_llm, profile, place, self._counters, self.form.adapted)
        self.llm = llm  # from here on, `close` shuts it down
        if not adapts:
            await answer(llm, llm.update_weight_version(str(self.version)))
            return
        self._adapter = requests.adapter_request()
        zeros = {name: torch.zeros(tensor.shape) for name, tensor in self.form.required.items()}
        try:
            await self._bring(llm, SharedWeights([packed(zeros)]), self.version)
        except Exception as error:
            raise ConfigError(f'lora.sync = "adapter": {message_of(error)}', hint=MERGE) from error

    async def connect(self, rank_zero: RankZero) -> None:
        weights, llm = self._profile.weights, self._running_llm()
        self.transport = DIRECT[weights.transport](rank_zero, weights)
        try:
            await self.transport.join(llm)
        except BaseException as error:
            self._fail(message_of(error))
            await end_processes(llm)
            raise

    async def close(self) -> None:
        self._fail("the rollout engine is closed")
        if (llm := self.llm) is None:
            return
        for request_id in list(self._tracks):
            await self.abort(request_id)
        with contextlib.suppress(TimeoutError):
            async with timeout(LAST_OUTPUTS_S):
                await self.gate.idle()
        self.llm = None
        await asyncio.to_thread(llm.shutdown, CLOSE_TIMEOUT_S)

    def _check(self, request_id: str, prompt_tokens: list[int], sampling: Sampling) -> None:
        super()._check(request_id, prompt_tokens, sampling)
        # Training needs logprobs of the temperature-scaled distribution, and knows how it was truncated.
        truncates = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        raw = has_raw_logprobs(self._profile)
        possible = sampling.temperature == 1 if raw else self._profile.rollout.truncates or not truncates
        if sampling.temperature and not possible:
            made_for = "top-p, top-k or min-p at temperature 1" if raw else "no truncation"
            raise ValueError(f"vLLM was started for {made_for}, and cannot give logprobs for {sampling}")

    def so_far(self, request_id: str) -> Completion | None:
        """None if there are stop strings: vLLM would miss one that begins in the tokens so far."""
        track = self._tracks.get(request_id)
        if track is None or track.sampling.stop:
            return None
        if not track.finished:
            track.set_versions()
            track.set_experts()
        return super().so_far(request_id)

    async def abort(self, request_id: str) -> None:
        track = self._tracks.get(request_id)
        if track is not None:
            track.aborted = True
            self.gate.give_up(request_id)
            await self._running_llm().abort(request_id)

    async def load(
        self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt
    ) -> PauseReport:
        async with self._weights_lock:
            self._raise_failure()
            # Before anything changes: from the first byte on, a failure leaves layers of two versions.
            self.form.check(weights, version)
            if interrupt != "drain":
                # Generation goes on while rank 0 sends to another worker.
                await self.transport.turn()
            # A request that starts during the pause would use prefixes of the old version.
            async with self._closed(interrupt):
                stopped_s = time.perf_counter()
                try:
                    if interrupt == "drain":
                        # Only now, when nothing runs: a turn is lost if no transfer follows soon.
                        await self.transport.turn()
                    llm = self._running_llm()
                    async with paused(llm, interrupt):
                        paused_s = time.perf_counter()
                        if interrupt == "recompute-kv":
                            self._counters.caches_cleared()
                        async with self._failure_ends_it(llm, f"loading version {version} into vLLM"):
                            try:
                                await self._bring(llm, weights, version)
                            finally:
                                await self.transport.leave()
                            if self._cache_sleeps:
                                # Colocated: the cache gets its memory only now that rank 0's buffer is gone.
                                await answer(llm, llm.wake_up(tags=["kv_cache"]))
                                self._cache_sleeps = False
                        # Before the resume: requests that start after it take this version as their salt.
                        self.version = version
                        load_s = time.perf_counter() - paused_s
                except ExecutorFailed as error:
                    self._fail(error.message)
                    raise
                return PauseReport(load_s=load_s, pause_s=time.perf_counter() - stopped_s)

    async def _bring(self, llm: AsyncLLM, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load a version that fits into vLLM, which is paused, and name it."""
        required = self.form.required.keys()
        if self.form.adapted:
            assert isinstance(weights, SharedWeights)
            lora = self._profile.lora
            given = (weights.describe(required), lora.rank, lora.alpha)
            await answer(llm, llm.collective_rpc("load_adapters", args=given))
            await answer(llm, llm.update_weight_version(str(version)))
            return
        await answer(llm, llm.start_weight_update())
        await self.transport.bring(llm, weights, version, required)
        await answer(llm, llm.finish_weight_update(weight_version=str(version)))

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        """Score in vLLM's own forward passes, during generation; `pause_s` is 0 because nothing stops."""
        async with self._weights_lock:
            self._raise_failure()
            self._num_scored += 1
            name = f"{SCORE_PREFIX}{self._num_scored}"
            with self._death_ends_it(self._running_llm()) as llm:
                logprobs = await requests.score(llm, name, sequences, temperature or 1.0, self._adapter)
            return Scores(logprobs=logprobs, pause_s=0.0)

    async def sleep(self) -> None:
        """On a GPU, discard weights and KV cache. (vLLM on a CPU cannot.) Requests wait until a version has
        been loaded."""
        if sleeps(self._profile, self._place.device):
            self._raise_failure()
            self.gate.close()
            llm = self._running_llm()
            async with self._failure_ends_it(llm, "vLLM's sleep"):
                await answer(llm, llm.sleep(level=2, mode="wait"))

    async def wake(self) -> None:
        """Allocate the weights, whose values come with the next load; the cache gets its memory once they
        have come."""
        if sleeps(self._profile, self._place.device):
            self._raise_failure()
            llm = self._running_llm()
            self._cache_sleeps = True
            async with self._failure_ends_it(llm, "vLLM's waking up"):
                await answer(llm, llm.wake_up(tags=["weights"]))

    async def _respond(self, track: VllmTrack) -> FinishReason:
        reason, track.vocab_size = None, self._running_llm().model_config.get_vocab_size()
        track.routing = self._routing
        while reason is None:
            salt = self.version if track.first_version is None else track.first_version
            prompt = requests.prompt([*track.prompt_tokens, *track.tokens], salt)
            params = requests.parameters(track)
            with self._death_ends_it(self._running_llm()) as llm:
                answers = llm.generate(prompt, params, track.request_id, lora_request=self._adapter)
                async with contextlib.aclosing(answers) as outputs:
                    reason = await self._sampled(llm, track, outputs, salt)
            self._raise_failure()
        return reason

    async def _sampled(
        self, llm: AsyncLLM, track: VllmTrack, outputs: AsyncGenerator[RequestOutput, None], salt: int
    ) -> FinishReason | None:
        """Collect the outputs. None if a load came before the trajectory's first token: the request may have
        used prefixes of the old version, so it must start again."""
        reason: FinishReason = "abort"
        async for output in outputs:
            part = output.outputs[0]
            track.find_state(llm)  # while vLLM still has the request
            if track.first_version is None and len(track.tokens) == track.num_kept and not track.aborted:
                sampled_by = [span.version for span in part.weight_versions or ()]
                sampled_by = sampled_by or [version for version, _ in track.version_starts]
                if sampled_by and int(sampled_by[0]) != salt:
                    track.state = None
                    return None
            track.add(part)
            self.sampled_tokens += len(part.token_ids)
            if track.aborted and not output.finished:
                # when `abort` was called, vLLM did not know the request yet
                await llm.abort(track.request_id)
            if output.finished:
                spans = part.weight_versions or ()
                track.set_versions((span.version, span.start, span.end) for span in spans)
                assert len(track.versions) == len(track.tokens), f"versions: {part.weight_versions}"
                if part.finish_reason not in get_args(FinishReason):  # vLLM's "error", for example
                    raise RuntimeError(f"vLLM ended a response with {part.finish_reason!r}")
                track.set_experts(part.routed_experts)
                reason = track.finished = cast(FinishReason, part.finish_reason)
        return reason

    @contextlib.asynccontextmanager
    async def _failure_ends_it(self, llm: AsyncLLM, doing: str) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            half_way = "" if llm.errored else f"{doing} failed half-way: "
            self._fail(half_way + message_of(error))
            # vLLM's processes may still be waiting for bytes, and would not react to a resume
            await end_processes(llm)
            if isinstance(error, Exception):
                raise ExecutorFailed(self.failure) from error
            raise

    @contextlib.contextmanager
    def _death_ends_it(self, llm: AsyncLLM) -> Iterator[AsyncLLM]:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield llm
        except EngineDeadError as error:
            self._fail(dead(llm).message)
            raise ExecutorFailed(self.failure) from error
        except EngineGenerateError as error:
            raise ExecutorFailed(f"vLLM failed a request: {message_of(error)}") from error

    def _running_llm(self) -> AsyncLLM:
        if self.llm is None:
            raise ExecutorFailed(self.failure or "the rollout engine is not started")
        return self.llm

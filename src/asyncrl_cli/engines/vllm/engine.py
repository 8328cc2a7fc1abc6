"""The engine `vllm`: vLLM's AsyncLLM in the rollout actor's event loop, behind the port of engine.py.

    generate() -> SlotGate -> AsyncLLM.generate ──ZMQ──> [engine process: scheduler ─> model]
                                   ^ tokens as they are sampled ──┘                        ^
    prepare() ──> update_weights: "map this buffer, make new layers of it" ── beside ──────┤
    load() ──> pause ──> finish_weight_update: "exchange them" ────────────────────────────┘ ──> version ──> resume

(With tensor_parallel_size > 1 the model is in worker processes of the engine process.)

Who waits for whom: `generate` waits for a slot (given by `leave` of another, or by the end of a drain), then for its tokens.
`load` with `drain` waits for the running responses; a pause otherwise for one forward pass. If an engine process dies, all of
these waits end with its error (vllm_processes.py), and so does every later call.

Versions are vLLM's own: it labels the outputs of each step with the version that is set between steps, and reports them as spans.
Cached prefixes are keyed by the version that was current when a request began (`cache_salt`): a new request never meets those of
an older one, and one that a load overtook before its first token begins again. (A running request goes on with its own under
`keep-kv`, which is what keep-kv means.)

A load that fails while layers are being exchanged or overwritten leaves a model of two versions: the engine then fails all
requests, now and later, rather than sample from it. One that fails in `prepare` has changed nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from asyncrl_cli.engines.port import Completion, EngineCounters, FinishReason, PauseReport, Sampling, Scores, check_request
from asyncrl_cli.engines.transformers.slot_gate import SlotGate
from asyncrl_cli.engines.vllm import requests as vllm_requests
from asyncrl_cli.engines.vllm import settings as vllm_settings
from asyncrl_cli.engines.vllm import weights as vllm_weights
from asyncrl_cli.engines.vllm.counters import SCORE_PREFIX, VllmCounters
from asyncrl_cli.engines.vllm.direct import Incoming, Way, way_of
from asyncrl_cli.engines.vllm.processes import answer, dead, end_processes, import_vllm, start_llm, told
from asyncrl_cli.engines.vllm.requests import VllmTrack
from asyncrl_cli.engines.vllm.settings import VllmSetup
from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.loop.ports import Interrupt
from asyncrl_cli.models.saved_form import SavedForm
from asyncrl_cli.models.skeleton import skeleton
from asyncrl_cli.weights.buckets import Bucket
from asyncrl_cli.weights.direct import AnnouncedWeights, RankZero
from asyncrl_cli.weights.shared import SharedWeights

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

CLOSE_TIMEOUT_S = 5.0
LAST_OUTPUTS_S = 1.0  # how long a close waits for its aborted requests to be told


class VllmEngine:
    """See `engine.Engine`. `version`: of the weights in `setup.model_dir`."""

    stops_to_score = False

    def __init__(self, setup: VllmSetup, *, version: int = 0, on_running: Callable[[int], None] = lambda running: None) -> None:
        self.slots = setup.slots
        self._setup = setup
        self._version = version
        self._gate = SlotGate(setup.slots, on_running)
        self._tracks: dict[str, VllmTrack] = {}
        self._sampled_tokens = 0
        self._counters = VllmCounters()
        self._num_scored = 0
        self._weights_lock = asyncio.Lock()
        self._prepared: tuple[Mapping[str, torch.Tensor], SharedWeights | Incoming] | None = None
        """As they were given, and as vLLM reads them, or who will send them."""
        self._updates: vllm_weights.Updates
        self._llm: AsyncLLM | None = None
        self._way: Way | None = None
        self._form: SavedForm
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

    @property
    def decode_steps(self) -> int:
        return self._counters.decode_steps

    def counters(self) -> EngineCounters:
        return self._counters.counters()

    def tokens_of(self, request_id: str) -> int:
        track = self._tracks.get(request_id)
        return vllm_requests.num_tokens_so_far(self._running_llm(), track) if track is not None else 0

    def so_far(self, request_id: str) -> Completion | None:
        track = self._tracks.get(request_id)
        return vllm_requests.completion_so_far(self._running_llm(), track) if track is not None else None

    async def start(self) -> None:
        """Start vLLM's processes and wait until they are ready: model loaded, cache allocated."""
        setup = self._setup
        vllm_settings.set_environment(setup)
        await asyncio.to_thread(import_vllm)
        starting = asyncio.to_thread(start_llm, setup, self._counters)
        reading = asyncio.to_thread(skeleton, setup.model_dir, trust_remote_code=setup.trust_remote_code)
        empty, llm = await asyncio.gather(reading, starting)
        self._form = SavedForm(empty)
        self._updates = vllm_weights.Updates(llm)
        self._llm = llm  # from here on `close` ends both
        await self._updates.open()
        await answer(llm, llm.update_weight_version(str(self._version)))

    async def connect(self, rank_zero: RankZero, wire_bytes: int, timeout_s: float) -> None:
        """`nccl`, `ipc`: agree with rank 0 on how weights come. After `start`, before the first load.

        `timeout_s`: of the meeting, and of each transfer; see weights/limits.py.
        """
        self._way = way_of(self._setup.weight_backend, rank_zero, wire_bytes=wire_bytes, timeout_s=timeout_s)
        llm = self._running_llm()
        try:
            await self._way.join(llm)
        except BaseException as error:
            self._fail(told(error))
            await end_processes(llm)
            raise

    async def close(self) -> None:
        self._fail("the rollout engine is closed")
        if (llm := self._llm) is None:
            return
        await self._abort_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_OUTPUTS_S):
                await self._gate.idle()
        self._llm = self._prepared = None
        try:
            await asyncio.to_thread(llm.shutdown, CLOSE_TIMEOUT_S)
        finally:
            self._updates.close()

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

    def receive(self, buckets: Iterable[Bucket], load_bucket_size_bytes: int) -> SharedWeights:
        """One copy, as they arrive, into memory that the engine's processes map. (They read it there: no load bucket is needed.)"""
        return SharedWeights.of_buckets(buckets)

    async def prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """In vLLM's own processes; see engines/vllm/bucket_engine.py."""
        async with self._weights_lock:
            await self._prepare(weights, version)

    async def load(self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt) -> PauseReport:
        async with self._weights_lock:
            self._raise_failure()
            if self._prepared is None or self._prepared[0] is not weights:
                await self._prepare(weights, version)
            if self._way is not None and interrupt != "drain":  # generation goes on while rank 0 sends to another worker
                await self._way.turn()
            self._gate.close()  # a request that came during a pause would look for prefixes of the old version
            try:
                if interrupt == "drain":
                    await self._gate.idle()
                stopped_s = time.perf_counter()
                if self._way is not None and interrupt == "drain":
                    await self._way.turn()
                return await self._swap(version, interrupt, stopped_s)
            except ExecutorFailed as error:
                self._fail(error.message)
                raise
            finally:
                if not self._failure:
                    self._gate.open()

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        """Beside generation, by vLLM's own forward passes; `pause_s` is 0: nothing stops for it."""
        async with self._weights_lock:
            self._raise_failure()
            self._num_scored += 1
            name = f"{SCORE_PREFIX}{self._num_scored}"
            with self._death_ends_it(self._running_llm()) as llm:
                logprobs = await vllm_requests.score(llm, name, sequences, temperature or 1.0)
            return Scores(logprobs=logprobs, pause_s=0.0)

    async def sleep(self) -> None:
        """On a GPU: weights go to the host, the KV cache is given up. (vLLM on a CPU can do neither: both stay.)"""
        if self._setup.sleeps:
            self._raise_failure()
            llm = self._running_llm()
            await answer(llm, llm.sleep(level=1, mode="wait"))

    async def wake(self) -> None:
        if self._setup.sleeps:
            self._raise_failure()
            llm = self._running_llm()
            await answer(llm, llm.wake_up())

    def _check(self, request_id: str, prompt_tokens: list[int], sampling: Sampling, so_far: Completion | None) -> None:
        self._raise_failure()
        if request_id in self._tracks:
            raise ValueError(f"request {request_id} is running already")
        setup = self._setup
        sizes = {"max_prompt_tokens": setup.max_prompt_tokens, "max_response_tokens": setup.max_response_tokens}
        check_request(request_id, prompt_tokens, sampling, so_far, **sizes)
        vllm_requests.check_logprobs_exist(sampling, truncated_sampling=setup.truncated_sampling)

    async def _stream(self, track: VllmTrack, prompt_tokens: list[int], sampling: Sampling, seed: int) -> Completion:
        """A request that a load overtook before its first token has the salt of the version before: it begins again."""
        completion = None
        while completion is None:
            salted = self._version
            prompt = vllm_requests.prompt(prompt_tokens + track.before.tokens, salted)
            params = vllm_requests.parameters(sampling, len(track.before.tokens), seed)
            with self._death_ends_it(self._running_llm()) as llm:
                async with contextlib.aclosing(llm.generate(prompt, params, track.request_id)) as outputs:
                    completion = await self._completed(llm, track, outputs, salted)
            self._raise_failure()
        return completion

    async def _completed(
        self, llm: AsyncLLM, track: VllmTrack, outputs: AsyncGenerator[RequestOutput, None], salted: int
    ) -> Completion | None:
        """None if newer weights than those of the salt sampled the first token: it may have met prefixes of older ones."""
        versions: list[int] = []
        reason: FinishReason = "abort"
        async for output in outputs:
            part = output.outputs[0]
            vllm_requests.state_of(llm, track)  # while vLLM still knows of it
            if not (track.tokens or track.aborted) and vllm_requests.first_version(track, part) not in (None, salted):
                track.state = None
                return None
            track.add(part)
            self._sampled_tokens += len(part.token_ids)
            if track.aborted and not output.finished:
                await llm.abort(track.request_id)  # it was not known to vLLM yet
            if output.finished:
                versions = vllm_requests.versions_of(part.weight_versions, len(track.tokens))
                reason = vllm_requests.reason_of(part.finish_reason)
        return track.completion(versions, reason)

    async def _prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._raise_failure()
        self._prepared = None
        self._form.check(weights, version)
        required = self._form.required.keys()
        if isinstance(weights, AnnouncedWeights):
            assert self._way is not None, "connect comes before the first load"
            self._prepared = (weights, Incoming.of(weights, required, self._way))
            return
        shared = weights if isinstance(weights, SharedWeights) else await asyncio.to_thread(SharedWeights.of_tensors, weights)
        try:
            await self._updates.prepare(shared.describe(required))
        except ExecutorFailed as error:
            if self._running_llm().errored:
                self._fail(error.message)
            raise
        self._prepared = (weights, shared)

    async def _swap(self, version: int, interrupt: Interrupt, stopped_s: float) -> PauseReport:
        """Failed before the load, the old version goes on; later, the engine has failed. `stopped_s`: its pause began."""
        llm = self._running_llm()
        assert self._prepared is not None
        incoming = self._prepared[1]
        async with vllm_weights.paused(llm, interrupt):
            began_s = time.perf_counter()
            if interrupt == "recompute-kv":
                self._counters.caches_cleared()
            try:
                await (incoming.update(llm, version) if isinstance(incoming, Incoming) else self._updates.finish(version))
            except BaseException as error:
                self._fail(told(error) if llm.errored else f"loading version {version} into vLLM failed half-way: {told(error)}")
                await self._abort_all()  # before anything goes on with a model of two versions
                if isinstance(incoming, Incoming):
                    await end_processes(llm)  # they may still wait for bytes, and would not hear a resume
                if isinstance(error, Exception):
                    raise ExecutorFailed(self._failure) from error
                raise
            self._version = version
            loaded_s = time.perf_counter()
        resumed_s = time.perf_counter()
        self._prepared = None  # giving memory back takes time, too
        return PauseReport(load_s=loaded_s - began_s, pause_s=resumed_s - stopped_s)

    @contextlib.contextmanager
    def _death_ends_it(self, llm: AsyncLLM) -> Iterator[AsyncLLM]:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield llm
        except EngineDeadError as error:
            self._fail(dead(llm).message)
            raise ExecutorFailed(self._failure) from error
        except EngineGenerateError as error:
            raise ExecutorFailed(f"vLLM failed a request: {told(error)}") from error

    async def _abort_all(self) -> None:
        for request_id in list(self._tracks):
            await self.abort(request_id)

    def _running_llm(self) -> AsyncLLM:
        if self._llm is None:
            raise ExecutorFailed(self._failure or "the rollout engine is not started")
        return self._llm

    def _fail(self, why: str) -> None:
        """From now on, all that wait for a slot and all that come raise ExecutorFailed with the first `why`."""
        self._failure = self._failure or why
        self._gate.close()
        self._gate.give_up_all()

    def _raise_failure(self) -> None:
        if self._failure:
            raise ExecutorFailed(self._failure)

"""The engine `transformers`: the library's continuous batching in a background thread, behind the engine
port.

    generate() -> SlotGate -> add_request -> [generation thread: forward, TokenSampler] -> result handler
                                                        ^
    load(), score() -> worker thread -> manager.pause() ┘ parks the generation thread between two forwards

Who waits for whom: `generate` waits for a slot (freed when another request leaves, or when a drain ends),
then for its result (the generation thread calls back once per batch of finished responses; there is no
polling and no cost per token in the event loop). `load` with `drain` waits for the running responses. A pause
waits for at most one forward pass. If the generation thread dies, continuous batching fails every request and
every pause.

token_sampler.py says what is reproducible. CUDA graphs and asynchronous batching are off, because the sampler
reads each token on the host: on GPUs this engine is correct rather than fast.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.utils import logging

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.engines.port import EngineCounters, FinishReason, PauseReport, Sampling, Scores
from asyncrl_cli.engines.slotted_engine import SlottedEngine
from asyncrl_cli.engines.transformers import batched_model
from asyncrl_cli.engines.transformers.expert_recorder import ExpertRecorder
from asyncrl_cli.engines.transformers.token_sampler import SampledTrack, TokenSampler
from asyncrl_cli.models.saved_form import SavedForm, skeleton
from asyncrl_cli.profile.schema import Interrupt, ProcessPlace, Profile
from asyncrl_cli.weights.buckets import Bucket, Unpacked
from asyncrl_cli.weights.receivers import AnnouncedWeights
from asyncrl_cli.weights.versions import make_probes, mean_abs_diff

CLOSE_TIMEOUT_S = 30.0
SELF_CHECK_PROMPT_TOKENS = 256
SELF_CHECK_TOKENS = 8
MAX_SELF_CHECK_DIFF = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Of mean logprobs. In bfloat16, logits of a real model between 8 and 16 are rounded to sixteenths,
differently by each path."""
Weights = Mapping[str, torch.Tensor]


class TransformersEngine(SlottedEngine[SampledTrack]):
    """Implements `engines.port.Engine`, which documents the public methods."""

    stops_to_score = True
    _make_track = SampledTrack

    def __init__(
        self, profile: Profile, place: ProcessPlace, on_running: Callable[[int], None] = lambda running: None
    ) -> None:
        super().__init__(profile, place, on_running)
        self._loop: asyncio.AbstractEventLoop
        self.sampler = TokenSampler(
            version=place.version, call_soon=lambda *call: self._loop.call_soon_threadsafe(*call)
        )
        self.model: PreTrainedModel
        self._form: SavedForm
        self.manager: ContinuousBatchingManager
        self._started = False
        self._num_submitted = 0
        self._prompt_tokens = self._cached_prompt_tokens = 0

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.sampler.version

    @property
    def sampled_tokens(self) -> int:  # type: ignore[override]
        return self.sampler.sampled_tokens

    @property
    def decode_steps(self) -> int:  # type: ignore[override]
        return self.sampler.decode_steps

    def counters(self) -> EngineCounters:
        cached = self._cached_prompt_tokens
        return EngineCounters(sums={"prompt_tokens": self._prompt_tokens, "cached_prompt_tokens": cached})

    async def start(self) -> None:
        """Load the model, allocate the cache, start the generation thread and wait until it is ready. Raises
        PreflightError unless the logprobs of sampling and of scoring agree."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._start)
        # Sampling uses a paged cache; scoring and training use a plain forward pass. If the paged path
        # ignored a feature of the model, it would go unnoticed.
        rollout = self._profile.rollout
        length_tokens = min(SELF_CHECK_PROMPT_TOKENS, rollout.max_prompt_tokens)
        (prompt,) = make_probes(1, self._vocab_size, seed=0, length_tokens=length_tokens)
        num_tokens = min(SELF_CHECK_TOKENS, rollout.max_response_tokens)
        sampling = Sampling(temperature=1.0, max_response_tokens=num_tokens)
        answer = await self.generate("self-check", list(prompt), sampling, seed=0)
        scores = await self.score([[*prompt, *answer.tokens]], 1.0)
        diff = mean_abs_diff([answer.logprobs], [scores.logprobs[0][len(prompt) - 1 :]])
        if not diff < MAX_SELF_CHECK_DIFF[self.model.dtype]:
            why = f"its logprobs differ by {diff:.2g} from those of a plain forward pass"
            raise batched_model.unbatchable(self.model, why)
        # the self-check does not count
        self.sampler.sampled_tokens = self.sampler.decode_steps = self._prompt_tokens = 0

    def _start(self) -> None:
        place, trusts = self._place, self._profile.model.trust_remote_code
        torch.set_num_threads(place.threads)
        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(place.model_dir, trust_remote_code=trusts)
        self.model, self.manager = batched_model.open_model(self._profile, place, self.sampler)
        if self._profile.trainer.router_replay:
            self.sampler.recorder = ExpertRecorder(self.model)
        self._form = SavedForm(skeleton(place.model_dir, trust_remote_code=trusts))
        self.sampler.eos_tokens = batched_model.eos_tokens(self.model, tokenizer)
        self.sampler.tail_text = partial(tokenizer.decode, skip_special_tokens=False)
        self.manager.start()
        self._started = True
        with self.manager.pause():  # raises if the thread could not allocate its cache
            assert self.manager.batch_processor is not None
            self.manager.batch_processor.scheduler.tracks = self.sampler.tracks
            if self.sampler.recorder is not None:
                self.sampler.recorder.use(self.manager.batch_processor.cache)
                self.manager.batch_processor.scheduler.recorder = self.sampler.recorder
            self.manager.batch_processor.scheduler.is_fixed = self._profile.run.deterministic

    def _check(self, request_id: str, prompt_tokens: list[int], sampling: Sampling) -> None:
        super()._check(request_id, prompt_tokens, sampling)
        if max(prompt_tokens) >= self._vocab_size:  # in a forward pass it would crash the engine
            why = f"has the token {max(prompt_tokens)}, the model has {self._vocab_size}"
            raise ValueError(f"prompt of {request_id} {why}")

    @property
    def _vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    async def close(self) -> None:
        self._fail("the rollout engine is closed")
        if self._started:
            self._started = False
            await asyncio.to_thread(self.manager.stop, block=True, timeout=CLOSE_TIMEOUT_S, hard_stop=True)

    async def _respond(self, track: SampledTrack) -> FinishReason:
        """Submit the prompt to continuous batching, under a name that no cancelled request has, and wait for
        the response."""
        self._num_submitted += 1
        name = f"{track.request_id}#{self._num_submitted}"
        manager, handlers = self.manager, self.manager.output_router.result_handlers

        def on_result(output: GenerationOutput) -> None:  # in the event loop
            if output.error is None and track.finished is not None:
                track.finish(track.finished)
            elif not track.done.done():
                why = output.error or f"it ended after {len(track.tokens)} tokens without a reason"
                failure = ExecutorFailed(f"continuous batching failed {track.request_id}: {why}")
                track.done.set_exception(failure)

        self.sampler.tracks[name] = track
        manager.register_result_handler(name, on_result)
        try:
            how = {"max_new_tokens": track.tokens_left, "eos_token_id": sorted(self.sampler.eos_tokens)}
            if manager.add_request([*track.prompt_tokens, *track.tokens], request_id=name, **how) is None:
                cause = manager.background_thread_status.fatal_error
                raise ExecutorFailed(f"the rollout engine's generation thread has ended: {cause}")
            return await track.done
        finally:
            self._prompt_tokens += len(track.prompt_tokens) + track.num_kept
            self._cached_prompt_tokens += track.num_cached
            self.sampler.tracks.pop(name, None)
            if handlers.pop(name, None) is not None:
                manager.cancel_request(name)  # it is still running

    async def abort(self, request_id: str) -> None:
        track = self._tracks.get(request_id)
        if track is not None:
            track.finish("abort")
            self.gate.give_up(request_id)

    async def load(self, weights: Weights, version: int, interrupt: Interrupt) -> PauseReport:
        async with self._weights_lock:
            self._raise_failure()
            self._form.check(weights, version)
            # Beside generation: only the copy into the model needs a pause.
            converted = await asyncio.to_thread(self._form.to_memory, weights)
            async with self._closed(interrupt):
                report = await asyncio.to_thread(self._swap, lambda: converted, version, interrupt)
            return replace(report, fetch_s=0.0)

    async def load_in_place(
        self, fetch: Callable[[], Sequence[Bucket]], version: int, interrupt: Interrupt
    ) -> PauseReport:
        def fetched() -> Weights:
            buckets = fetch()
            self._form.check(AnnouncedWeights(bucket.entries for bucket in buckets), version)
            return self._form.to_memory(Unpacked(buckets))

        async with self._weights_lock:
            self._raise_failure()
            async with self._closed(interrupt):
                return await asyncio.to_thread(self._swap, fetched, version, interrupt)

    def _swap(self, fetched: Callable[[], Weights], version: int, interrupt: Interrupt) -> PauseReport:
        """Load what `fetched` returns, while no sequence runs. Blocks."""
        with self.manager.pause():
            paused_s = time.perf_counter()
            # If this raises, nothing has changed: the old version goes on.
            weights = fetched()
            fetched_s = time.perf_counter()
            tensors = self.model.state_dict()
            try:
                with torch.no_grad():
                    for name, tensor in weights.items():
                        tensors[name].copy_(tensor)
            except Exception as error:
                # The model has layers of two versions: fail all requests before a later forward pass can
                # report a token.
                failure = f"loading version {version} failed half-way: {type(error).__name__}: {error}"
                self._loop.call_soon_threadsafe(self._fail, failure)
                self.sampler.tracks.clear()
                raise ExecutorFailed(failure) from error
            # In the pause: tokens before it are of the old version, tokens after it of this one.
            self.sampler.version = version
            loaded_s = time.perf_counter()
            assert self.manager.batch_processor is not None
            cache, scheduler = self.manager.batch_processor.cache, self.manager.batch_processor.scheduler
            for request in list(scheduler.active_requests.values()):
                # As continuous batching itself does when its cache is full: the tokens so far become the
                # prompt, whose keys and values the new weights compute. A prompt that is half computed has no
                # token of older weights, so it must not have their keys either.
                if interrupt == "recompute-kv" or request.status == RequestStatus.PREFILLING:
                    scheduler.finish_request(request.request_id)
                    scheduler.add_waiting_request(request.create_equivalent_initial_request())
            # Later requests must not find the blocks filled so far, nor those that will hold keys of two
            # versions.
            scheduler.interrupted = set(scheduler.active_requests)
            cache.evict_cached_blocks()
            for allocator in cache.cache_allocators.values():
                allocator.ledger.hash_to_block.clear()
                allocator.ledger.block_to_hash.clear()
        pause_s = time.perf_counter() - paused_s
        return PauseReport(load_s=loaded_s - fetched_s, pause_s=pause_s, fetch_s=fetched_s - paused_s)

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        def paused() -> Scores:
            with self.manager.pause():
                paused_s = time.perf_counter()
                logprobs = batched_model.score(self.model, sequences, temperature)
            return Scores(logprobs=logprobs, pause_s=time.perf_counter() - paused_s)

        async with self._weights_lock:
            self._raise_failure()
            return await asyncio.to_thread(paused)

    def _fail(self, why: str) -> None:
        super()._fail(why)
        for track in self._tracks.values():
            track.finish("abort")  # wakes `generate`, which then raises the failure

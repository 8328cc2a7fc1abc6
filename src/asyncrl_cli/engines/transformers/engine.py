"""The engine `transformers`: its own continuous batching in a background thread, behind the asyncio port of engine.py.

    generate() -> SlotGate -> add_request -> [generation thread: forward, TokenSampler] -> result handler -> returns
                                                        ^
    load(), score() -> worker thread -> manager.pause() -> parks the generation thread between two forwards

Who waits for whom: `generate` waits for a slot (given by `leave` of another, or by the end of a drain), then for its
result (the generation thread calls back once per batch of finished responses; there is no polling and no cost per token
in the event loop). `load` with `drain` waits for the running responses. A pause waits for at most one forward pass. If
the generation thread dies, continuous batching fails every request and every pause.

A load that fails while layers are being overwritten leaves a model of two versions: the engine then fails all requests, now
and later, rather than sample from it.

What is reproducible: see token_sampler.py. What is not done here: CUDA graphs and asynchronous batching, since the
sampler reads each token on the host; on GPUs this engine is correct rather than fast.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from asyncrl_cli.engines.port import (
    NO_COUNTERS,
    Completion,
    EngineCounters,
    FinishReason,
    PauseReport,
    Sampling,
    Scores,
    check_request,
)
from asyncrl_cli.engines.transformers import batching, scoring
from asyncrl_cli.engines.transformers.slot_gate import SlotGate
from asyncrl_cli.engines.transformers.token_sampler import TokenSampler, Track, stream_of
from asyncrl_cli.errors import ExecutorFailed, PreflightError
from asyncrl_cli.loop.ports import Interrupt
from asyncrl_cli.models.attention import MAX_ATTENTION_DIFF, choose_attention, takes_attention
from asyncrl_cli.models.saved_form import SavedForm
from asyncrl_cli.models.skeleton import skeleton
from asyncrl_cli.weights.buckets import Bucket, split, unpack
from asyncrl_cli.weights.in_place import announced, copy_into
from asyncrl_cli.weights.probes import make_probes, mean_abs_diff

CLOSE_TIMEOUT_S = 30.0
SELF_CHECK_PROMPT_TOKENS = 256
SELF_CHECK_TOKENS = 8


class TransformersEngine:
    """See `engine.Engine`. `model_dir` is a local Hugging Face directory; `dtype` is `float32` or `bfloat16`.

    `on_running(running)` is called in the event loop whenever the number of generating sequences changes.
    """

    stops_to_score = True

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
        on_running: Callable[[int], None] = lambda running: None,
    ) -> None:
        self.slots = slots
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self._model_dir = str(model_dir)
        self._device = torch.device(device)
        self._dtype = getattr(torch, dtype)
        self._threads = threads
        self._seed = seed
        self._sampler = TokenSampler(version=version, on_stop=self._on_stop)
        self._manager: ContinuousBatchingManager
        self._loop: asyncio.AbstractEventLoop
        self._trust_remote_code = trust_remote_code
        self._gate = SlotGate(slots, on_running)
        self._tracks: dict[str, Track] = {}
        self._weights_lock = asyncio.Lock()
        self._requests_lock = threading.Lock()
        """Held while requests are submitted, withdrawn or interrupted: an interrupt comes from a load's thread."""
        self._started = False
        self._closed = False
        self._failure = ""

    @property
    def version(self) -> int:
        return self._sampler.version

    @property
    def running(self) -> int:
        return self._gate.running

    @property
    def sampled_tokens(self) -> int:
        return self._sampler.sampled_tokens

    @property
    def decode_steps(self) -> int:
        return self._sampler.decode_steps

    def counters(self) -> EngineCounters:
        return NO_COUNTERS

    def tokens_of(self, request_id: str) -> int:
        track = self._tracks.get(request_id)
        return len(track.tokens) if track is not None else 0

    async def start(self) -> None:
        """Load the model, allocate the cache, start the generation thread and wait until it is ready."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._start)
        await self._check_itself()

    async def _check_itself(self) -> None:
        """Sampled tokens come through a paged cache, scores (and all that is trained) through a plain forward: a feature of the
        model that the first leaves out would go unseen. PreflightError unless the two agree."""
        vocab_size = int(self._model.config.get_text_config().vocab_size)
        (prompt,) = make_probes(1, vocab_size, seed=0, length_tokens=min(SELF_CHECK_PROMPT_TOKENS, self.max_prompt_tokens))
        how = Sampling(temperature=1.0, max_response_tokens=min(SELF_CHECK_TOKENS, self.max_response_tokens))
        answer = await self.generate("self-check", list(prompt), how, seed=0)
        scores = await self.score([[*prompt, *answer.tokens]], 1.0)
        diff = mean_abs_diff([answer.logprobs], [scores.logprobs[0][len(prompt) - 1 :]])
        if not diff < MAX_ATTENTION_DIFF[self._dtype]:
            raise _unbatchable(self._model, f"its logprobs differ by {diff:.2g} from those of a plain forward pass")
        self._sampler.forget_counts()

    def _start(self) -> None:
        torch.set_num_threads(self._threads)
        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(self._model_dir, trust_remote_code=self._trust_remote_code)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self._model_dir, dtype=self._dtype, attn_implementation="eager", trust_remote_code=self._trust_remote_code
        )
        self._model.to(self._device).requires_grad_(False).eval()
        attention = choose_attention(self._model)
        if not takes_attention(self._model):
            raise _unbatchable(self._model, "it does not take its attention from transformers' AttentionInterface")
        self._form = SavedForm(skeleton(self._model_dir, trust_remote_code=self._trust_remote_code))
        self._sampler.eos_tokens = batching.eos_tokens(self._model, tokenizer)
        self._sampler.tail_text = partial(tokenizer.decode, skip_special_tokens=False)
        self._manager = batching.make_manager(
            self._model,
            self._sampler,
            attention,
            slots=self.slots,
            max_prompt_tokens=self.max_prompt_tokens,
            max_response_tokens=self.max_response_tokens,
            seed=self._seed,
        )
        self._manager.start()
        self._started = True
        with self._manager.pause():  # raises if the thread could not allocate its cache
            pass

    async def close(self) -> None:
        self._closed = True
        self._gate.close()
        if self._started:
            self._started = False
            await asyncio.to_thread(self._manager.stop, block=True, timeout=CLOSE_TIMEOUT_S, hard_stop=True)
        self._gate.give_up_all()
        for track in list(self._tracks.values()):
            _fail(track, ExecutorFailed(f"the rollout engine was closed while {track.request_id} was generating"))

    def so_far(self, request_id: str) -> Completion | None:
        track = self._tracks.get(request_id)
        return track.completion("abort") if track is not None else None

    async def generate(
        self, request_id: str, prompt_tokens: list[int], sampling: Sampling, seed: int, so_far: Completion | None = None
    ) -> Completion:
        self._check(request_id, prompt_tokens, sampling, so_far)
        track = Track(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            stream=stream_of(seed),
            done=asyncio.get_running_loop().create_future(),
        )
        if so_far is not None:
            track.go_on_from(so_far)
        self._tracks[request_id] = track
        try:
            if not await self._gate.entered(request_id):
                return track.completion(await track.done)
            try:
                self._submit(track)
                return track.completion(await track.done)
            finally:
                self._withdraw(track)
                self._gate.leave()
        finally:
            del self._tracks[request_id]

    async def abort(self, request_id: str) -> None:
        track = self._tracks.get(request_id)
        if track is not None and not track.done.done():
            track.done.set_result("abort")
            self._gate.give_up(request_id)

    def receive(self, buckets: Iterable[Bucket], load_bucket_size_bytes: int) -> Mapping[str, torch.Tensor]:
        """Copies: the buckets' memory may be read-only. Slices, so that no copy is larger than a load bucket."""
        weights: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            for part in split(bucket, load_bucket_size_bytes):
                weights |= unpack(part)
        return weights

    async def prepare(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Nothing: they are copied as they were received."""

    async def load(self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt) -> PauseReport:
        async with self._weights_lock:
            self._raise_failure()
            self._form.check(weights, version)
            converted = await asyncio.to_thread(self._form.to_memory, weights)
            return await self._load(partial(self._copy, converted, version), version, interrupt)

    async def load_in_place(
        self, fetch: Callable[[], Sequence[Bucket]], version: int, interrupt: Interrupt, load_bucket_size_bytes: int
    ) -> PauseReport:
        async with self._weights_lock:
            self._raise_failure()
            return await self._load(partial(self._fetch_and_copy, fetch, version, load_bucket_size_bytes), version, interrupt)

    async def _load(self, copy: Callable[[], float], version: int, interrupt: Interrupt) -> PauseReport:
        """`copy` puts the weights in, in a pause; it returns the seconds for which it waited for them."""
        if interrupt == "drain":
            self._gate.close()
        try:
            if interrupt == "drain":
                await self._gate.idle()
            report, interrupted = await asyncio.to_thread(self._swap, copy, version, interrupt)
            for track in interrupted:
                if not track.done.done():
                    self._submit(track)
            return report
        finally:
            if not self._closed and not self._failure:
                self._gate.open()

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        async with self._weights_lock:
            self._raise_failure()
            return await asyncio.to_thread(self._score, sequences, temperature)

    async def sleep(self) -> None:
        """Weights and cache stay where they are: on a CPU the machine's memory is the trainer's anyway."""

    async def wake(self) -> None:
        pass

    def _check(self, request_id: str, prompt_tokens: list[int], sampling: Sampling, so_far: Completion | None) -> None:
        if self._closed:
            raise ExecutorFailed("the rollout engine is closed")
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

    def _submit(self, track: Track) -> None:
        """Hand prompt and tokens so far to continuous batching; the budget counts the earlier tokens."""
        if track.done.done():
            return
        with self._requests_lock:
            track.num_submits += 1
            track.submitted_as = f"{track.request_id}#{track.num_submits}"
            self._sampler.tracks[track.submitted_as] = track
            self._manager.register_result_handler(track.submitted_as, partial(self._on_result, track))
            accepted = self._manager.add_request(
                track.prompt_tokens + track.tokens,
                request_id=track.submitted_as,
                max_new_tokens=track.tokens_left,
                eos_token_id=sorted(self._sampler.eos_tokens),
            )
        if accepted is None:
            cause = self._manager.background_thread_status.fatal_error
            raise ExecutorFailed(f"the rollout engine's generation thread has ended: {cause}")

    def _withdraw(self, track: Track) -> None:
        """Forget a submitted request, and stop it if it still runs."""
        with self._requests_lock:
            self._sampler.tracks.pop(track.submitted_as, None)
            if self._manager.output_router.result_handlers.pop(track.submitted_as, None) is not None:
                self._manager.cancel_request(track.submitted_as)

    def _on_result(self, track: Track, output: GenerationOutput) -> None:
        """In the event loop. A result of an earlier submit cannot arrive: its handler was removed."""
        if output.error is not None:
            _fail(track, ExecutorFailed(f"continuous batching failed {track.request_id}: {output.error}"))
        elif track.finished is not None:
            _finish(track, track.finished)
        else:
            ended = f"continuous batching ended {track.request_id} after {len(track.tokens)} tokens, without a reason"
            _fail(track, ExecutorFailed(ended))

    def _on_stop(self, track: Track) -> None:
        """In the generation thread: a stop string is nothing that continuous batching knows of."""
        self._loop.call_soon_threadsafe(_finish, track, "stop")

    def _swap(self, copy: Callable[[], float], version: int, interrupt: Interrupt) -> tuple[PauseReport, list[Track]]:
        """In a worker thread. Returns the responses that have to be submitted again."""
        with self._manager.pause():
            paused_s = time.perf_counter()
            with torch.no_grad():
                fetch_s = copy()
            self._sampler.version = version
            loaded_s = time.perf_counter()
            interrupted = self._interrupt() if interrupt == "recompute-kv" else []
        ended_s = time.perf_counter()
        load_s = loaded_s - paused_s - fetch_s
        return PauseReport(load_s=load_s, pause_s=ended_s - paused_s, fetch_s=fetch_s), interrupted

    def _copy(self, weights: Mapping[str, torch.Tensor], version: int) -> float:
        own = self._model.state_dict()
        with self._whole_or_ended(version):
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        return 0.0

    def _fetch_and_copy(self, fetch: Callable[[], Sequence[Bucket]], version: int, load_bucket_size_bytes: int) -> float:
        began_s = time.perf_counter()
        buckets = fetch()
        fetch_s = time.perf_counter() - began_s
        self._form.check(announced(buckets), version)
        if self._form.converts:
            weights = {name: tensor for bucket in buckets for name, tensor in unpack(bucket).items()}
            self._copy(self._form.to_memory(weights), version)
            return fetch_s
        own = self._model.state_dict()
        with self._whole_or_ended(version):
            for bucket in buckets:
                copy_into(own, bucket, load_bucket_size_bytes)
        return fetch_s

    @contextmanager
    def _whole_or_ended(self, version: int) -> Iterator[None]:
        """Inside a pause, round the copying: what runs is failed before a later forward can tell the event loop of any token."""
        try:
            yield
        except Exception as error:
            failure = f"loading version {version} failed half-way: {type(error).__name__}: {error}"
            self._loop.call_soon_threadsafe(self._fail_all, failure)
            self._interrupt()
            raise ExecutorFailed(failure) from error

    def _interrupt(self) -> list[Track]:
        """Inside a pause: end all unfinished requests in continuous batching, so that their cache is freed.

        The scheduler's own mark takes effect before its next batch; the queued one catches a request that the
        scheduler has not seen yet.
        """
        assert self._manager.batch_processor is not None
        with self._requests_lock:
            interrupted = [track for track in self._sampler.tracks.values() if track.finished is None]
            for track in interrupted:
                del self._sampler.tracks[track.submitted_as]
                self._manager.output_router.result_handlers.pop(track.submitted_as, None)
                self._manager.batch_processor.scheduler.set_request_cancellation(track.submitted_as)
                self._manager.cancel_request(track.submitted_as)
        return interrupted

    def _score(self, sequences: list[list[int]], temperature: float) -> Scores:
        with self._manager.pause():
            paused_s = time.perf_counter()
            logprobs = scoring.score(self._model, sequences, temperature)
        return Scores(logprobs=logprobs, pause_s=time.perf_counter() - paused_s)

    def _fail_all(self, failure: str) -> None:
        """All that run or wait for a slot, now, and all that come later raise ExecutorFailed."""
        self._failure = failure
        self._gate.close()
        self._gate.give_up_all()
        for track in self._tracks.values():
            _fail(track, ExecutorFailed(failure))

    def _raise_failure(self) -> None:
        if self._failure:
            raise ExecutorFailed(self._failure)


def _unbatchable(model: PreTrainedModel, why: str) -> PreflightError:
    return PreflightError(
        f'rollout.engine = "transformers" cannot batch a {model.config.model_type} model: {why}', hint="--set rollout.engine=vllm"
    )


def _finish(track: Track, reason: FinishReason) -> None:
    if not track.done.done():
        track.done.set_result(reason)


def _fail(track: Track, error: ExecutorFailed) -> None:
    if not track.done.done():
        track.done.set_exception(error)

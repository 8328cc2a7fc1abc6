"""An engine whose model is on somebody else's server (`asyncrl serve`).

    generate ─> slots ─> POST /v1/completions ─> token ids, logprobs and versions, checked
    fetch ─> the server fetches a version, beside generation ─> load ─> it swaps it in

The server counts versions by itself: other runs may have used it. `_versions` maps its numbers to the run's.
Nothing is generated before the first load, because nobody knows what the server holds.

Any doubt ends the engine, and with it the worker: a failed request; a server that is silent, or holds another
version than it was sent, because it was restarted or others use it; tokens of unknown weights. A fresh worker
(`rollout.max_restarts`) waits for the server, asks for its version, and loads the newest weights.

Who waits for whom: a fetch and a load for the server, `weights.timeout_s`. A response takes as long as it
takes, and so does a load that drains: the poll tells a silent server from a slow one, within ANSWER_S, and
the driver notices a worker without tokens (`rollout.call_timeout_s`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl_cli.base.errors import ExecutorFailed, PreflightError
from asyncrl_cli.engines.port import EngineCounters, FinishReason, PauseReport, Scores
from asyncrl_cli.engines.remote.server import Server, ServerFailed, check_facts, facts_of
from asyncrl_cli.engines.slotted_engine import SlottedEngine, Track
from asyncrl_cli.profile.schema import Interrupt, ProcessPlace, Profile

POLL_S, RETRY_S = 1.0, 2.0
SHARE_OF_START = 0.9
"""Of `placement.start_timeout_s`, for a server that is just being restarted."""


class RemoteEngine(SlottedEngine[Track]):
    _make_track = Track
    fetches_versions = True
    stops_to_score = False

    def __init__(
        self, profile: Profile, place: ProcessPlace, on_running: Callable[[int], None] = lambda running: None
    ) -> None:
        super().__init__(profile, place, on_running)
        self.gate.close()
        self.version = place.version
        self.sampled_tokens = self.decode_steps = 0
        assert profile.rollout.urls is not None, "the profile's checks let no other pass"
        self._server = Server(profile.rollout.urls[place.index], profile)
        self._versions: dict[int, int] = {}
        self._fetched: dict[str, Any] = {}
        self._requests: dict[str, asyncio.Task[Any]] = {}
        self._watching: asyncio.Task[None] | None = None

    def counters(self) -> EngineCounters:
        before = self._before["sums"]
        sums = {name: total - before.get(name, 0) for name, total in self._facts["sums"].items()}
        return EngineCounters(sums=sums, gauges=self._facts["gauges"])

    async def start(self) -> None:
        """Wait for the server, and check that it has what the run needs."""
        self._loop = asyncio.get_running_loop()
        until_s = self._loop.time() + SHARE_OF_START * self._profile.placement.start_timeout_s
        while True:
            try:
                self._facts = self._before = await self._server.facts()
                break
            except ServerFailed as failed:
                # 5xx: a proxy answers for a server that is not there yet
                if 0 < failed.status < 500 or self._loop.time() > until_s:
                    raise
            await asyncio.sleep(RETRY_S)
        model_dir = Path(self._place.model_dir)
        ours = await asyncio.to_thread(facts_of, self._profile, model_dir)
        try:
            check_facts(self._server.url, self._facts, ours, self._profile, model_dir)
        except PreflightError as misfit:  # a restart may find another server there: the worker stays lost
            raise ExecutorFailed(misfit.message, hint=misfit.hint) from None
        self._held = self._facts["version"]
        self._watching = asyncio.create_task(self._watch(), name=f"watch {self._server.url}")

    async def close(self) -> None:
        self._fail("the rollout engine is closed")
        ending = [*self._requests.values(), *filter(None, [self._watching])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._server.close()

    async def _watch(self) -> None:
        while not self.failure:
            await asyncio.sleep(POLL_S)
            try:
                await self._poll()
            except ServerFailed as failed:
                self._fail(failed.message)

    async def _poll(self) -> None:
        """Ask for counters and version. Raises ServerFailed if another version is loaded than was sent."""
        expected = self._held  # a load may end before the answer comes
        facts = await self._server.facts()
        held = facts["version"]
        if held < expected or not (held == expected or held in self._versions):
            why = f"it holds version {held} of its own count, not {expected}: it was restarted, or others"
            raise self._server.failed(f"{why} use it")
        self._facts = facts
        for name in ("sampled_tokens", "decode_steps"):
            setattr(self, name, max(getattr(self, name), facts[name] - self._before[name]))

    async def _respond(self, track: Track) -> FinishReason:
        how, prompt = track.sampling, track.prompt_tokens + track.tokens
        body = {name: getattr(how, name) for name in ("temperature", "top_p", "top_k", "min_p", "stop")}
        body |= {"prompt": prompt, "max_tokens": how.max_response_tokens - track.num_kept}
        body |= {"seed": track.seed, "return_token_ids": True}
        asking = self._server.ask("/v1/completions", body, math.inf)
        request = self._requests[track.request_id] = asyncio.create_task(asking)
        try:
            await asyncio.wait([request])
            if request.cancelled():
                return "abort"
            return self._checked(track, prompt, request.result())
        except ServerFailed as failed:
            self._fail(failed.message)
            return "abort"
        finally:
            request.cancel()
            del self._requests[track.request_id]

    def _checked(self, track: Track, prompt: list[int], answer: Any) -> FinishReason:
        """Raises ServerFailed for an answer that this run's weights cannot have given."""
        try:
            (choice,) = answer["choices"]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            versions = [self._versions[version] for version in choice["weight_versions"]]
            is_right = answer["prompt_token_ids"] == prompt and all(map(math.isfinite, logprobs))
            is_right &= 0 < len(tokens) == len(logprobs) == len(versions)
            is_right &= 0 <= min(tokens) <= max(tokens) < self._facts["vocab_size"]
        except (KeyError, TypeError, ValueError):
            is_right = False
        if not is_right:
            why = "an answer lacks tokens, logprobs or versions, or has those of other weights than were sent"
            raise self._server.failed(why)
        track.tokens += tokens
        track.logprobs += logprobs
        track.versions += versions
        self.version = max(self.version, versions[-1])  # `load` may not have been answered yet
        reason: FinishReason = choice["finish_reason"]
        return reason

    async def abort(self, request_id: str) -> None:
        """A server says nothing of a response that is not complete, so there are no tokens so far."""
        self.gate.give_up(request_id)
        if (request := self._requests.get(request_id)) is not None:
            request.cancel()

    def fetch(self, where: str) -> Mapping[str, torch.Tensor]:
        return asyncio.run_coroutine_threadsafe(self._fetch(where), self._loop).result()

    async def _fetch(self, where: str) -> Mapping[str, torch.Tensor]:
        await self._poll()
        fetched = {"model_path": where, "version": self._facts["newest"] + 1}
        await self._update({**fetched, "load": False}, self._profile.weights.timeout_s)
        self._fetched = fetched
        return {}

    async def load(
        self, weights: Mapping[str, torch.Tensor], version: int, interrupt: Interrupt
    ) -> PauseReport:
        async with self._weights_lock:
            number = self._fetched["version"]
            self._versions[number] = version
            limit_s = math.inf if interrupt == "drain" else self._profile.weights.timeout_s
            found = await self._update({**self._fetched, "interrupt": interrupt}, limit_s)
            self._held, self.version = number, version
            self.gate.open()
            return PauseReport(load_s=found["last_load"]["load_s"], pause_s=found["last_load"]["pause_s"])

    async def _update(self, body: Mapping[str, Any], limit_s: float) -> Any:
        """Raises ValueError if the server refuses the version and keeps its weights, ServerFailed if it has
        got another one meanwhile: from others, or by a fetch that this run has given up."""
        self._raise_failure()
        try:
            return await self._server.ask("/async_rl/update_weights", body, limit_s)
        except ServerFailed as failed:
            if failed.status == 400:
                await self._poll()
                if self._facts["newest"] < body["version"]:
                    raise ValueError(failed.message) from None
            self._fail(failed.message)
            raise

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        body = {"sequences": sequences, "temperature": temperature}
        found = await self._server.ask("/async_rl/score", body, self._profile.weights.timeout_s)
        return Scores(logprobs=found["logprobs"], pause_s=found["pause_s"])

    def _fail(self, why: str) -> None:
        super()._fail(why)
        for request in self._requests.values():
            request.cancel()

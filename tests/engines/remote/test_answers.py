"""What the engine `remote` makes of answers that a real server gives only when something is late, or goes
wrong: a peer in this process gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from asyncrl_cli.base.child_process import REMOTE_TOKEN
from asyncrl_cli.base.errors import ExecutorFailed, PreflightError
from asyncrl_cli.engines.remote import KIND, remote_engine
from asyncrl_cli.engines.remote.remote_engine import RemoteEngine
from asyncrl_cli.engines.remote.server import FACTS, Server, facts_of
from asyncrl_cli.profile.schema import EnvSection
from tests.engines.made import made_for, sampling

UPDATE, COMPLETIONS = "/async_rl/update_weights", "/v1/completions"
Answer = Callable[[dict[str, Any]], Awaitable[web.Response]]
COUNTED = {"sampled_tokens": 70, "decode_steps": 7, "version": 4, "newest": 4, "gauges": {}}


def error(status: int, message: str = "no") -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


class Peer:
    """It fetches and loads what it is sent, and gives one response. A test replaces `answers`, by path."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"engine": "transformers", "sums": {"preemptions": 40.0}, **COUNTED}
        self.answers: dict[str, Answer] = {
            FACTS: self.describe,
            UPDATE: self.update,
            COMPLETIONS: self.respond,
        }

    async def answer(self, request: web.Request) -> web.Response:
        return await self.answers[request.path](await request.json() if request.can_read_body else {})

    async def describe(self, body: dict[str, Any]) -> web.Response:
        return web.json_response(self.facts)

    async def update(self, body: dict[str, Any]) -> web.Response:
        self.facts["newest"] = body["version"]
        if body.get("load", True):
            self.facts["version"] = body["version"]
        return web.json_response({"last_load": {"load_s": 0.5, "pause_s": 0.25}})

    async def respond(self, body: dict[str, Any]) -> web.Response:
        versions, logprobs = [self.facts["version"]], {"token_logprobs": [-1.0]}
        choice = {"token_ids": [3], "logprobs": logprobs, "weight_versions": versions}
        choices = [{**choice, "finish_reason": "length"}]
        return web.json_response({"choices": choices, "prompt_token_ids": body["prompt"]})


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Peer:
    """The engine polls it only where a test says so."""
    monkeypatch.setattr(remote_engine, "POLL_S", 1e6)
    monkeypatch.setattr(remote_engine, "RETRY_S", 0.0)
    monkeypatch.setenv(REMOTE_TOKEN, "a-token")
    return Peer()


@asynccontextmanager
async def engine_at(peer: Peer, model_dir: Path, **env: Any) -> AsyncIterator[RemoteEngine]:
    """Not yet started."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", peer.answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        profile, place = made_for(model_dir, transport="disk", engine="remote", urls=(url,))
        profile = profile.model_copy(update={"env": EnvSection(**env)})
        peer.facts = {**facts_of(profile, model_dir), **peer.facts}
        engine = RemoteEngine(profile, replace(place, index=0))
        try:
            yield engine
        finally:
            await engine.close()


async def load(engine: RemoteEngine, version: int) -> None:
    fetched = await asyncio.to_thread(engine.fetch, f"file:///version-{version}")
    await engine.load(fetched, version, "keep-kv")


async def test_counters_of_a_server_that_has_served_before_begin_at_0(peer: Peer, model_dir: Path) -> None:
    async with engine_at(peer, model_dir) as engine:
        await engine.start()
        assert engine.counters().sums == {"preemptions": 0}
        peer.facts |= {"sums": {"preemptions": 43.0}, "sampled_tokens": 100}
        await engine._poll()
        assert (engine.counters().sums, engine.sampled_tokens) == ({"preemptions": 3}, 30)


async def test_a_response_may_take_longer_than_an_episode(peer: Peer, model_dir: Path) -> None:
    async def late(body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.05)
        return await peer.respond(body)

    peer.answers[COMPLETIONS] = late
    async with engine_at(peer, model_dir, episode_timeout_s=0.01) as engine:
        await engine.start()
        await load(engine, 0)
        completion = await engine.generate("r", [5, 6], sampling(1), 0)
    assert (completion.tokens, completion.versions) == ([3], [0])


async def test_a_load_may_end_while_a_poll_is_answered(peer: Peer, model_dir: Path) -> None:
    asked, loaded = asyncio.Event(), asyncio.Event()

    async def slowly(body: dict[str, Any]) -> web.Response:
        facts = dict(peer.facts)
        asked.set()
        await loaded.wait()
        return web.json_response(facts)

    async with engine_at(peer, model_dir) as engine:
        await engine.start()
        fetched = await asyncio.to_thread(engine.fetch, "file:///version-0")
        peer.answers[FACTS] = slowly
        poll = asyncio.create_task(engine._poll())
        await asked.wait()
        await engine.load(fetched, 0, "keep-kv")
        loaded.set()
        await poll
        peer.facts["version"] = 4  # as after a restart
        with pytest.raises(ExecutorFailed, match="it holds version 4 of its own count, not 5"):
            await engine._poll()


@pytest.mark.parametrize("fails_at", ["the fetch", "the load"])
@pytest.mark.parametrize("newer", [0, 1, 2])
async def test_a_refused_version_loses_the_server_only_if_another_one_came_between(
    fails_at: str, newer: int, peer: Peer, model_dir: Path
) -> None:
    async def refuse(body: dict[str, Any]) -> web.Response:
        if body.get("load", True) == (fails_at == "the load"):
            peer.facts["newest"] = 4 + newer  # a server forgets a version whose tensors it refuses
            return error(400, "wrong shape" if newer == 0 else "not newer")
        return await peer.update(body)

    peer.answers[UPDATE] = refuse
    async with engine_at(peer, model_dir) as engine:
        await engine.start()
        lost = pytest.raises(ExecutorFailed, match="400 not newer")
        with lost if newer else pytest.raises(ValueError, match="400 wrong shape"):
            await load(engine, 0)
        assert bool(engine.failure) == (newer > 0)


async def test_a_proxys_error_does_not_end_the_wait_for_a_server(peer: Peer, model_dir: Path) -> None:
    answers = [error(502), error(503), error(401)]

    async def not_yet(body: dict[str, Any]) -> web.Response:
        return answers.pop(0)

    peer.answers[FACTS] = not_yet
    async with engine_at(peer, model_dir) as engine:
        with pytest.raises(ExecutorFailed, match="401"):
            await engine.start()
    assert not answers


@pytest.mark.parametrize("key", ["rollout.slots", "vocabulary", "engine", "newest", "sums", "decode_steps"])
async def test_a_server_that_lacks_a_fact_is_none_of_this_version(
    key: str, peer: Peer, model_dir: Path
) -> None:
    async with engine_at(peer, model_dir) as engine:
        del peer.facts[key]
        server = Server(engine._server.url, engine._profile)
        with pytest.raises(ExecutorFailed, match="no `asyncrl serve` of this version"):
            await server.facts()
        await server.close()


@pytest.mark.parametrize(
    "wrong", [{"version": "7"}, {"rollout.slots": None}, {"sums": [1]}, {"gauges": {"slots": "many"}}]
)
async def test_facts_of_another_kind_end_the_poll_with_an_error(
    wrong: dict[str, Any], peer: Peer, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "POLL_S", 0.0)
    async with engine_at(peer, model_dir) as engine:
        await engine.start()
        peer.facts |= wrong
        assert engine._watching is not None
        await asyncio.wait_for(engine._watching, 10)
        assert "no `asyncrl serve` of this version" in engine.failure


def test_the_tokenizer_is_read_once_for_all_servers(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ("http://one:8000", "http://two:8000")
    profile, _ = made_for(model_dir, transport="disk", engine="remote", urls=urls)
    there = {**facts_of(profile, model_dir), "engine": "transformers", "vocabulary": "another"}
    read, load = [], AutoTokenizer.from_pretrained

    async def facts(server: Server) -> dict[str, Any]:
        return there

    def loads(*given: Any, **options: Any) -> Any:
        read.append(given)
        return load(*given, **options)

    monkeypatch.setenv(REMOTE_TOKEN, "a-token")
    monkeypatch.setattr(Server, "facts", facts)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", loads)
    with pytest.raises(PreflightError, match=r"one:8000: vocabulary .*two:8000: vocabulary"):
        KIND.check_servers(profile, model_dir)
    assert read == [(model_dir,)]

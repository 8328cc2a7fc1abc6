"""`asyncrl serve`: one rollout worker's engine and gateway in this process, without Ray and without a run.
For trainers and agents of others.

    POST /v1/chat/completions ─> Gateway ─> Engine <─ Loader <─ /async_rl/..., /weights/load

The port is taken before the model is loaded. SIGINT and SIGTERM end the server: requests get an error, the
engine's processes end; if the model is still being loaded, once it is. A second one ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, Field

from asyncrl_cli.base.errors import ExecutorFailed, PreflightError, RefusedError
from asyncrl_cli.base.safe_files import key_in
from asyncrl_cli.engines.port import Engine, Sampling, make_engine, worker_merges
from asyncrl_cli.engines.remote.server import FACTS, facts_of
from asyncrl_cli.envs.chat import load_chat
from asyncrl_cli.envs.episode import Limits
from asyncrl_cli.envs.gateway.admin_routes import admin_routes
from asyncrl_cli.envs.gateway.async_rl_routes import Updates, async_rl_routes
from asyncrl_cli.envs.gateway.openai_api import Refused
from asyncrl_cli.envs.gateway.server import BACKLOG, Gateway, body_of
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.job.host_process import merging, no_collection_while_starting
from asyncrl_cli.job.rollout_weights import Loader
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.profile.schema import ProcessPlace, Profile

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOST_SCORED = 1024
"""Sequences that one request may have scored."""
WIDEST = 4
"""How many times the bytes of the model's files a trainer's tensors may have: float32 for 8 bits."""


def bound(host: str, port: int) -> socket.socket:
    """The port, listening. Raises PreflightError if it is taken, or the host is not this machine's."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        hint = "--port 0 takes any free one; `ss -ltnp` says who listens"
        raise PreflightError(f"{host}:{port} cannot be used: {error.strerror}", hint=hint) from None


def write_key(path: Path, key: str) -> None:
    try:
        with open(path, "x", encoding="ascii", opener=partial(os.open, mode=0o600)) as file:
            file.write(f"{key}\n")
    except OSError as error:
        hint = "name another --token-file"
        raise RefusedError(f"{path} cannot be written: {error.strerror}", hint=hint) from None


async def serve_until_stopped(
    profile: Profile,
    place: ProcessPlace,
    listening: socket.socket,
    token_file: Path,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. Raises as `make_engine` and the engine's start do."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        say("ending; a second signal ends at once")
        stop.set()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, end)
    slots, timeout_s = profile.rollout.slots, profile.weights.timeout_s
    with no_collection_while_starting():
        # its clock stands still: nobody takes its reports, in which states would pile up
        meter = RolloutMeter("server", slots, lambda: 0.0, lambda: None)
        engine = make_engine(profile, place, meter.running)
        # as in an eval, nothing is trained here that needs the kept tokens
        sampling = Sampling.of(profile.rollout, profile.rollout.temperature, is_eval=True)
        limits = Limits.of(profile)
        trusted, max_tokens = profile.model.trust_remote_code, limits.max_context_tokens
        chat = load_chat(place.model_dir, trust_remote_code=trusted, max_tokens=max_tokens)
        whole = merging(profile, place) if worker_merges(profile, place.device) else iter
        loader = Loader(engine, profile.weights, meter, place.version, Slots(slots, hold=True), whole)
    key = key_in(token_file)
    gateway = Gateway(engine, chat, sampling, limits, key=key, follows_requests=True)
    facts = facts_of(profile, Path(place.model_dir)) | {"engine": profile.rollout.engine}
    files = Path(place.model_dir).glob("*.safetensors")
    updates = Updates(loader, WIDEST * sum(path.stat().st_size for path in files), timeout_s)
    if not key:  # before the model is loaded, which may take minutes
        write_key(token_file, gateway.admin_key)
    try:
        with no_collection_while_starting():
            await engine.start()
        if stop.is_set():
            return
        admin = admin_routes(gateway, loader, updates.one_at_a_time)
        routes = [*admin, *async_rl_routes(gateway, loader, updates), *metrics_route(gateway, engine)]
        routes += worker_routes(gateway, loader, facts)
        await gateway.start(routes, listening)
        say(f"serving {place.model_dir} at {gateway.url}; the token is in {token_file}")
        await stop.wait()
    finally:
        await gateway.close()
        await engine.close()
        updates.close()
        gc.unfreeze()  # what is never collected, triton would report as leaked at the exit


def metrics_route(gateway: Gateway, engine: Engine) -> web.RouteTableDef:
    """`GET /metrics`, with the key: the engine's counters in Prometheus' text format."""
    routes = web.RouteTableDef()

    @routes.get("/metrics")
    async def metrics(request: web.Request) -> web.Response:
        gateway.check_admin(request)
        counters = engine.counters()
        sums = {"sampled_tokens": engine.sampled_tokens, "decode_steps": engine.decode_steps, **counters.sums}
        gauges = {"version": engine.version, "running": engine.running, **counters.gauges}
        gauges |= {"slots": engine.slots, "requests": gateway.num_running}
        lines = [
            f"# TYPE asyncrl_{name}{end} {kind}\nasyncrl_{name}{end} {value:g}\n"
            for values, kind, end in ((sums, "counter", "_total"), (gauges, "gauge", ""))
            for name, value in values.items()
        ]
        return web.Response(text="".join(lines), content_type="text/plain")

    return routes


class ScorePost(BaseModel):
    sequences: Annotated[list[list[Annotated[int, Field(ge=0)]]], Field(max_length=MOST_SCORED)]
    temperature: Annotated[float, Field(ge=0, le=100)]


def worker_routes(gateway: Gateway, loader: Loader, facts: Mapping[str, Any]) -> web.RouteTableDef:
    """What a run of `rollout.engine = "remote"` asks, with the key: what this is, and logprobs of tokens."""
    routes, engine = web.RouteTableDef(), loader.engine

    @routes.get(FACTS)
    async def describe(request: web.Request) -> web.Response:
        gateway.check_admin(request)
        received, counters = loader.received, engine.counters()
        newest = loader.held if received is None else received.manifest.version
        steps = {"sampled_tokens": engine.sampled_tokens, "decode_steps": engine.decode_steps}
        now = {"version": loader.held, "newest": newest, "sums": counters.sums, "gauges": counters.gauges}
        return web.json_response({**facts, **steps, **now})

    @routes.post("/async_rl/score")
    async def score(request: web.Request) -> web.Response:
        gateway.check_admin(request)
        asked = await body_of(request, ScorePost)
        most, vocab_size = facts["env.max_context_tokens"], facts["vocab_size"]
        if not all(2 <= len(one) <= most and max(one) < vocab_size for one in asked.sequences):
            raise Refused(400, f"a sequence has 2 to {most} tokens, each below {vocab_size}")
        try:
            scores = await engine.score(asked.sequences, asked.temperature)
        except ExecutorFailed as error:
            raise Refused(503, str(error)) from None
        return web.json_response({"logprobs": scores.logprobs, "pause_s": scores.pause_s})

    return routes

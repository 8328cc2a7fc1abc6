"""The admin routes, with which another trainer drives this rollout worker. Every request needs the admin key.

    GET  /weights         {"version", "fingerprint", "last_load": {"version", "load_s", "pause_s"} or null};
                          /version is the same
    POST /weights/load    {"path": "<directory with manifest.json>", "interrupt": "keep-kv"}
                          answers once the version is loaded
    POST /pause           no model request begins any more; answers once none runs
    POST /resume

weights/senders.py describes a version on disk. `interrupt` says what happens to responses that run during the
load; "drain" waits for episodes, including those whose agent is at work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from aiohttp import web
from pydantic import BaseModel

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.contracts.weight_version import LoadReport
from asyncrl_cli.envs.gateway.openai_api import Refused
from asyncrl_cli.envs.gateway.server import PAUSE_LIMIT_S, Gateway, body_of
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.weights.directory import Directory
from asyncrl_cli.weights.receivers import read_version
from asyncrl_cli.weights.versions import Manifest

InPlace = Literal["drain", "keep-kv", "recompute-kv"]
"""What may happen to responses that no run counts: nothing would begin them again."""


class Loads(Protocol):
    """The worker's side of a weight sync; each call raises ValueError for a version that is not newer."""

    held: int
    fingerprint: str
    last_load: LoadReport | None

    async def prefetch(self, manifest: Manifest, refs: Sequence[object]) -> float: ...

    async def load(self, version: int, interrupt: Interrupt) -> LoadReport: ...


class LoadPost(BaseModel):
    path: Path
    interrupt: InPlace = "keep-kv"


def admin_routes(
    gateway: Gateway, loads: Loads, one_at_a_time: asyncio.Lock | None = None
) -> web.RouteTableDef:
    """`one_at_a_time`: held during a load."""
    routes, lock = web.RouteTableDef(), one_at_a_time or asyncio.Lock()

    @routes.get("/version")
    @routes.get("/weights")
    async def weights(request: web.Request) -> web.Response:
        gateway.check_admin(request)
        return web.json_response(described(loads))

    @routes.post("/weights/load")
    async def load(request: web.Request) -> web.Response:
        gateway.check_admin(request)
        # A load that has begun is finished even if the client disconnects.
        asked = await body_of(request, LoadPost)
        await asyncio.shield(asyncio.create_task(_load(loads, asked, lock), name="load"))
        return web.json_response(described(loads))

    @routes.post("/pause")
    async def pause(request: web.Request) -> web.Response:
        gateway.check_admin(request)
        try:
            async with asyncio.timeout(PAUSE_LIMIT_S):
                await gateway.pause()
        except TimeoutError:
            why = f"a model request still runs after {PAUSE_LIMIT_S:g} s; no new one begins"
            raise Refused(503, why) from None
        return web.json_response({"paused": True})

    @routes.post("/resume")
    async def resume(request: web.Request) -> web.Response:
        gateway.check_admin(request)
        gateway.resume()
        return web.json_response({"paused": False})

    return routes


def described(loads: Loads) -> dict[str, object]:
    """The version that is loaded, as `GET /weights` has it."""
    last = loads.last_load
    report = last and {"version": last.version, "load_s": last.load_s, "pause_s": last.pause_s}
    return {"version": loads.held, "fingerprint": loads.fingerprint or None, "last_load": report}


async def _load(loads: Loads, asked: LoadPost, lock: asyncio.Lock) -> None:
    try:
        async with lock:
            manifest, refs = await asyncio.to_thread(
                read_version, Directory(f"file://{asked.path.absolute()}")
            )
            await loads.prefetch(manifest, refs)
            await loads.load(manifest.version, asked.interrupt)
    except ExecutorFailed as error:
        raise Refused(503, str(error)) from None
    except (AsyncrlError, ValueError) as error:
        raise Refused(400, str(error), "weights_refused") from None

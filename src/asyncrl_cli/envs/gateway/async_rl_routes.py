"""The routes with which another trainer brings weights to `asyncrl serve`, as in AsyncRL's recipe for verl.
Every request needs the key.

    POST /async_rl/update_weights        {"model_path": "<directory, or URL of one>"}
    POST /async_rl/init_group            {"master_address", "master_port", "rank_offset", "world_size",
                                          "backend": "gloo" or "nccl", "group_name"}
    POST /async_rl/set_weight_meta       {"names", "dtypes", "shapes", "group_name"}
    POST /async_rl/update_weights_group  {"group_name"}

The recipe's names init_nccl_group and update_weights_nccl work, too. Both updates take "version" (default:
manifest.json's, or one more than the loaded one) and "interrupt" ("keep-kv"), and answer as GET /weights
does, once the version is loaded. Responses that run meanwhile go on with the new weights. With "load": false
update_weights only fetches; the same path and version again then load at once.

Who waits for whom: init_group waits for the group's other members, update_weights_group for rank 0's
broadcasts, `weights.timeout_s` each. One update runs at a time; the next one waits for it. What has begun is
finished even if the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Literal

from aiohttp import web
from pydantic import BaseModel, Field

from asyncrl_cli.base.daemon_threads import in_daemon
from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed
from asyncrl_cli.envs.gateway.admin_routes import InPlace, Loads, described
from asyncrl_cli.envs.gateway.openai_api import Body, Refused
from asyncrl_cli.envs.gateway.server import Gateway, body_of
from asyncrl_cli.weights.buckets import Bucket, Spec
from asyncrl_cli.weights.group import WeightGroup, specs_of
from asyncrl_cli.weights.receivers import manifest_of, read_weights

MOST_GROUPS = 8
MOST_TENSORS = 200_000
Name = Annotated[str, Field(max_length=256)]
Version = Annotated[int, Field(ge=0, le=2**53)] | None


class PathPost(BaseModel):
    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Version = None
    interrupt: InPlace = "keep-kv"
    load: bool = True


class GroupPost(BaseModel):
    """`rank_offset`: this server's rank. A server has one rank, whatever its engine has."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=4095)]
    world_size: Annotated[int, Field(ge=2, le=4096)]
    backend: Literal["gloo", "nccl"] = "gloo"
    group_name: Name = ""


class MetaPost(BaseModel):
    names: Annotated[list[Name], Field(max_length=MOST_TENSORS)]
    dtypes: Annotated[list[Name], Field(max_length=MOST_TENSORS)]
    shapes: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=8)]],
        Field(max_length=MOST_TENSORS),
    ]
    group_name: Name = ""


class UpdatePost(BaseModel):
    group_name: Name = ""
    version: Version = None
    interrupt: InPlace = "keep-kv"


class Updates:
    """The server's groups by name, and what each is to bring: `max_bytes` at most."""

    def __init__(self, loads: Loads, max_bytes: int, timeout_s: float) -> None:
        self._loads = loads
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._specs: dict[str, list[Spec]] = {}
        self._fetched: tuple[str, int] | None = None
        self.one_at_a_time = asyncio.Lock()

    async def join(self, asked: GroupPost) -> None:
        name = asked.group_name
        if asked.rank_offset >= asked.world_size:
            raise Refused(400, f"rank_offset {asked.rank_offset} is no rank of {asked.world_size}")
        async with self.one_at_a_time:
            if (old := self._groups.pop(name, None)) is not None:
                old.close()
            if len(self._groups) >= MOST_GROUPS:
                raise Refused(400, f"there are {MOST_GROUPS} groups already")
            join = partial(
                WeightGroup.join,
                name=name,
                host=asked.master_address,
                port=asked.master_port,
                rank=asked.rank_offset,
                world_size=asked.world_size,
                backend=asked.backend,
                timeout_s=self._timeout_s,
            )
            self._groups[name] = await asyncio.wrap_future(in_daemon(join, "join"))

    async def announce(self, asked: MetaPost) -> None:
        lists = asked.names, asked.dtypes, asked.shapes
        self._specs[asked.group_name] = await asyncio.to_thread(specs_of, *lists, self._max_bytes)
        while len(self._specs) > MOST_GROUPS:
            del self._specs[next(iter(self._specs))]

    async def from_path(self, asked: PathPost) -> None:
        async with self.one_at_a_time:
            path, version = asked.model_path, asked.version
            if self._fetched != (path, version):
                manifest, buckets = await asyncio.to_thread(read_weights, path, version, self._loads.held + 1)
                await self._loads.prefetch(manifest, buckets)
                version, self._fetched = manifest.version, (path, manifest.version)
            if asked.load:
                assert version is not None, "what was fetched has one"
                self._fetched = None
                await self._loads.load(version, asked.interrupt)

    async def from_group(self, asked: UpdatePost) -> None:
        name = asked.group_name
        async with self.one_at_a_time:
            group, specs = self._groups.get(name), self._specs.get(name)
            if group is None or specs is None:
                missing = "init_group" if group is None else "set_weight_meta"
                raise Refused(409, f'group "{name}": {missing} comes first')
            receive = partial(group.receive, specs)
            try:
                buckets: list[Bucket] = await asyncio.wrap_future(in_daemon(receive, "receive"))
            except AsyncrlError:
                self._groups.pop(name).close()  # its ranks no longer agree on what comes next
                raise
            version = self._loads.held + 1 if asked.version is None else asked.version
            manifest = await asyncio.to_thread(manifest_of, buckets, version)
            await self._loads.prefetch(manifest, buckets)
            await self._loads.load(version, asked.interrupt)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def async_rl_routes(gateway: Gateway, loads: Loads, updates: Updates) -> web.RouteTableDef:
    routes = web.RouteTableDef()

    async def asked(request: web.Request, kind: type[Body]) -> Body:
        gateway.check_admin(request)
        return await body_of(request, kind)

    async def done(work: Awaitable[None]) -> web.Response:
        try:
            await asyncio.shield(asyncio.ensure_future(work))
        except ExecutorFailed as error:
            raise Refused(503, str(error)) from None
        except (AsyncrlError, ValueError) as error:
            raise Refused(400, str(error), "weights_refused") from None
        return web.json_response(described(loads))

    @routes.post("/async_rl/update_weights")
    async def update_weights(request: web.Request) -> web.Response:
        return await done(updates.from_path(await asked(request, PathPost)))

    @routes.post("/async_rl/init_group")
    @routes.post("/async_rl/init_nccl_group")
    async def init_group(request: web.Request) -> web.Response:
        return await done(updates.join(await asked(request, GroupPost)))

    @routes.post("/async_rl/set_weight_meta")
    async def set_weight_meta(request: web.Request) -> web.Response:
        return await done(updates.announce(await asked(request, MetaPost)))

    @routes.post("/async_rl/update_weights_group")
    @routes.post("/async_rl/update_weights_nccl")
    async def update_weights_group(request: web.Request) -> web.Response:
        return await done(updates.from_group(await asked(request, UpdatePost)))

    @routes.post("/abort")
    async def abort(request: web.Request) -> web.Response:
        gateway.check_admin(request)
        return web.json_response({"aborted": await gateway.abort_all()})

    return routes

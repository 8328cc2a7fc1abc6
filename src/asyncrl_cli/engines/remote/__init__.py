"""The engine `remote`: an `asyncrl serve` that others have started. Each is one rollout worker's engine. Here
is its kind, importable without torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pkgutil import resolve_name

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.engines.port import Engine, EngineKind
from asyncrl_cli.profile.schema import ProcessPlace, Profile

URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?")


def conflicts(profile: Profile) -> Iterator[ConfigError]:
    """Yields an error for each setting that cannot be had from somebody else's servers."""
    urls, workers = profile.rollout.urls or (), profile.rollout.workers
    for url in urls:
        if not URL.fullmatch(url):
            why = f'rollout.urls: "{url.rpartition("@")[2]}" is not of the form http://HOST:PORT'
            yield ConfigError(why, hint="no path, no user, nothing after the port: http://host:8000")
    if not urls or len({*urls}) < len(urls):
        hint = "--set 'rollout.urls=[\"http://host:8000\"]'; `asyncrl serve` starts a server"
        yield ConfigError('rollout.engine = "remote" needs rollout.urls, each server once', hint=hint)
    wrong = {
        "rollout.workers": workers not in (None, len(urls)),
        "rollout.n_gpus_per_node": profile.rollout.n_gpus_per_node is not None,
        "placement.colocate": profile.placement.colocate,
        "lora.sync": profile.lora.sync == "adapter",
    }
    for key in (key for key, is_wrong in wrong.items() if is_wrong):
        why = "with rollout.urls, each server is a worker, has resources of its own, and gets whole weights"
        yield ConfigError(f"{key}: {why}", hint=f"leave {key} out")
    if (transport := profile.weights.transport) not in ("directory", "disk"):
        hint = "--set weights.transport=directory --set weights.url=..., which the servers can read"
        yield ConfigError(f'weights.transport = "{transport}": servers read versions from files', hint=hint)


def check_servers(profile: Profile) -> None:
    """Raises PreflightError for a server that cannot be reached, or lacks what the run needs; RefusedError
    for a token that others may read."""
    from asyncrl_cli.engines.remote.server import Server, ServerFailed, check_facts

    async def check(url: str) -> None:
        server = Server(url, profile)
        try:
            check_facts(url, await server.facts(), profile)
        finally:
            await server.close()

    async def check_all() -> None:
        await asyncio.gather(*map(check, profile.rollout.urls or ()))

    try:
        asyncio.run(check_all())
    except ServerFailed as failed:
        raise PreflightError(failed.message, hint=failed.hint) from None


def _make(profile: Profile, place: ProcessPlace, on_running: Callable[[int], None]) -> Engine:
    engine_class = resolve_name("asyncrl_cli.engines.remote.remote_engine:RemoteEngine")
    engine: Engine = engine_class(profile, place, on_running)
    return engine


KIND = EngineKind(
    make=_make,
    keys=frozenset({"urls", "token_file"}),
    finds_stops_in_continued=False,
    conflicts=conflicts,
    check_servers=check_servers,
)

"""The engine `remote`: an `asyncrl serve` that others have started. Each is one rollout worker's engine. Here
is its kind, importable without torch."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.engines.port import Engine, EngineKind
from asyncrl_cli.profile.schema import FILE_TRANSPORTS, ProcessPlace, Profile

URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?/?")


def conflicts(profile: Profile) -> Iterator[ConfigError]:
    """Yields an error for each setting that cannot be had from somebody else's servers."""
    urls, workers = profile.rollout.urls or (), profile.rollout.workers
    for url in urls:
        if not URL.fullmatch(url):
            why = f'rollout.urls: "{url.rpartition("@")[2]}" is not of the form http://HOST:PORT'
            yield ConfigError(why, hint="no path, no user, nothing after the port: http://host:8000")
    if not urls:
        hint = "--set 'rollout.urls=[\"http://host:8000\"]'; `asyncrl serve` starts a server"
        yield ConfigError('rollout.engine = "remote" needs rollout.urls', hint=hint)
    for url, times in Counter(url.rstrip("/") for url in urls).items():
        if times > 1:
            yield ConfigError(f"rollout.urls: {url} is there {times} times", hint="name each server once")
    wrong = {
        "rollout.workers": workers not in (None, len(urls)),
        "rollout.n_gpus_per_node": profile.rollout.n_gpus_per_node is not None,
        "placement.colocate": profile.placement.colocate,
        "placement.lend": profile.placement.lend,
        "lora.sync": profile.lora.sync == "adapter",
    }
    for key in (key for key, is_wrong in wrong.items() if is_wrong):
        why = "with rollout.urls, each server is a worker, has resources of its own, and gets whole weights"
        yield ConfigError(f"{key}: {why}", hint=f"leave {key} out")
    if (transport := profile.weights.transport) not in FILE_TRANSPORTS:
        hint = "--set weights.transport=directory --set weights.url=..., which the servers can read"
        yield ConfigError(f'weights.transport = "{transport}": servers read versions from files', hint=hint)


def check_servers(profile: Profile, model_dir: Path | None = None) -> None:
    """Ask all servers. Raises PreflightError that names each one that cannot be reached, or lacks what the
    run needs, such as the model's vocabulary if its directory is known; RefusedError for a token that others
    may read."""
    from asyncrl_cli.engines.remote.server import Server, ServerFailed, check_facts, facts_of

    servers = [Server(url, profile) for url in profile.rollout.urls or ()]

    async def ask() -> list[dict[str, Any] | BaseException]:
        try:
            return await asyncio.gather(*(server.facts() for server in servers), return_exceptions=True)
        finally:
            await asyncio.gather(*(server.close() for server in servers))

    refusals, answers = list[PreflightError | ServerFailed](), asyncio.run(ask())
    ours = facts_of(profile, model_dir)  # once: it reads a tokenizer
    for server, answer in zip(servers, answers, strict=True):
        try:
            if isinstance(answer, BaseException):
                raise answer
            check_facts(server.url, answer, ours, profile, model_dir)
        except (PreflightError, ServerFailed) as refusal:
            refusals.append(refusal)
    if refusals:
        hint = "; ".join(dict.fromkeys(refusal.hint for refusal in refusals))
        raise PreflightError("; ".join(refusal.message for refusal in refusals), hint=hint)


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

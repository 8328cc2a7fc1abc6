"""A server of `asyncrl serve` in a process of its own, and the engine `remote` that generates there."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Qwen3ForCausalLM

from asyncrl_cli.engines.port import PauseReport
from asyncrl_cli.engines.remote.remote_engine import RemoteEngine
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.weights.directory import Directory
from asyncrl_cli.weights.directory_buckets import DirectorySender
from asyncrl_cli.weights.receivers import manifest_of
from asyncrl_cli.weights.versions import send
from tests.engines.made import made_for
from tests.engines.vllm.vllm_world import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, World
from tests.packed import pack

SIZES = (
    "rollout.slots=8",
    f"rollout.max_prompt_tokens={MAX_PROMPT_TOKENS}",
    f"rollout.max_response_tokens={MAX_RESPONSE_TOKENS}",
    "model.dtype=float32",
)
END_S = 60.0


class Served:
    """`start` may be called again after `end`: the server comes back at the same port, with its token."""

    def __init__(self, token_file: Path, model: Path | str, *sets: str, engine: str = "transformers") -> None:
        self.token_file, self.url, self._port = token_file, "", "0"
        self._words = ["--model", str(model), "--token-file", str(token_file), "--engine", engine]
        self._words += [word for setting in sets for word in ("--set", setting)]
        self.process: subprocess.Popen[str]

    def start(self) -> None:
        command = [sys.executable, "-m", "asyncrl_cli", "serve", "--port", self._port, *self._words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        lines = [""]
        while "serving" not in lines[-1]:
            lines.append(self.process.stderr.readline())
            assert lines[-1], lines
        found = re.search(r"http://[\d.]+:(\d+)", lines[-1])
        assert found is not None
        self.url, self._port = found[0], found[1]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(END_S)
        assert self.process.stderr is not None
        self.process.stderr.close()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def serving(
    token_file: Path, model: Path | str, *sets: str, engine: str = "transformers"
) -> Iterator[Served]:
    server = Served(token_file, model, *sets, engine=engine)
    try:
        server.start()
        yield server
    finally:
        with suppress(ValueError):  # it was ended in the block
            server.end()


def remote_profile(server: Served, model_dir: Path, **changes: Any) -> Any:
    """A profile and a place, for an engine that generates there."""
    lengths = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_response_tokens": MAX_RESPONSE_TOKENS}
    remote = {"engine": "remote", "urls": (server.url,), "token_file": str(server.token_file), "slots": 8}
    profile, place = made_for(model_dir, transport="directory", **(remote | lengths | changes))
    return profile, replace(place, index=0)


class RemoteWorld(World):
    """Its versions travel as a run's do: written to a directory, which the server reads."""

    engine: Any

    def __init__(self, model: Qwen3ForCausalLM, engine: Any, runner: asyncio.Runner, root: Path) -> None:
        super().__init__(model, engine, runner, root / "beats")
        (root / "beats").write_bytes(bytes(8))
        self._sender = DirectorySender(Directory(f"file://{root}/versions"))

    def published(self, weights: dict[str, Any], version: int) -> str:
        """The URL at which they are."""
        buckets = pack(weights, 300_000)
        return str(send(self._sender, manifest_of(buckets, version), buckets)[0].version_at)

    async def load_these(self, weights: dict[str, Any], version: int, interrupt: Interrupt) -> PauseReport:
        fetched = await asyncio.to_thread(self.engine.fetch, self.published(weights, version))
        return await self.engine.load(fetched, version, interrupt)


@contextmanager
def remote_world(
    model: Qwen3ForCausalLM, model_dir: Path, server: Served, root: Path, **changes: Any
) -> Iterator[RemoteWorld]:
    """With version 0 loaded: the model's own weights."""
    with asyncio.Runner() as runner:
        engine = RemoteEngine(*remote_profile(server, model_dir, **changes))
        there = RemoteWorld(model, engine, runner, root)
        try:
            runner.run(engine.start())
            runner.run(there.load(0, "keep-kv"))
            yield there
        finally:
            runner.run(engine.close())

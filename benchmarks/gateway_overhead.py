"""The gateway's cost per request: the same requests directly to the engine and through HTTP.

    python benchmarks/gateway_overhead.py [--sessions 64] [--tokens 32] [--turns 4] [--repeat 5]

Each session makes --turns requests, one after the other; each continues the tokens so far. All sessions run
at once, in an engine with as many slots. The client (aiohttp) runs in the same process, so the figures
include its cost. Repeats alternate; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from engine_kit import PROMPT_TOKENS, THREADS, conditions, make_builtin_model, prompts_of, table

from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.engines.transformers.engine import TransformersEngine
from asyncrl_cli.envs.chat import load_chat
from asyncrl_cli.envs.conversation import Conversation
from asyncrl_cli.envs.episode import Limits
from asyncrl_cli.envs.gateway.server import Gateway
from asyncrl_cli.profile.schema import ProcessPlace, Profile, RolloutSection


async def direct(
    engine: TransformersEngine, prompts: list[list[int]], options: argparse.Namespace, sampling: Sampling
) -> None:
    async def one(number: int, tokens: list[int]) -> None:
        for _ in range(options.turns):
            completion = await engine.generate(f"direct-{number}", tokens, sampling, number)
            tokens = tokens + completion.tokens

    await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(prompts)))


async def through(
    gateway: Gateway, prompts: list[list[int]], options: argparse.Namespace, sampling: Sampling, chat: Any
) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(number: int, tokens: list[int]) -> None:
            session, access = gateway.open_session(f"gateway-{number}", Conversation(chat), sampling, number)
            headers = {"Authorization": f"Bearer {access.key}"}
            for _ in range(options.turns):
                body = {"prompt": tokens, "return_token_ids": True}
                async with http.post(
                    f"{access.base_url}/completions", json=body, headers=headers
                ) as response:
                    answer = await response.json()
                tokens = tokens + answer["choices"][0]["token_ids"]
            await gateway.close_session(session)

        await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(prompts)))


async def measure(options: argparse.Namespace, directory: Path) -> list[tuple[float, float]]:
    """Seconds of each repeat, (direct, through the gateway)."""
    model = make_builtin_model(directory)
    sampling = Sampling(temperature=1.0, max_response_tokens=options.tokens)
    longest = options.turns * (PROMPT_TOKENS + options.tokens)
    rollout = RolloutSection(
        slots=options.sessions, max_prompt_tokens=longest, max_response_tokens=options.tokens
    )
    engine = TransformersEngine(
        Profile(rollout=rollout), ProcessPlace(model_dir=str(directory), threads=THREADS)
    )
    chat = load_chat(directory, trust_remote_code=False)
    gateway = Gateway(engine, chat, sampling, Limits(longest, longest + options.tokens, options.turns))
    try:
        await engine.start()
        await gateway.start()
        pairs = []
        for repeat in range(options.repeat + 1):
            prompts = prompts_of(model, options.sessions, repeat)
            began_s = time.perf_counter()
            await direct(engine, prompts, options, sampling)
            between_s = time.perf_counter()
            await through(gateway, prompts, options, sampling, chat)
            pairs.append((between_s - began_s, time.perf_counter() - between_s))
        return pairs[1:]  # the first is the warm-up
    finally:
        await gateway.close()
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("sessions", 64), ("tokens", 32), ("turns", 4), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as directory:
        pairs = asyncio.run(measure(options, Path(directory)))
    requests = options.sessions * options.turns
    cost_ms = [1000 * (through_s - direct_s) / requests for direct_s, through_s in pairs]
    ratios = [through_s / direct_s for direct_s, through_s in pairs]
    rows = [
        [f"{d:.3f}", f"{t:.3f}", f"{t / d:.3f}", f"{ms:.2f}"]
        for (d, t), ms in zip(pairs, cost_ms, strict=True)
    ]
    print(table(["direct s", "gateway s", "ratio", "ms per request"], rows))
    print(f"median: {statistics.median(cost_ms):.2f} ms per request, ratio {statistics.median(ratios):.3f}")
    print(conditions())


if __name__ == "__main__":
    main()

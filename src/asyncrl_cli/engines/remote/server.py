"""A server of `asyncrl serve` as its client sees it: every call is bounded, and its error names the server.
And what both ends say of themselves, to be compared. The token is in no message."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import xxhash

from asyncrl_cli.base.child_process import REMOTE_TOKEN
from asyncrl_cli.base.errors import ExecutorFailed, PreflightError, first_line, timeout
from asyncrl_cli.base.paths import expand
from asyncrl_cli.base.safe_files import decapitalized, key_in
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.schema import Profile

FACTS = "/async_rl/server"
ANSWER_S = 60.0
"""How long a server may take for an answer that needs no work. One that computes on all cores takes
seconds."""
AGREED = ("model.dtype", "rollout.stop", "vocab_size", "vocabulary", "engine")
COUNTED = ("version", "newest", "sampled_tokens", "decode_steps")
TOTALS = ("sums", "gauges")
LIMITS = ("rollout.slots", "rollout.max_response_tokens", "env.max_context_tokens")


class ServerFailed(ExecutorFailed):
    """A call to a server failed. `status`: of its answer; 0 if there was none."""

    status = 0


def facts_of(profile: Profile, model_dir: Path | None = None) -> dict[str, Any]:
    """What a server and a run must agree on, by key; of the model, if its directory is known: `vocab_size`,
    and a fingerprint of the tokenizer's `vocabulary`."""
    facts: dict[str, Any] = {
        "rollout.slots": profile.rollout.slots,
        "rollout.max_response_tokens": profile.rollout.max_response_tokens,
        "env.max_context_tokens": max_context_tokens(profile),
        "model.dtype": profile.model.dtype,
        "rollout.stop": list(profile.rollout.stop),
    }
    if model_dir is None:
        return facts
    from transformers import AutoConfig, AutoTokenizer

    trusts = profile.model.trust_remote_code
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trusts).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trusts)
    tokens = [tokenizer.eos_token_id, *sorted(tokenizer.get_vocab().items())]
    fingerprint = xxhash.xxh3_64_hexdigest(json.dumps(tokens).encode())
    return facts | {"vocab_size": config.vocab_size, "vocabulary": fingerprint}


def check_facts(
    url: str,
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    profile: Profile,
    model_dir: Path | None = None,
) -> None:
    """Raises PreflightError for the first thing that the run needs and the server lacks. `here`: the run's
    `facts_of`. Tensors are compared when the first version is loaded, before anything is generated."""
    for key, ours in here.items():
        has = there[key]
        fits = has >= ours if key in LIMITS else has == ours or (key == "rollout.stop" and not has)
        if not fits:
            hint = f"start the server with --set {key}={ours}, or --set {key}={has} here"
            if key.startswith("vocab"):
                hint = f"start the server with the run's model: --model {model_dir}"
            raise PreflightError(f"server {url}: {key} is {has} there, and {ours} here", hint=hint)
    if profile.rollout.truncates and there["engine"] != "transformers":
        why = f"its engine {there['engine']} has no logprobs of the untruncated distribution"
        raise PreflightError(f"server {url}: {why}", hint="leave top_p, top_k and min_p out")


def token_of(profile: Profile) -> str:
    """Raises PreflightError if there is none, RefusedError for a file that others may read."""
    file = profile.rollout.token_file
    token = os.environ.get(REMOTE_TOKEN, "") if file is None else key_in(expand(file))
    if not token:
        where = f"the environment has no {REMOTE_TOKEN}" if file is None else f"there is no {file}"
        hint = "--set rollout.token_file=serve.token, which `asyncrl serve` has written"
        raise PreflightError(f"rollout.urls: no token for the servers: {where}", hint=hint)
    return token


class Server:
    def __init__(self, url: str, profile: Profile) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token_of(profile)}"}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def facts(self) -> dict[str, Any]:
        found = await self.ask(FACTS)
        try:
            numbers = [found[name] for name in ("vocab_size", *LIMITS, *COUNTED)]
            numbers += [number for name in TOTALS for number in found[name].values()]
            is_whole = all(map(math.isfinite, numbers)) and {*AGREED} <= found.keys()
        except (AttributeError, LookupError, TypeError):
            is_whole = False
        if not is_whole:
            raise self.failed("it is no `asyncrl serve` of this version")
        facts: dict[str, Any] = found
        return facts

    async def ask(
        self, path: str, body: Mapping[str, object] | None = None, limit_s: float = ANSWER_S
    ) -> Any:
        """The answer to a GET or, with a body, a POST. Raises ServerFailed, also after `limit_s`."""
        if self._session is None:  # made within the event loop
            connector, unlimited = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout()
            self._session = aiohttp.ClientSession(
                self.url, headers=self._headers, connector=connector, timeout=unlimited
            )
        asking = self._session.request("POST" if body else "GET", path, json=body, allow_redirects=False)
        try:
            async with timeout(limit_s), asking as answer:
                text = await answer.text()
        except TimeoutError:
            raise self.failed(f"no answer to {path} within {limit_s:g} s") from None
        except aiohttp.ClientConnectorError as error:  # a negative number is of a name that has no address
            number, why = error.errno or 0, error.os_error.strerror or first_line(error.os_error)
            why = decapitalized(os.strerror(number) if number > 0 else why)
            raise self.failed(f"cannot be reached: {why}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self.failed(f"{path}: {first_line(error)}") from None
        try:
            content = json.loads(text)
            why = text if answer.status == 200 else content["error"]["message"]
        except (ValueError, LookupError, TypeError):
            content, why = None, text
        if answer.status == 200:
            return content
        raise self.failed(f"{path}: {answer.status} {first_line(why)}", answer.status)

    def failed(self, why: str, status: int = 0) -> ServerFailed:
        ours = "not `vllm serve`, but `asyncrl serve --engine vllm`, as new as this run's asyncrl"
        hints = {401: "rollout.token_file has another token", 404: ours}
        down = "is `asyncrl serve` running there? Its log may say why not; --host lets other machines in"
        hint = hints.get(status, down)
        failed = ServerFailed(f"server {self.url}: {why}", hint=hint)
        failed.status = status
        return failed

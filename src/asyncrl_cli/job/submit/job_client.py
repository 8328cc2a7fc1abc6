"""Ray's client of a job server, with what Ray's own lacks: limits on the time and the bytes of every whole
answer, and the user's token for a server that asks for one.

Imports Ray, so job_server.py imports it late.
"""

from __future__ import annotations

import asyncio
import io
from typing import Any

import aiohttp
import requests
from ray._private.authentication.http_token_authentication import format_authentication_http_error
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from asyncrl_cli.job.submit.cluster_token import user_token

ANSWER_S, ANSWER_BYTES = 30.0, 16 * 2**20
LOG_S, LOG_BYTES = 120.0, 64 * 2**20
"""For the whole log of a job, which is one answer."""
UPLOAD_BYTES_PER_S = 2**18
"""The slowest upload that is waited for."""
AUTHORIZATION, UNAUTHORIZED = "authorization", 401


class BoundedClient(JobSubmissionClient):  # type: ignore[misc]
    """Raises what `requests` and Ray raise, TimeoutError for an answer that takes too long, ValueError for
    one that is too long."""

    def _do_request(
        self,
        method: str,
        endpoint: str,
        *,
        data: bytes | None = None,
        json_data: object = None,
        **more: object,
    ) -> requests.Response:
        body = {**more, "data": data, "json": json_data}
        answer = self._ask(method, endpoint, body)
        if answer.status_code == UNAUTHORIZED:
            # Ray's client may have sent the token of a session that this process was connected to before.
            token = f"Bearer {user_token(self._address)}"
            if self._headers.get(AUTHORIZATION) != token:
                self._headers[AUTHORIZATION] = token
                answer = self._ask(method, endpoint, body)
        if problem := format_authentication_http_error(answer.status_code, answer.text):
            raise AuthenticationError(problem)
        return answer

    def _ask(self, method: str, endpoint: str, body: dict[str, Any]) -> requests.Response:
        """One request and its answer, in the form that Ray's client reads."""
        most_s, most_bytes = (LOG_S, LOG_BYTES) if endpoint.endswith("/logs") else (ANSWER_S, ANSWER_BYTES)
        most_s += len(body["data"] or b"") / UPLOAD_BYTES_PER_S
        answer = requests.Response()
        answer.url = self._address + endpoint
        try:
            receiving = self._receive(method, answer.url, body, most_s, most_bytes)
            answer.status_code, content = asyncio.run(receiving)
        except TimeoutError as error:
            raise TimeoutError(f"no whole answer within {most_s:.0f} s") from error
        answer.encoding, answer.raw = "utf-8", io.BytesIO(content)
        return answer

    async def _receive(
        self, method: str, url: str, body: dict[str, Any], most_s: float, most_bytes: int
    ) -> tuple[int, bytes]:
        """The status and the content of the answer. By aiohttp, whose limit is for the whole answer; that of
        `requests` begins anew with each byte."""
        limit, tls = aiohttp.ClientTimeout(total=most_s), self._ssl_context
        session = aiohttp.ClientSession(
            cookies=self._cookies, headers=self._headers, timeout=limit, trust_env=True
        )
        async with session, session.request(method, url, ssl=True if tls is None else tls, **body) as answer:
            content = bytearray()
            async for part in answer.content.iter_any():
                content += part
                if len(content) > most_bytes:
                    raise ValueError(f"its answer to {method} is longer than {most_bytes // 2**20} MiB")
            return answer.status, bytes(content)

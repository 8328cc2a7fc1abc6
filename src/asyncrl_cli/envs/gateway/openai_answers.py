"""Answers in OpenAI's shape, whole or as the events of a stream. Extra fields have vLLM's names where vLLM
has them.

    token_ids, weight_versions    of a choice: the sampled tokens, and the version of the weights that sampled each
    prompt_token_ids              of the answer: all tokens before the sampled ones

An engine returns a response only when it is complete, so a stream delivers it in one piece.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from asyncrl_cli.contracts.environment import Message
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.envs.gateway.openai_requests import ChatRequest, ModelRequest

MODEL = "asyncrl"
"""The name under which the policy is served; requests may name any other."""
END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A session's reply to a request. `message`: in a chat, parsed from the tokens; otherwise it has only
    `content`."""

    prompt_tokens: list[int]
    completion: Completion
    message: Message
    decode: Callable[[list[int]], str]

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.message.get("tool_calls") else self.completion.finish_reason


def answer(reply: Reply, request: ModelRequest) -> dict[str, Any]:
    """A chat completion, or for a TextRequest a text completion."""
    is_chat, prompt_tokens, sampled = isinstance(request, ChatRequest), reply.prompt_tokens, reply.completion
    said = {"message": _message(reply)} if is_chat else {"text": reply.message["content"]}
    choice = {"index": 0, **said, "finish_reason": reply.finish_reason, "logprobs": None}
    if request.wants_tokens:
        choice["logprobs"] = _chat_logprobs(reply) if is_chat else _text_logprobs(reply)
        choice |= {"token_ids": sampled.tokens, "weight_versions": sampled.versions}
    prefix, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
    num_prompt, num_sampled = len(prompt_tokens), len(sampled.tokens)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    head = {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model or MODEL,
    }
    return {
        **head,
        "choices": [choice],
        "usage": usage,
        **({"prompt_token_ids": prompt_tokens} if request.wants_tokens else {}),
    }


def events(answer: Mapping[str, Any], *, with_usage: bool) -> Iterator[bytes]:
    """The answer as a stream: the message, then its finish reason (a text comes with it), then the usage if
    asked for."""
    kind, chunks = answer["object"], answer["choices"]
    if kind == "chat.completion":
        kind, chunks = "chat.completion.chunk", _chat_chunks(answer["choices"][0])
    for chunk in chunks:
        yield _event(answer, kind, [chunk])
    if with_usage:
        yield _event(answer, kind, [], usage=answer["usage"])
    yield END_OF_STREAM


def _chat_chunks(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    message = choice["message"]
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
    delta = {**message, "tool_calls": calls} if calls else message
    more = {name: choice[name] for name in ("logprobs", "token_ids", "weight_versions") if name in choice}
    yield {"index": 0, "delta": delta, "finish_reason": None, **more}
    yield {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}


def models() -> dict[str, Any]:
    """The body of `/v1/models`."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]}


def _message(reply: Reply) -> dict[str, Any]:
    """The message as OpenAI writes it: the arguments of calls as text, and `content` null if there are calls
    but no content."""
    calls = [
        {**call, "function": _as_text(call["function"])} for call in reply.message.get("tool_calls") or ()
    ]
    return (
        {**reply.message, "content": reply.message.get("content") or None, "tool_calls": calls}
        if calls
        else dict(reply.message)
    )


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _chat_logprobs(reply: Reply) -> dict[str, Any]:
    pairs = zip(reply.completion.tokens, reply.completion.logprobs, strict=True)
    texts = ((reply.decode([token]), logprob) for token, logprob in pairs)
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, value in texts
    ]
    return {"content": content}


def _text_logprobs(reply: Reply) -> dict[str, Any]:
    texts = [reply.decode([token]) for token in reply.completion.tokens]
    offsets = list(accumulate(map(len, texts[:-1]), initial=0))
    return {
        "tokens": texts,
        "token_logprobs": reply.completion.logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _event(answer: Mapping[str, Any], kind: str, choices: list[Any], **more: Any) -> bytes:
    head = {name: answer[name] for name in ("id", "created", "model")}
    return f"data: {json.dumps({**head, 'object': kind, 'choices': choices, **more})}\n\n".encode()

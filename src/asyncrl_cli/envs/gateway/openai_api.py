"""OpenAI's API as the gateway speaks it: requests, which fields are honoured, ignored or refused, the error
that a refused client gets; and answers, whole or as the events of a stream.

Training must follow the profile, so in a run the profile alone decides how tokens are sampled. `asyncrl
serve` honours temperature, top_p, top_k, min_p and seed, too. There are three kinds of fields:

    honoured   messages, prompt, tools, tool_choice "none", stop, max_tokens, max_completion_tokens, stream,
               logprobs, return_token_ids
    ignored    all others (temperature, top_p, penalties, seed, other values of tool_choice, ...): agents set
               them by habit. The header `x-asyncrl-ignored` of the answer names those whose value differs
               from the profile's
    refused    fields that ask for another form of answer: n > 1, response_format, echo, images

Extra fields of answers have vLLM's names where vLLM has them:

    token_ids, weight_versions    of a choice: the sampled tokens, and the version of the weights that sampled
                                  each
    prompt_token_ids              of the answer: all tokens before the sampled ones

An engine returns a response only when it is complete, so a stream delivers it in one piece.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from asyncrl_cli.base.safe_files import MAX_NESTING, first_problem, nesting
from asyncrl_cli.contracts.environment import Message
from asyncrl_cli.engines.port import Completion, Sampling

MODEL = "asyncrl"
"""The name under which the policy is served; requests may name any other."""
END_OF_STREAM = b"data: [DONE]\n\n"
MAX_STOPS = 16
MAX_IGNORED = 20
"""Limit for the names of ignored fields in the answer's header."""
FIELD_NAME = re.compile(r"\w{1,64}", re.ASCII)
Stop = Annotated[str, Field(max_length=1000)]
PositiveInt = Annotated[int, Field(ge=1)]


class Refused(Exception):
    """Answers the request with an error in OpenAI's shape; `status` is the HTTP status."""

    def __init__(self, status: int, text: str, code: str = "", *, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": text, "type": kind, "param": None, "code": code or None}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class ResponseFormat(BaseModel):
    type: Literal["text"]


class ModelRequest(BaseModel):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    """All names are accepted: an agent may have been written for another model."""
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    response_format: ResponseFormat | None = None

    @property
    def wants_tokens(self) -> bool:
        return self.logprobs not in (None, False) or bool(self.return_token_ids)

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    def sampling(self, default: Sampling, seed: int) -> tuple[Sampling, int]:
        """How to sample where requests may say so (`asyncrl serve`). Raises Refused (400) for a value out of
        range."""
        try:
            asked = AskedSampling.model_validate(self.model_extra or {}).model_dump(exclude_none=True)
        except ValidationError as error:
            raise Refused(400, first_problem(error)) from None
        seed = asked.pop("seed", seed)
        return replace(default, **asked), seed

    def ignored(self, sampling: Sampling) -> list[str]:
        """Names of the given fields that have no effect, except those that ask for what the profile says
        anyway, and those that do not fit into a header."""
        same = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        others = (name for name, value in given.items() if name not in same or value != same[name])
        return sorted(filter(FIELD_NAME.fullmatch, others))[:MAX_IGNORED]


class AskedSampling(BaseModel):
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=10**6)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


def _within_nesting(arguments: str) -> str:
    if nesting(json_value(arguments)) > MAX_NESTING:
        raise ValueError(f"nested more than {MAX_NESTING} deep")
    return arguments


class CalledFunction(BaseModel):
    name: str
    arguments: Annotated[str, AfterValidator(_within_nesting)] = "{}"


class ToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> Message:
        """The message with its content as one text, and without fields that were not given."""
        parts = self.content or ()
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        given = self.model_dump(exclude_none=True, exclude={"role", "content"})
        return {"role": self.role, "content": text, **{name: value for name, value in given.items() if value}}


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: dict[str, object]


class ChatRequest(ModelRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, object] | None = None

    @property
    def text(self) -> str:
        return "".join(message.plain()["content"] for message in self.messages)

    def ignored(self, sampling: Sampling) -> list[str]:
        forces_a_call = self.tool_choice not in (None, "none", "auto")
        return sorted([*super().ignored(sampling), *(["tool_choice"] if forces_a_call else [])])


class TextRequest(ModelRequest):
    """The body of `/v1/completions`: a prompt as text or as token ids."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else ""


class RewardPost(BaseModel):
    """The body of `POST /sessions/{id}/reward`."""

    reward: Annotated[float, Field(allow_inf_nan=False)]


Body = TypeVar("Body", bound=BaseModel)


def parsed(body: bytes, kind: type[Body]) -> Body:
    """Parse a body as `kind`. Raises Refused (400) for anything but a JSON object of that kind."""
    try:
        content = json.loads(body or b"{}")
        if nesting(content) > MAX_NESTING:
            raise Refused(400, f"the body is nested more than {MAX_NESTING} deep")
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(400, f"{where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None


def json_value(text: str) -> object:
    """The text parsed as JSON; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def message_key(message: Message) -> str:
    """A text by which messages are compared: the same for the same message, however a client writes it. It
    leaves out thinking, which most clients do not send back, and has the arguments of calls as values."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        values = json_value(arguments) if isinstance(arguments, str) else arguments
        calls.append((call.get("id"), call["function"]["name"], values))
    content, names = message.get("content") or "", (message.get("tool_call_id"), message.get("name"))
    return json.dumps([message["role"], content, calls, *names], sort_keys=True)


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
    is_chat, sampled, message = isinstance(request, ChatRequest), reply.completion, dict(reply.message)
    if message.get("tool_calls"):
        # OpenAI has arguments as text, and no content where a message only calls.
        message["content"] = message.get("content") or None
        functions = [dict(call["function"]) for call in message["tool_calls"]]
        for function in functions:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls = zip(message["tool_calls"], functions, strict=True)
        message["tool_calls"] = [{**call, "function": function} for call, function in calls]
    content = {"message": message} if is_chat else {"text": message["content"]}
    choice = {"index": 0, **content, "finish_reason": reply.finish_reason, "logprobs": None}
    if request.wants_tokens:
        texts = [reply.decode([token]) for token in sampled.tokens]
        if is_chat:
            pieces = list[dict[str, object]]()
            for text, logprob in zip(texts, sampled.logprobs, strict=True):
                written = list(text.encode(errors="replace"))
                pieces.append({"token": text, "logprob": logprob, "bytes": written, "top_logprobs": []})
            choice["logprobs"] = {"content": pieces}
        else:
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": sampled.logprobs,
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
            }
        choice |= {"token_ids": sampled.tokens, "weight_versions": sampled.versions}
    prefix, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
    num_prompt, num_sampled = len(reply.prompt_tokens), len(sampled.tokens)
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model or MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
        **({"prompt_token_ids": reply.prompt_tokens} if request.wants_tokens else {}),
    }


def events(answer: Mapping[str, Any], *, with_usage: bool) -> Iterator[bytes]:
    """The answer as a stream: the message, then its finish reason (a text comes with it), then the usage if
    asked for."""
    kind, chunks = answer["object"], answer["choices"]
    if kind == "chat.completion":
        kind, (choice,) = "chat.completion.chunk", answer["choices"]
        delta = dict(choice["message"])
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        more = {name: choice[name] for name in ("logprobs", "token_ids", "weight_versions") if name in choice}
        chunks = [
            {"index": 0, "delta": delta, "finish_reason": None, **more},
            {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]},
        ]
    bodies: list[dict[str, object]] = [{"choices": [chunk]} for chunk in chunks]
    if with_usage:
        bodies.append({"choices": [], "usage": answer["usage"]})
    head = {"id": answer["id"], "created": answer["created"], "model": answer["model"], "object": kind}
    for body in bodies:
        yield f"data: {json.dumps({**head, **body})}\n\n".encode()
    yield END_OF_STREAM


def models() -> dict[str, object]:
    """The body of `/v1/models`."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]}

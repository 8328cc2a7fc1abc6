"""The gateway over HTTP: what clients get that are not ours (openai, and plain aiohttp), and which tokens
become the trajectory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import aiohttp
import pytest
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient

from asyncrl_cli.contracts.environment import EpisodeFailed
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.conversation import Conversation
from asyncrl_cli.envs.gateway import server as gateway_server
from asyncrl_cli.envs.gateway.server import BODY_BYTES
from tests.envs.gateways import CHAT, SAMPLING, CharacterChat, Served, gateway, ids, text_of
from tests.waiting import until

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
ASK = [{"role": "user", "content": "2+2"}]


def served(says: Callable[[str], str] = lambda prompt: "fine", **options: Any) -> Callable[..., None]:
    def decorated(test: Callable[[Served], Awaitable[None]]) -> Callable[[], None]:
        async def main() -> None:
            async with gateway(says, **options) as server:
                await test(server)

        def run() -> None:
            asyncio.run(main())

        run.__name__ = test.__name__
        return run

    return decorated  # type: ignore[return-value]


def client_of(access: Any, **options: Any) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)  # no certificates to load, no proxy between
    return AsyncOpenAI(
        base_url=access.base_url, api_key=access.key, max_retries=0, http_client=http, **options
    )


async def refusal(call: Awaitable[Any]) -> APIStatusError:
    with pytest.raises(APIStatusError) as caught:
        await call
    return caught.value


@served(lambda prompt: '!add{"a": 2}' if "<tool>" not in prompt else "four")
async def test_a_loop_with_tools_is_one_segment_of_the_very_tokens_that_were_sampled(server: Served) -> None:
    session, access = server.open()
    async with client_of(access) as client:
        first = await client.chat.completions.create(model="gpt-4o", messages=ASK, tools=[ADD])
        (call,) = first.choices[0].message.tool_calls
        assert (first.choices[0].finish_reason, call.function.name) == ("tool_calls", "add")
        assert call.function.arguments == '{"a": 2}'
        sent_back = first.choices[0].message.model_dump(exclude_none=True)
        # a client may write the same arguments otherwise
        sent_back["tool_calls"][0]["function"]["arguments"] = '{"a":2}'
        told = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "4"}]}
        messages = [*ASK, sent_back, told]
        second = await client.chat.completions.create(model="gpt-4o", messages=messages, tools=[ADD])
    assert (second.choices[0].message.content, second.model) == ("four", "gpt-4o")
    (segment,) = session.conversation.segments()
    assert text_of(segment["tokens"]) == '[add]<user>2+2\n<assistant>!add{"a": 2}\n<tool>4\n<assistant>four\n'
    assert text_of(segment["tokens"][segment["mask"]]) == '!add{"a": 2}\nfour\n'
    assert set(segment["versions"][segment["mask"]]) == {3}
    assert set(segment["logprobs"][~segment["mask"]]) == {0.0}


@served()
async def test_a_rewritten_history_and_a_second_conversation_are_segments_of_their_own(
    server: Served,
) -> None:
    session, access = server.open()
    async with client_of(access) as client:
        for messages in (
            ASK,
            [*ASK, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}],
            [*ASK, {"role": "assistant", "content": "summary"}, {"role": "user", "content": "more"}],
            [{"role": "system", "content": "sub"}, *ASK],
        ):
            await client.chat.completions.create(model="m", messages=messages)
    texts = [text_of(segment["tokens"]) for segment in session.conversation.segments()]
    assert texts == [
        "<user>2+2\n<assistant>fine\n<user>more\n<assistant>fine\n",
        "<user>2+2\n<assistant>summary\n<user>more\n<assistant>fine\n",
        "<system>sub\n<user>2+2\n<assistant>fine\n",
    ]
    assert [int(segment["mask"].sum()) for segment in session.conversation.segments()] == [10, 5, 5]


@served()
async def test_of_two_requests_that_continue_one_segment_the_second_makes_a_fork(server: Served) -> None:
    session, access = server.open()
    async with client_of(access) as client:
        await client.chat.completions.create(model="m", messages=ASK)
        more = [*ASK, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=more) for _ in range(2)))
    masks = [int(segment["mask"].sum()) for segment in session.conversation.segments()]
    assert masks == [10, 5]  # the answer that both continue is trained once
    one, other = (segment["tokens"].tolist() for segment in session.conversation.segments())
    assert one == other


@served(lambda prompt: "one two")
async def test_text_prompts_continue_by_their_tokens(server: Served) -> None:
    session, access = server.open()
    async with client_of(access) as client:
        more = {"return_token_ids": True}
        first = await client.completions.create(
            model="m", prompt="count:", max_tokens=3, logprobs=1, extra_body=more
        )
        choice = first.choices[0]
        assert (choice.text, choice.finish_reason, choice.token_ids) == ("one", "length", ids("one"))
        assert choice.logprobs.token_logprobs == [-0.5] * 3
        assert first.prompt_token_ids == ids("count:")
        second = await client.completions.create(
            model="m", prompt=[*ids("count:one"), *ids(" and ")], stop=" "
        )
        assert second.choices[0].text == "one"
    (segment,) = session.conversation.segments()
    assert text_of(segment["tokens"]) == "count:one and one two\n"


@served(lambda prompt: "!add{}")
async def test_a_stream_brings_the_same_answer(server: Served) -> None:
    _, access = server.open()
    async with client_of(access) as client:
        how = dict(stream=True, stream_options={"include_usage": True}, logprobs=True)
        stream = await client.chat.completions.create(model="m", messages=ASK, tools=[ADD], **how)
        chunks = [chunk async for chunk in stream]
    (call,) = chunks[0].choices[0].delta.tool_calls
    assert (call.index, call.function.name, chunks[1].choices[0].finish_reason) == (0, "add", "tool_calls")
    assert [entry.logprob for entry in chunks[0].choices[0].logprobs.content] == [-0.5] * 7
    assert chunks[-1].usage.completion_tokens == 7


@served()
async def test_the_profile_decides_how_tokens_are_sampled_and_the_answer_says_what_was_ignored(
    server: Served,
) -> None:
    _, access = server.open()
    async with client_of(access) as client:
        how = dict(temperature=0.2, top_p=1.0, seed=3, tool_choice="required", max_tokens=2)
        create = client.chat.completions.with_raw_response.create
        raw = await create(model="m", messages=ASK, tools=[ADD], **how)
    assert raw.headers["x-asyncrl-ignored"] == "seed, temperature, tool_choice"
    ((_, _, sampling),) = server.engine.seen
    assert (sampling.temperature, sampling.max_response_tokens) == (1.0, 2)


@served(max_turns=1)
async def test_refusals_are_in_openais_shape(server: Served) -> None:
    session, access = server.open()
    url, headers = access.base_url, {"Authorization": f"Bearer {access.key}"}
    async with aiohttp.ClientSession() as http:

        async def status(path: str, data: Any, headers: Any = headers) -> tuple[int, str]:
            async with http.post(url + path, data=data, headers=headers) as response:
                answer = await response.json()
                assert set(answer["error"]) == {"message", "type", "param", "code"}
                return response.status, answer["error"]["message"]

        chat = "/chat/completions"
        code, why = await status(chat, b"\xff{")
        assert (code, why.partition(":")[0]) == (400, "the body is not JSON")
        assert (await status(chat, b"[" * 100_000))[0] == 400
        deep = b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * 500 + b"]" * 500 + b"}"
        assert await status(chat, deep) == (400, "the body is nested more than 64 deep")
        call = {"function": {"name": "f", "arguments": "[" * 500 + "]" * 500}}
        code, why = await status(
            chat, json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        )
        assert (code, why.rpartition(", ")[2]) == (400, "nested more than 64 deep")
        assert await status(chat, b"{}") == (400, "messages: Field required")
        assert await status(chat, json.dumps({"messages": ASK, "n": 2})) == (400, "n: Input should be 1")
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        assert (await status(chat, json.dumps({"messages": image})))[0] == 400
        long = [{"role": "user", "content": "x" * 500}]
        why = "this model's maximum context length is 400 tokens (env.max_context_tokens); the prompt has 518"
        assert await status(chat, json.dumps({"messages": long})) == (400, why)
        assert (await status("/nothing", b"{}"))[0] == 404
        wrong = {"Authorization": "Bearer wrong"}
        assert (await status(chat, json.dumps({"messages": ASK}), wrong))[0] == 401
        assert (await status(chat, json.dumps({"messages": ASK}), {}))[0] == 401
        async with http.post(url + chat, json={"messages": ASK}, headers=headers) as response:
            assert response.status == 200
        why = "this trajectory has had its env.max_turns = 1 answers"
        assert await status(chat, json.dumps({"messages": ASK})) == (400, why)
        await server.gateway.close_session(session)
        assert (await status(chat, json.dumps({"messages": ASK})))[0] == 410
        assert (await status(chat, json.dumps({"messages": ASK}), {}))[0] == 401


class Held(CharacterChat):
    """Rendering waits until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def render(self, messages: Any, tools: Any) -> list[int]:
        assert self.go.wait(timeout=20)
        return super().render(messages, tools)


@served()
async def test_a_prompt_that_takes_long_to_tokenize_holds_up_nobody_else(server: Served) -> None:
    slow, (_, access) = Held(), server.open()
    _, held = server.gateway.open_session("slow", Conversation(cast(Chat, slow)), SAMPLING, 7)
    async with client_of(held) as patient, client_of(access) as client, aiohttp.ClientSession() as http:
        waiting = asyncio.create_task(patient.chat.completions.create(model="m", messages=ASK))
        await until(lambda: server.gateway.num_running == 1)
        async with http.get(f"{server.gateway.url}/health") as response:
            assert response.status == 200
        answer = await client.chat.completions.create(model="m", messages=ASK)
        assert answer.choices[0].message.content == "fine"
        assert not waiting.done()
        slow.go.set()
        assert (await waiting).choices[0].message.content == "fine"


@served()
async def test_a_body_that_no_context_could_hold_is_refused_unread_in_openais_words(server: Served) -> None:
    session, access = server.open()
    async with client_of(access) as client:
        asked = [{"role": "user", "content": "x" * 2 * BODY_BYTES}]
        refused = await refusal(client.chat.completions.create(model="m", messages=asked))
    assert (refused.status_code, refused.code) == (400, "context_length_exceeded")
    assert session.finish_reason == "length"
    assert "maximum context length is 400 tokens" in refused.message


@served()
async def test_a_body_that_never_ends_is_given_up(server: Served) -> None:
    _, access = server.open()

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    url, headers = f"{access.base_url}/chat/completions", {"Authorization": f"Bearer {access.key}"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gateway_server, "BODY_LIMIT_S", 0.05)
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, data=endless(), headers=headers) as response,
        ):
            assert (response.status, "did not arrive" in await response.text()) == (400, True)


@served()
async def test_names_of_fields_that_fit_into_no_header_are_ignored_in_silence(server: Served) -> None:
    _, access = server.open()
    odd = {"a\r\nSet-Cookie: x": 1, "é": 1, "x" * 9000: 1, **{f"field{number}": 1 for number in range(5000)}}
    url, headers = f"{access.base_url}/chat/completions", {"Authorization": f"Bearer {access.key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={"messages": ASK, **odd}, headers=headers) as response,
    ):
        assert (response.status, response.headers["x-asyncrl-ignored"][:15]) == (200, "field0, field1,")
        assert "Set-Cookie" not in response.headers


@served()
async def test_what_the_chat_template_refuses_is_a_bad_request(server: Served) -> None:
    why = "the model's chat template refuses these messages: no system"

    def refuse(*_: Any) -> Any:
        raise EpisodeFailed("template", why)

    _, access = server.open()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CHAT, "render", refuse)
        async with client_of(access) as client:
            refused = await refusal(client.chat.completions.create(model="m", messages=ASK))
    assert (refused.status_code, refused.body["message"]) == (400, why)


@served(slots=1)
async def test_too_many_requests_at_once_are_told_when_to_come_again(server: Served) -> None:
    _, access = server.open()
    server.engine.held.clear()
    async with client_of(access) as client:
        waiting = [
            asyncio.create_task(client.chat.completions.create(model="m", messages=ASK)) for _ in range(4)
        ]
        await until(lambda: len(server.engine.running) == 4)
        refused = await refusal(client.chat.completions.create(model="m", messages=ASK))
        assert (refused.status_code, refused.response.headers["Retry-After"]) == (429, "1")
        server.engine.held.set()
        answers = await asyncio.gather(*waiting)
        assert [answer.choices[0].message.content for answer in answers] == ["fine"] * 4


@served()
async def test_a_client_that_goes_away_takes_its_request_with_it(server: Served) -> None:
    session, access = server.open()
    server.engine.held.clear()
    async with client_of(access) as client:
        request = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
        await until(lambda: len(server.engine.running) == 1)
        request.cancel()
    await until(lambda: not server.engine.running)
    assert (server.engine.num_cancelled, session.conversation.segments()) == (1, [])


@served()
async def test_closing_a_session_ends_its_requests(server: Served) -> None:
    told = list[int]()
    session, access = server.gateway.open_session("t", Conversation(CHAT), SAMPLING, 7, told.append)
    server.engine.held.clear()
    async with client_of(access) as client:
        request = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
        await until(lambda: len(server.engine.running) == 1)
        await server.gateway.close_session(session)
        assert (await refusal(request)).status_code == 410
    assert session.conversation.segments() == []
    assert told == [1]  # afterwards nobody waits for the agent


@served()
async def test_200_sessions_at_once_get_their_own_answers(server: Served) -> None:
    server.engine.says = lambda prompt: prompt.partition("<user>")[2].partition("\n")[0][::-1]
    opened = [server.open() for _ in range(200)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(number: int, access: Any) -> str:
            asked = {"messages": [{"role": "user", "content": f"q{number}"}]}
            headers = {"Authorization": f"Bearer {access.key}"}
            url = f"{access.base_url}/chat/completions"
            async with http.post(url, json=asked, headers=headers) as response:
                return str((await response.json())["choices"][0]["message"]["content"])

        answers = await asyncio.gather(*(ask(number, access) for number, (_, access) in enumerate(opened)))
    assert answers == [f"q{number}"[::-1] for number in range(200)]
    assert all(len(session.conversation.segments()) == 1 for session, _ in opened)


@served()
async def test_a_reward_can_be_posted(server: Served) -> None:
    session, access = server.open()
    url, headers = access.base_url.removesuffix("/v1") + "/reward", {"Authorization": f"Bearer {access.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for reward, status in ((0.25, 200), (float("nan"), 400), ("much", 400)):
            async with http.post(url, json={"reward": reward}) as response:
                assert response.status == status
        async with http.get(url) as response:
            assert await response.json() == {"reward": 0.25}
    assert session.reward == 0.25

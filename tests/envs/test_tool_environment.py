"""A user's class as the environment: what each misbehaviour does to its trajectory, that nothing waits longer
than its limit, and that no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.contracts.environment import Answer, End, EpisodeFailed, RewardPart, RewardSpec, Turn
from asyncrl_cli.contracts.item import make_item
from asyncrl_cli.envs.tool_environment import CallLog, RepeatedCalls, ToolEnvironment, noted_calls
from asyncrl_cli.job.ray.reaper import families, living
from asyncrl_cli.sandbox.parent_processes import ProcessEnded, Processes, environment_processes
from asyncrl_cli.tasks.tool_class import ToolClass, inspect_class

HERE = str(Path(__file__).parent)
FAULTY = ToolClass(code=UserCode(name="faulty:Faulty", import_path=HERE))
WORTH = RewardPart(
    name="faulty:worth_of_answers",
    weight=1.0,
    spec=RewardSpec(kind="function", function=UserCode(name="faulty:worth_of_answers", import_path=HERE)),
)
IMPORT_LIMIT_S = 60.0
LIMIT_S = 100.0
"""For calls that end by themselves. Longer than `PLAYED_WITHIN_S`: who waits for this limit fails the
test."""
PLAYED_WITHIN_S = 60.0
SHORT_S = 1.0
"""For calls that hang."""


def said(text: str = "", *calls: tuple[str, Any], malformed: str = "") -> Answer:
    tool_calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if calls else {})
    return Answer(text=text, message=message, finish_reason="stop", malformed=malformed)


def misbehaving(how: str) -> Answer:
    return said("", ("misbehave", {"how": how}))


Play = Callable[[ToolEnvironment], Awaitable[Any]]


def playing(
    *plays: Play,
    tool_class: ToolClass = FAULTY,
    answer: str | None = None,
    how: str = "",
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """What each play of an environment returned or raised, at the same time; all processes are gone
    afterwards."""
    started: set[psutil.Process] = set()

    async def main() -> list[Any]:
        processes = environment_processes(tool_class, import_limit_s=IMPORT_LIMIT_S)

        async def one(play: Play) -> Any:
            environment = ToolEnvironment(processes, tool_class, None, CallLog(None), limit_s)
            environment.episode = "uid@0.0/0"
            try:
                first = await environment.start(make_item("hello", answer, {"how": how}))
                return first if play is only_start else await play(environment)
            except EpisodeFailed as failed:
                return failed.kind, failed.text
            finally:
                await environment.close()

        try:
            async with asyncio.timeout(PLAYED_WITHIN_S):
                return await asyncio.gather(*map(one, plays))
        finally:
            started.update(started_by(processes))
            await processes.close()

    try:
        return asyncio.run(main())
    finally:
        assert not left_of(started)


def given_processes(test: Callable[[Processes], Awaitable[None]]) -> Callable[[], None]:
    """Runs the test on an event loop, with processes of the faulty environment."""

    async def main() -> None:
        processes = environment_processes(FAULTY, import_limit_s=IMPORT_LIMIT_S)
        try:
            await test(processes)
        finally:
            await processes.close()

    return lambda: asyncio.run(main())


def environment_of(processes: Processes) -> ToolEnvironment:
    return ToolEnvironment(processes, FAULTY, None, CallLog(None), LIMIT_S)


def started_by(processes: Processes) -> set[psutil.Process]:
    """The host and its descendants, as far as they have not ended."""
    return families([] if processes.host is None else [processes.host.pid])


def left_of(started: Iterable[psutil.Process], within_s: float = 20.0) -> set[psutil.Process]:
    """The processes that have not ended after that time."""
    deadline_s = time.monotonic() + within_s
    while (left := living(started)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return left


async def only_start(environment: ToolEnvironment) -> None: ...


async def answering(*answers: Answer, environment: ToolEnvironment) -> list[Any]:
    return [await environment.step(answer) for answer in answers]


def after(*answers: Answer) -> Play:
    return lambda environment: answering(*answers, environment=environment)


def within(limit_s: float, play: Play) -> Play:
    def limited(environment: ToolEnvironment) -> Awaitable[Any]:
        environment.limit_s = limit_s
        return play(environment)

    return limited


@pytest.mark.slow
def test_what_each_misbehaviour_does_to_its_trajectory_and_none_waits_longer_than_its_limit() -> None:
    kinds = {
        "hang": ("tool-timeout", "took longer than 1 s and was killed"),
        "exit": ("tool-died", "exit code 3"),
        "crash": ("tool-died", "SIGSEGV"),
        "fork_and_exit": ("tool-died", "exit code 4"),
        "ten_megabytes": ("environment", "10,000,000 characters"),
    }
    told = {
        "sys_exit": "{'error': '3'}",
        "raise": "{'error': 'out of stock'}",
        "megabytes": "printed",
        "nothing": "{'error': \"'Faulty' object has no attribute '_nothing'\"}",
    }
    plays = {how: after(misbehaving(how), said("bye")) for how in (*kinds, *told)}
    outcomes = playing(*(plays | {"hang": within(SHORT_S, plays["hang"])}).values())
    for (how, (kind, text)), outcome in zip(kinds.items(), outcomes, strict=False):
        assert outcome[0] == kind, how
        assert text in outcome[1]
        assert "uid@0.0/0" in outcome[1]
    for (how, text), (turn, end) in zip(told.items(), outcomes[len(kinds) :], strict=True):
        assert turn.messages[0]["content"] == text, how
        assert end.reward == 1.0


def test_processes_that_tools_leave_behind_are_killed() -> None:
    (forked,), (daemon,) = playing(after(misbehaving("fork")), after(misbehaving("daemon")))
    pids = [int(turn.messages[0]["content"]) for turn in (forked, daemon)]
    assert not left_of([process for process in psutil.process_iter() if process.pid in pids])


def test_calls_are_answered_in_their_order_and_wrong_ones_are_told() -> None:
    calls = [
        ("echo", {"text": "a"}),
        ("wait", {"seconds": 0.01}),
        ("sell", {}),
        ("echo", {"words": "b"}),
        ("echo", "no JSON"),
        ("echo", {"text": "c"}),
    ]
    ((turn, malformed, end),) = playing(
        after(said("", *calls), said("?", malformed="it is no JSON"), said("bye"))
    )
    assert isinstance(turn, Turn)
    assert [message["tool_call_id"] for message in turn.messages] == [f"c{index}" for index in range(6)]
    contents = [message["content"] for message in turn.messages]
    assert contents[:3] == ["1: a", "waited", "{'error': 'Tool sell not found.'}"]
    assert "unexpected keyword argument 'words'" in contents[3]
    assert contents[4].startswith("{'error': ")
    assert contents[5] == "2: c"
    assert malformed.messages == (
        {"role": "user", "content": "The tool call could not be read: it is no JSON"},
    )
    assert end == End(reward=1.0, facts={"failed_calls": 4})


def test_the_tools_that_nobody_may_call_are_not_found() -> None:
    ((turn,),) = playing(after(said("", ("_exit", {}), ("reset", {}), ("get_reward", {}), ("__init__", {}))))
    assert all("not found" in message["content"] for message in turn.messages)


def test_reset_gets_the_columns_and_adds_to_the_users_message() -> None:
    (turn,) = playing(only_start, answer="7")
    assert turn.messages == ({"role": "user", "content": "hello (answer 7)"},)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("hang", "took longer"),
        ("raise", "RuntimeError: no such shop"),
        ("number", "reset returned int, not text or None"),
    ],
)
def test_a_reset_that_fails_fails_its_trajectory(how: str, text: str) -> None:
    ((kind, why),) = playing(only_start, how=how, limit_s=SHORT_S if how == "hang" else LIMIT_S)
    assert kind == "environment"
    assert text in why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"), [("reward hangs", "took longer"), ("reward is None", "the reward is None")]
)
def test_an_episode_without_a_reward_has_failed(how: str, text: str) -> None:
    bye = after(said("bye"))
    ((kind, why),) = playing(within(SHORT_S, bye) if how == "reward hangs" else bye, how=how)
    assert kind == "reward"
    assert text in why


def test_a_reward_function_in_the_signature_of_trl_is_added_and_may_log_figures() -> None:
    tool_class = ToolClass(code=FAULTY.code, rewards=(WORTH,))
    ((_, end),) = playing(after(said("", ("echo", {"text": "a"})), said("bye")), tool_class=tool_class)
    assert end.reward == 1.0 + 3.0  # the messages after the prompt: a call, its result, an answer
    assert end.reward.parts == {"get_reward": 1.0, "faulty:worth_of_answers": 3.0}
    assert end.facts == {"said": 1.0, "failed_calls": 0}


def test_reward_functions_of_a_class_have_weights() -> None:
    parts = (replace(WORTH, weight=0.5), replace(WORTH, name="again", weight=-1.0))
    tool_class = ToolClass(code=FAULTY.code, rewards=parts)
    ((_, end),) = playing(after(said("", ("echo", {"text": "a"})), said("bye")), tool_class=tool_class)
    assert end.reward == 1.0 + 0.5 * 3.0 - 3.0


def test_a_process_serves_the_next_episode_with_a_new_object_unless_something_is_left_of_the_last() -> None:
    async def pids(environment: ToolEnvironment) -> list[str]:
        turns = await answering(
            said("", ("echo", {"text": "a"})), misbehaving("pid"), environment=environment
        )
        return [turn.messages[0]["content"] for turn in turns]

    async def main() -> list[list[str]]:
        processes = environment_processes(FAULTY, import_limit_s=IMPORT_LIMIT_S)
        outcomes = []
        for how in ("pid", "fork", "pid", "thread", "pid"):
            environment = ToolEnvironment(processes, FAULTY, None, CallLog(None), LIMIT_S)
            await environment.start(make_item("hello", None, {}))
            await environment.step(misbehaving(how))
            outcomes.append(await pids(environment))
            await environment.close()
        await processes.close()
        return outcomes

    first, second, third, fourth, fifth = asyncio.run(main())
    assert first[0] == second[0] == third[0] == "1: a"
    assert first[1] == second[1] != third[1] == fourth[1] != fifth[1]


def test_tools_that_print_wait_for_nobody_when_standard_error_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(fd: int, text: bytes) -> int:
        if fd == 2:
            raise BrokenPipeError
        return real(fd, text)

    real = os.write
    monkeypatch.setattr(os, "write", write)
    ((turn,),) = playing(after(misbehaving("megabytes")))
    assert turn.messages[0]["content"] == "printed"


@given_processes
async def test_an_abort_in_the_middle_of_a_call_kills_the_process(processes: Processes) -> None:
    environment = environment_of(processes)
    await environment.start(make_item("hello", None, {}))
    (process,) = psutil.Process(processes.host.pid).children()
    step = asyncio.ensure_future(environment.step(misbehaving("hang")))
    await asyncio.sleep(0.1)
    step.cancel()
    await asyncio.wait({step})
    await environment.close()
    assert not await asyncio.to_thread(left_of, [process])


@given_processes
async def test_processes_come_and_go_also_while_the_hosts_socket_is_full(processes: Processes) -> None:
    await processes.start()
    assert processes.control is not None
    processes.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # room for a few commands
    taken = await asyncio.gather(*(processes.take() for _ in range(12)))
    alive = [psutil.Process(process.pid) for process in taken]
    for process in taken:
        processes.kill(process)
    assert not await asyncio.to_thread(left_of, alive)


@given_processes
async def test_an_abort_while_a_process_starts_leaves_none(processes: Processes) -> None:
    await processes.start()
    take = asyncio.ensure_future(processes.take())
    while not (started := psutil.Process(processes.host.pid).children()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    take.cancel()
    await asyncio.wait({take})
    assert take.cancelled()
    assert not await asyncio.to_thread(left_of, started)


@given_processes
async def test_an_abort_while_the_class_is_imported_leaves_nothing_to_wait_for(processes: Processes) -> None:
    start = asyncio.ensure_future(processes.start())
    while processes.host is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    start.cancel()
    await asyncio.wait({start})
    async with asyncio.timeout(30):
        assert await processes.host.wait() == -signal.SIGKILL, "before anybody closes"


@given_processes
async def test_what_a_process_that_died_had_started_ends_with_it(processes: Processes) -> None:
    environment = environment_of(processes)
    await environment.start(make_item("hello", None, {}))
    with pytest.raises(EpisodeFailed, match="exit code 4"):
        await environment.step(misbehaving("fork_and_exit"))
    started = started_by(processes) - {psutil.Process(processes.host.pid)}
    assert not await asyncio.to_thread(left_of, started)
    await environment.close()


@given_processes
async def test_a_host_that_dies_fails_what_runs_and_another_takes_its_place(processes: Processes) -> None:
    environment = environment_of(processes)
    await environment.start(make_item("hello", None, {}))
    assert processes.host is not None
    processes.host.send_signal(signal.SIGKILL)
    with pytest.raises(EpisodeFailed, match="SIGKILL") as failed:
        await environment.step(misbehaving("hang"))
    assert failed.value.kind == "tool-died"
    await environment.close()
    again = environment_of(processes)
    await again.start(make_item("hello", None, {}))
    await again.close()


def test_a_class_that_cannot_be_imported_is_told() -> None:
    async def main() -> None:
        nothing = ToolClass(code=UserCode(name="faulty:Nothing", import_path=HERE))
        processes = environment_processes(nothing, import_limit_s=IMPORT_LIMIT_S)
        with pytest.raises(ProcessEnded, match="AttributeError: module 'faulty' has no attribute 'Nothing'"):
            await processes.start()
        await processes.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """Not even a daemon that a tool has started, and whose parent has ended."""
    program = f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(HERE).parents[1])!r})
        from tests.envs.test_tool_environment import *

        async def main():
            processes = environment_processes(FAULTY, import_limit_s=IMPORT_LIMIT_S)
            environments = [ToolEnvironment(processes, FAULTY, None, CallLog(None), 60.0) for _ in range(3)]
            await asyncio.gather(*(each.start(make_item("hello", None, {{}})) for each in environments))
            await environments[0].step(misbehaving("fork"))
            await environments[1].step(misbehaving("daemon"))
            asyncio.ensure_future(environments[2].step(misbehaving("hang")))
            await asyncio.sleep(0.2)
            print("ready", flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    started = psutil.Process(worker.pid).children(recursive=True)
    assert len(started) == 6  # host, three environments, a fork and a daemon
    worker.kill()
    worker.communicate()
    assert not left_of(started)


def test_a_classs_tools_are_described_as_transformers_describes_functions() -> None:
    schemas, has_reward = inspect_class(FAULTY.code)
    assert has_reward
    by_name = {schema["function"]["name"]: schema["function"] for schema in schemas}
    assert set(by_name) == {"echo", "wait", "misbehave"}
    parameters = by_name["wait"]["parameters"]
    assert parameters["properties"]["seconds"] == {"type": "number", "description": "How long."}
    assert parameters["required"] == ["seconds"]


def test_tool_calls_are_noted_before_they_run_and_found_by_trajectory(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "attempt-1" / "rollout-0.tools.jsonl")
    log.note("a@0.0/1", 1, ["search", "buy"])
    log.note("b@0.0/0", 1, ["search"])
    log.note("a@0.0/1", 2, ["buy"])
    log.close()
    with (tmp_path / "attempt-1" / "rollout-0.tools.jsonl").open("a") as file:
        file.write('["a@0.0/1", 3, ["se')
    noted = {"a@0.0/1": {1: ["search", "buy"], 2: ["buy"]}, "b@0.0/0": {1: ["search"]}}
    assert (noted_calls(tmp_path), noted_calls(tmp_path, "rollout-1")) == (noted, {})


def test_calls_of_episodes_that_start_again_are_told_once(tmp_path: Path) -> None:
    def noting(attempt: str, *trajectories: str) -> None:
        log = CallLog(tmp_path / attempt / "rollout-0.tools.jsonl")
        for trajectory in trajectories:
            log.note(trajectory, 1, ["buy"])
        log.close()

    noting("attempt-1", "a@0.0/1", "a@0.0/2", "b@1.0/0")
    repeated = RepeatedCalls(tmp_path, "attempt-2")
    again = {"group": "a@0.1", "uid": "a", "epoch": 0, "attempt": 1}
    assert [told["trajectory"] for told in repeated({"event": "running", **again})] == ["a@0.0/1", "a@0.0/2"]
    assert repeated({"event": "running", **again}) == []

    noting("attempt-2", "a@0.1/2", "a@0.1/3")
    assert repeated({"event": "lost", "worker": "rollout-0"}) == []
    (lost,) = repeated({"event": "replaced", **again, "indices": [1, 2]})
    assert lost == {"event": "tools_again", **again, "trajectory": "a@0.1/2", "calls": {1: ["buy"]}}
    assert repeated({"event": "replaced", **again, "indices": [1, 2]}) == []


def test_the_environment_of_docs_agents_works_as_written(tmp_path: Path) -> None:
    page = (Path(HERE).parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")
    source = page.partition("```python\n# my_env.py\n")[2].partition("```")[0]
    assert len(source.splitlines()) <= 32
    (tmp_path / "my_env.py").write_text(source)
    code = UserCode(name="my_env:Library", import_path=str(tmp_path))
    books = [{"author": "Woolf", "title": "The Waves", "shelf": 7}]

    async def main() -> tuple[Any, ...]:
        library = ToolClass(code=code)
        processes = environment_processes(library, import_limit_s=IMPORT_LIMIT_S)
        environment = ToolEnvironment(processes, library, None, CallLog(None), LIMIT_S)
        first = await environment.start(make_item("Where is The Waves?", None, {"books": books, "shelf": 7}))
        looked = said(
            "",
            ("look_up", {"author": "Woolf", "title": "The Waves"}),
            ("look_up", {"author": "Woolf", "title": "?"}),
        )
        found, _, end = await answering(
            looked, said("", ("answer", {"shelf": 7})), said("On shelf 7."), environment=environment
        )
        await environment.close()
        await processes.close()
        return first.messages[-1]["content"], [message["content"] for message in found.messages], end.reward

    said_first, found, reward = asyncio.run(main())
    assert said_first == "Where is The Waves? The catalogue has 1 books."
    assert found == ["shelf 7", "{'error': \"('Woolf', '?')\"}"]
    assert reward == 1.0

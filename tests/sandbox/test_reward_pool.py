"""Rewards in their process: what they return, and that one that raises, hangs or dies fails alone."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncrl_cli.base.child_process import send
from asyncrl_cli.base.errors import ConfigError, ExecutorFailed
from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.contracts.item import Item, make_item
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.sandbox import parent_rewards
from asyncrl_cli.sandbox.parent_rewards import RewardFailed, RewardPool, default_workers
from asyncrl_cli.tasks.code_choice import resolve_reward
from asyncrl_cli.tasks.task import load_task
from tests.waiting import until

FUNCTIONS = '''
    import asyncio, contextlib, os, re, time

    def length(item, response):
        """How much longer the response is than the item says."""
        return len(response) - item["metadata"].get("length", 0)

    def by_command(item, response):
        print("rewards may print")
        if response == "raise":
            raise KeyError("nothing here")
        if response == "exit":
            raise SystemExit(3)
        if response == "hang":
            open(item["answer"], "w").close() if "/" in item["answer"] else None
            time.sleep(600)
        if response == "hang in C":
            re.match("(a+)+$", "a" * 64 + "b")
        if response == "rubbish":
            for fd in range(3, 30):
                with contextlib.suppress(OSError):
                    os.write(fd, b"no JSON\\n")
        if response == "die":
            os.kill(os.getpid(), 11)
        if response == "die once" and not os.path.exists(item["answer"]):
            open(item["answer"], "w").close()
            os._exit(9)
        if response.startswith("return "):
            values = {"none": None, "text": "1", "true": True, "int": 2}
            return float(response[7:]) if response[7:] in ("nan", "inf") else values[response[7:]]
        return 1.0

    async def coroutine(item, response):
        return 1.0

    async def awaiting(item, response):
        if response == "raise":
            raise KeyError("nothing here")
        if response == "forever":
            await asyncio.Event().wait()
        if response == "block":
            open(BLOCKED, "w").close()
            time.sleep(600)
        if response == "own timeout":
            async with asyncio.timeout(0.001):
                await asyncio.sleep(600)
        while not os.path.exists(BLOCKED):
            await asyncio.sleep(0.01)
        return float(response)

    BLOCKED = os.path.join(os.path.dirname(__file__), "blocked")
    arrived, all_are_here = [], asyncio.Event()

    async def meeting(item, response):
        """Waits for the others, a hundred in all; "busy" lets nothing else run."""
        if response == "busy":
            time.sleep(0.3)
            return 0.0
        arrived.append(response)
        if len(arrived) == 100:
            all_are_here.set()
        await all_are_here.wait()
        return float(response)

    def held(item, response):
        """The response "hold" waits for the file that the answer names; one beside it says so."""
        if response == "hold":
            open(f"{item['answer']}-{os.getpid()}", "w").close()
            while not os.path.exists(item["answer"]):
                time.sleep(0.01)
        if response == "hang":
            time.sleep(600)
        return os.getpid()

    inside = []

    def in_rounds(item, response):
        """Waits until all numbers of its round have begun."""
        if inside:
            raise RuntimeError("two at once in one process")
        inside.append(response)
        open(f"{item['answer']}-{response}", "w").close()
        size = item["metadata"]["size"]
        first = int(response) // size * size
        while not all(os.path.exists(f"{item['answer']}-{number}") for number in range(first, first + size)):
            time.sleep(0.005)
        inside.clear()
        return os.getpid()

    async def pid_of(item, response):
        await asyncio.sleep(0.01)
        return os.getpid()

    def leaving_a_daemon(item, response):
        """Out of reach of whoever kills this process's group, the daemon holds the pipes to the pool open."""
        if (pid := os.fork()) == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        with open(item["answer"], "a") as pids:
            print(pid, file=pids)
        if response == "hang":
            time.sleep(600)
        return 1.0

    def one_argument(item):
        return 1.0

    not_a_function = 3
'''
ITEM = make_item("prompt", "answer", {})


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(textwrap.dedent(FUNCTIONS))
    return tmp_path


def resolved(reward: str) -> RewardSpec:
    """The reward of a file's rows."""
    return resolve_reward(
        Profile.model_validate({"task": {"reward": reward}}), RewardSpec(kind="none"), None
    )[0]


def spec_of(functions: Path, name: str) -> RewardSpec:
    return RewardSpec(
        kind="function", function=UserCode(name=f"my_rewards:{name}", import_path=str(functions))
    )


def with_pool(
    spec: RewardSpec, use: Callable[[RewardPool], Awaitable[Any]], timeout_s: float = 20.0, workers: int = 1
) -> Any:
    async def main() -> Any:
        pool = RewardPool(spec, timeout_s=timeout_s, workers=workers)
        try:
            async with asyncio.timeout(60):
                return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


async def outcomes(pool: RewardPool, responses: list[str], item=ITEM) -> list[float | str]:
    """Of responses scored all at once; a failure is its reason."""
    results = await asyncio.gather(
        *(pool.score(item, response) for response in responses), return_exceptions=True
    )
    assert all(isinstance(result, float | RewardFailed) for result in results), results
    return [str(result) if isinstance(result, RewardFailed) else result for result in results]


def score(
    spec: RewardSpec, responses: list[str], item=ITEM, timeout_s: float = 20.0, workers: int = 1
) -> list[float | str]:
    return with_pool(spec, lambda pool: outcomes(pool, responses, item), timeout_s, workers)


def test_a_function_of_the_users_scores_items_and_responses(functions):
    item = make_item("p", None, {"length": 2})
    assert score(spec_of(functions, "length"), ["", "ab", "abcde"], item) == [-2.0, 0.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_results_belong_to_their_requests_when_there_are_many(functions, workers):
    responses = ["x" * num for num in range(2000)]
    found = score(spec_of(functions, "length"), responses, workers=workers)
    assert found == [float(num) for num in range(2000)]


@pytest.mark.slow
def test_the_verifier_of_a_dataset_scores_in_the_child():
    profile = Profile.model_validate(
        {"task": {"train_prompts": 30, "adapter": "plain"}, "eval": {"prompts": 0}}
    )
    task = load_task(profile)
    assert task.reward.kind == "dataset"

    async def use(pool):
        return [
            await asyncio.gather(*(pool.score(item, response(item)) for item in task.train))
            for response in (lambda item: f"so <answer>{item['answer']}</answer>", lambda item: "[1, 2]")
        ]

    right, wrong = with_pool(task.reward, use)
    assert right == [1.0] * 30
    assert wrong == [0.0] * 30


def off_by_one(item) -> str:
    """The right list in the worked form's digits, each number 1 off, still in order."""
    numbers = [int(float(number)) for number in ast.literal_eval(item["answer"])]
    off = [number - 1 for number in numbers] if 0 not in numbers else [number + 1 for number in numbers]
    return "".join("0123456789abc"[number] for number in off)


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "forgiven"), [("auto", 0.0), ("exact-match", 0.0), ("dataset", 1.0)])
def test_worked_responses_are_scored_exactly_unless_the_datasets_own_verifier_is_asked_for(reward, forgiven):
    task = load_task(
        Profile.model_validate({"task": {"train_prompts": 60, "reward": reward}, "eval": {"prompts": 0}})
    )
    assert task.reward.adapter == "worked"
    items = [item for item in task.train if "'11.0'" not in item["answer"]]

    async def use(pool):
        right = [task.demonstration(item, Random(0)) for item in items]
        prefixed = ["00," + response for response in right]
        wrong = [right[0] + "1", "", ",", "é", right[0] + ","]
        return [
            await asyncio.gather(*(pool.score(*pair) for pair in zip(items, responses, strict=False)))
            for responses in (right, prefixed, wrong, [off_by_one(item) for item in items])
        ]

    right, prefixed, wrong, off = with_pool(task.reward, use)
    assert set(right) == set(prefixed) == {1.0}
    assert set(wrong) == {0.0}
    assert set(off) == {forgiven}
    assert len(off) > 20


def test_a_file_has_no_verifier_of_a_dataset(tmp_path):
    with pytest.raises(ConfigError, match=r"this task.source has none") as refused:
        resolved("dataset")
    assert "exact-match" in refused.value.hint


def test_exact_match_compares_the_answer_in_the_last_tag_or_the_whole_response():
    item = make_item("p", " 42 ", {})
    responses = [
        "42",
        " 42\n",
        "it is 42",
        "<answer>41</answer> no <answer> 42 </answer> done",
        "<answer>42",
        "42 <answer>",
    ]
    assert score(RewardSpec(kind="exact-match"), responses, item) == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def test_exact_match_without_an_answer_is_a_failure_and_not_0():
    (reason,) = score(RewardSpec(kind="exact-match"), ["42"], make_item("p", None, {}))
    assert reason == "ValueError: the item has no answer to compare a response with"


@pytest.mark.slow
def test_math_verify_agrees_with_verls_rules_for_dapo_and_gsm8k():
    """What verl's `math_dapo` ("Answer: ...", 1 or -1) and `gsm8k` ("#### ...") say of these, with 0 for
    -1."""
    spec = resolved("math-verify")
    dapo, gsm8k = (
        make_item("p", "34", {"data_source": "math_dapo"}),
        make_item("p", "1072", {"data_source": "openai/gsm8k"}),
    )
    answers = [
        "17 twice.\nAnswer: 34",
        "Answer: $34$",
        "Answer: \\boxed{34}",
        "34 less 22, hence\nAnswer: 12",
        "Answer: -34",
        "So",
    ]
    assert score(spec, answers, dapo) == [1, 1, 1, 0, 0, 0]
    assert score(spec, ["so 1000 + 72\n#### 1,072", "#### 72"], gsm8k) == [1, 0]


@pytest.mark.parametrize("name", ["length", "coroutine"])
def test_a_reward_comes_with_whether_the_response_names_the_reference(functions, name):
    def figures(spec: RewardSpec, item: Item) -> list[dict[str, float]]:
        return with_pool(spec, lambda pool: figures_in(pool, item))

    async def figures_in(pool: RewardPool, item: Item) -> list[dict[str, float]]:
        return [dict((await pool.score(item, response)).parts) for response in ("it is 76", "it is 1760")]

    spec = spec_of(functions, name)
    assert figures(spec, make_item("p", "76", {"length": 1})) == [
        {"names_answer": 1.0},
        {"names_answer": 0.0},
    ]
    assert figures(spec, make_item("p", None, {"length": 1})) == [{}, {}]
    assert figures(replace(spec, adapter="worked"), make_item("p", "76", {"length": 1})) == [{}, {}]


def test_a_reward_is_a_finite_number_and_all_else_fails_with_the_reason(functions):
    reasons = {
        "raise": "KeyError: 'nothing here' (my_rewards.py:",
        "exit": "SystemExit: 3",
        "return inf": "ValueError: the reward returned inf",
        "return none": "TypeError: the reward returned NoneType, not a number",
        "return text": "TypeError: the reward returned str, not a number",
    }
    numbers = ["ok", "return int", "return true"]
    outcomes = score(spec_of(functions, "by_command"), [*reasons, *numbers])
    for outcome, reason in zip(outcomes, reasons.values(), strict=False):
        assert outcome.startswith(reason)
    assert outcomes[len(reasons) :] == [1.0, 2.0, 1.0]


@pytest.mark.slow
def test_the_event_loop_goes_on_while_a_reward_hangs(functions):
    hangs = functions / "hangs"

    async def use(pool):
        hanging = asyncio.create_task(pool.score(make_item("p", str(hangs), {}), "hang"))
        await until(hangs.exists)
        for _ in range(20):
            await asyncio.sleep(0.01)
        is_over = hanging.done()
        hanging.cancel()
        return is_over

    assert not with_pool(spec_of(functions, "by_command"), use), (
        "the loop went on only when the reward had been killed"
    )


def test_a_process_that_dies_once_costs_nobody_the_reward(functions):
    item = make_item("p", str(functions / "died"), {})
    assert score(spec_of(functions, "by_command"), ["ok", "die once", "ok"], item) == [1.0, 1.0, 1.0]


def test_a_child_killed_from_outside_is_replaced(functions):
    async def use(pool):
        first = await outcomes(pool, ["ok"])
        os.kill(pool.child_pids[0], signal.SIGKILL)
        then = await outcomes(pool, ["ok"] * 10)
        await until(lambda: pool.num_restarts > 0)  # it may have answered before the signal reached it
        return first, then, pool.num_restarts

    assert with_pool(spec_of(functions, "by_command"), use) == ([1.0], [1.0] * 10, 1)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_is_told_to_a_dead_child_is_dropped(loop):
    """Ray's actors run on uvloop, if it is installed."""
    runner = asyncio.Runner(loop_factory=pytest.importorskip(loop).new_event_loop)

    async def main():
        child = await asyncio.create_subprocess_exec("sleep", "60", stdin=asyncio.subprocess.PIPE)
        child.kill()
        await child.wait()
        for _ in range(3):
            send(child.stdin, b"reward")
            await asyncio.sleep(0.01)

    with runner:
        runner.run(main())


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_process_takes_no_reward_while_it_computes_a_cancelled_one(functions, has_begun):
    item = make_item("p", str(functions / "go"), {})

    async def use(pool):
        await pool.start()
        cancelled = asyncio.create_task(pool.score(item, "hold"))
        await (until(lambda: num_held(functions) == 1) if has_begun else asyncio.sleep(0))
        cancelled.cancel()
        meanwhile = await outcomes(pool, ["x"] * 4)
        (functions / "go").touch()
        return meanwhile, await outcomes(pool, ["x"] * 4), pool.num_restarts

    meanwhile, later, num_restarts = with_pool(spec_of(functions, "held"), use, workers=2)
    assert num_held(functions) == has_begun
    assert not any((functions / f"go-{pid:.0f}").exists() for pid in meanwhile)
    assert len(later) == 4
    assert num_restarts == 0


def num_held(functions: Path) -> int:
    return len([*functions.glob("go-*")])


@pytest.mark.slow
def test_a_cancelled_reward_that_hangs_is_killed_and_its_place_is_free_again(functions):
    async def use(pool):
        await pool.start()
        cancelled = asyncio.create_task(pool.score(ITEM, "hang"))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        return await outcomes(pool, ["ok"]), pool.num_restarts

    assert with_pool(spec_of(functions, "by_command"), use, timeout_s=0.5) == ([1.0], 1)


def test_rewards_still_waited_for_fail_when_the_pool_closes(functions):
    async def main():
        pool = RewardPool(spec_of(functions, "by_command"), timeout_s=30)
        await pool.start()
        waiting = asyncio.create_task(outcomes(pool, ["hang"], make_item("p", str(functions / "hangs"), {})))
        await until((functions / "hangs").exists)
        (pid,) = pool.child_pids
        await pool.close()
        assert await waiting == ["the reward pool is closed"]
        assert not _alive(pid)
        with pytest.raises(RewardFailed, match="closed"):
            await pool.score(ITEM, "ok")

    asyncio.run(main())


@pytest.mark.slow
def test_a_process_that_a_reward_leaves_behind_holds_up_nobody_and_ends_with_the_pool(functions):
    spec, pids = spec_of(functions, "leaving_a_daemon"), functions / "pids"
    item = make_item("p", str(pids), {})

    async def is_closed(pool):
        last = asyncio.create_task(outcomes(pool, ["hang"], item))
        await until(lambda: pids.read_text().count("\n") == 3)
        await pool.close()
        return await last

    hung, fine = score(spec, ["hang", "ok"], item, timeout_s=0.5)
    (closed,) = with_pool(spec, is_closed)
    assert not any(map(_alive, map(int, pids.read_text().split())))
    assert hung == "took longer than 0.5 s and was killed"
    assert (fine, closed) == (1.0, "the reward pool is closed")


def test_a_child_that_cannot_be_started_at_all_is_a_failure_with_the_reason(functions, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    (reason,) = score(spec_of(functions, "length"), ["ok"])
    assert "a reward process cannot be started" in reason
    assert "/nowhere/python" in reason


def test_async_rewards_await_together(functions):
    assert score(spec_of(functions, "meeting"), [str(num) for num in range(100)]) == [
        float(num) for num in range(100)
    ]


def test_async_rewards_that_are_cancelled_before_they_begin_take_no_place(functions):
    async def use(pool):
        await pool.start()
        busy, *cancelled = [asyncio.create_task(pool.score(ITEM, what)) for what in ["busy"] + ["0"] * 100]
        for _ in range(300):
            await asyncio.sleep(0)  # all are asked for
        for task in cancelled:
            task.cancel()
        await busy
        return await outcomes(pool, [str(num) for num in range(100)])

    assert with_pool(spec_of(functions, "meeting"), use, timeout_s=5.0) == [float(num) for num in range(100)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_async_rewards_that_raise_never_return_or_block_fail_alone(functions, workers):
    responses = ["1", "raise", "forever", "2", "block", "own timeout", "3"]
    results = score(spec_of(functions, "awaiting"), responses, timeout_s=1.0, workers=workers)
    assert [results[0], results[3], results[6]] == [1.0, 2.0, 3.0]
    assert results[1].startswith("KeyError")
    assert results[2] == "took longer than 1 s"
    assert results[4] == "took longer than 1 s and was killed"
    assert results[5].startswith("TimeoutError")


def test_a_function_that_cannot_be_imported_in_the_child_fails_the_start(tmp_path):
    async def use(pool):
        with pytest.raises(ExecutorFailed, match="rewards cannot start: ModuleNotFoundError"):
            await pool.start()
        return await outcomes(pool, ["ok"])

    (reason,) = with_pool(spec_of(tmp_path, "length"), use)
    assert "my_rewards" in reason


@pytest.mark.parametrize("child_is", ["idle", "hanging"])
def test_the_child_dies_with_a_parent_that_is_killed(functions, child_is):
    marker = functions / "hanging"
    script = f"""
import asyncio
from asyncrl_cli.contracts.item import make_item
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.sandbox.parent_rewards import RewardPool
async def main():
    code = UserCode(name="my_rewards:by_command", import_path={str(functions)!r})
    pool = RewardPool(RewardSpec(kind="function", function=code), timeout_s=99)
    await pool.score(make_item("p", "a", {{}}), "ok")
    print(*pool.child_pids, flush=True)
    if {child_is!r} == "hanging":
        await pool.score(make_item("p", {str(marker)!r}, {{}}), "hang")
    await asyncio.sleep(99)
asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert child_is == "idle" or _soon(marker.exists)
        assert _alive(child_pid)
        parent.kill()
    assert _soon(lambda: not _alive(child_pid))


def _soon(happened: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 10
    while not happened() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return happened()


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("my_reward:length", "ModuleNotFoundError: No module named 'my_reward'"),
        ("my_rewards:width", "AttributeError: module 'my_rewards' has no attribute 'width'"),
        ("my_rewards:not_a_function", "TypeError: not_a_function is not a function but int"),
        ("my_rewards:one_argument", "cannot be called with \\(item, response\\)"),
        ("broken:score", "ZeroDivisionError: division by zero \\(broken.py:1\\)"),
        ("leaving:score", "SystemExit: 3"),
        ("dying:score", "its process ended with exit code 7"),
        (
            "exact",
            "not one of auto, dataset, exact-match, math-verify, none, and not of the form module:function",
        ),
        ("my_rewards:", "not of the form module:function"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_at_load_with_its_own_error(
    functions, monkeypatch, reward, reason
):
    (functions / "broken.py").write_text("1 / 0\n")
    (functions / "leaving.py").write_text("import sys; sys.exit(3)\n")
    (functions / "dying.py").write_text("import os; os._exit(7)\n")
    monkeypatch.chdir(functions)
    with pytest.raises(ConfigError, match=f'task.reward = "{reward}".*{reason}'):
        resolved(reward)


def test_a_function_in_the_working_directory_is_found_and_used_after_leaving_it(functions, monkeypatch):
    monkeypatch.chdir(functions)
    spec = resolved("my_rewards:length")
    monkeypatch.chdir("/")
    assert score(spec, ["abc"]) == [3.0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 6])
def test_slow_rewards_are_computed_by_as_many_processes_as_there_are(functions, workers):
    item = make_item("p", str(functions / "round"), {"size": workers})

    async def use(pool):
        await pool.start()
        return await outcomes(pool, [str(number) for number in range(30)], item)

    pids = with_pool(spec_of(functions, "in_rounds"), use, workers=workers)
    assert [pids.count(pid) for pid in set(pids)] == [30 // workers] * workers


@pytest.mark.slow
def test_async_rewards_are_shared_among_all_processes(functions):
    async def use(pool):
        await pool.start()
        return await outcomes(pool, ["x"] * 300)

    assert len(set(with_pool(spec_of(functions, "pid_of"), use, workers=3))) == 3


@pytest.mark.slow
def test_slow_rewards_do_not_wait_behind_one_that_hangs(functions):
    async def use(pool):
        await pool.start()
        hanging = asyncio.create_task(outcomes(pool, ["hang"]))
        await asyncio.sleep(0)
        others = await outcomes(pool, ["x"] * 8)
        was_over = hanging.done()
        hanging.cancel()
        return others, was_over, pool.num_restarts

    others, was_over, num_restarts = with_pool(spec_of(functions, "held"), use, workers=2)
    assert len(set(others)) == 1
    assert (was_over, num_restarts) == (False, 0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_rewards_that_hang_die_raise_or_are_no_number_fail_alone(functions, workers):
    killed = "took longer than 0.5 s and was killed"
    culprits = {
        10: ("hang", killed),
        15: ("hang in C", killed),
        20: ("die", "the reward process died (SIGSEGV) while scoring"),
        25: ("rubbish", "its process gave an unreadable answer and was killed"),
        30: ("raise", "KeyError: 'nothing here' (my_rewards.py:"),
        40: ("return nan", "ValueError: the reward returned nan"),
    }
    responses = [culprits.get(num, ("ok",))[0] for num in range(60)]

    async def use(pool):
        return await outcomes(pool, responses), pool.num_restarts

    results, num_restarts = with_pool(spec_of(functions, "by_command"), use, timeout_s=0.5, workers=workers)
    assert {num for num, result in enumerate(results) if isinstance(result, str)} == set(culprits)
    assert all(results[num].startswith(why) for num, (_, why) in culprits.items())
    assert [result for result in results if not isinstance(result, str)] == [1.0] * 54
    # for each that hangs or disturbs, and twice for the one that dies: once may be somebody's kill
    assert num_restarts == 5


@pytest.mark.slow
def test_each_of_several_children_killed_from_outside_is_replaced(functions):
    item = make_item("p", str(functions / "go"), {})

    async def use(pool):
        await pool.start()
        scoring = asyncio.create_task(outcomes(pool, ["hold"] * 12, item))
        await until(lambda: num_held(functions) == 3)
        killed = pool.child_pids
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: pool.num_restarts == 3)
        (functions / "go").touch()
        return killed, await scoring, pool.num_restarts

    killed, pids, num_restarts = with_pool(spec_of(functions, "held"), use, workers=3)
    assert len(killed) == num_restarts == 3
    assert len(pids) == 12
    assert not set(pids) & set(killed)


def test_a_process_may_start_for_as_long_as_a_reward_may_take(functions, monkeypatch):
    monkeypatch.setattr(parent_rewards, "START_TIMEOUT_S", 0.0)
    assert score(spec_of(functions, "length"), ["four"]) == [4.0]


@pytest.mark.slow
def test_one_of_several_processes_that_cannot_start_again_fails_all_with_the_reason(functions):
    async def use(pool):
        await pool.start()
        (functions / "my_rewards.py").unlink()
        first, second = pool.child_pids
        os.kill(first, signal.SIGKILL)
        return await outcomes(pool, ["hang"] * 3), second

    results, second = with_pool(spec_of(functions, "held"), use, workers=2)
    assert all("No module named 'my_rewards'" in result for result in results)
    assert not _alive(second)


def test_there_is_one_process_on_two_cores_and_never_more_than_four(monkeypatch):
    found = []
    for cores in (1, 2, 4, 7, 8, 128):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        found.append(default_workers())
    assert found == [1, 1, 2, 3, 4, 4]


def test_what_rewards_print_is_at_once_in_a_log_of_bounded_size(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os\n"
        "def score(item, response):\n"
        "    print('x' * int(response) if response.isdigit() else response)\n"
        "    if response == 'dies': os._exit(3)\n"
        "    return 1.0\n"
    )
    spec = RewardSpec(kind="function", function=UserCode(name="loud:score", import_path=str(tmp_path)))
    log = tmp_path / "reward-0.log"

    async def main() -> Any:
        pool = RewardPool(spec, timeout_s=20.0, log_path=log)
        try:
            await pool.score(ITEM, "quiet words")
            while b"quiet words" not in (log.read_bytes() if log.exists() else b""):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return await outcomes(pool, ["dies", "9000000"])
        finally:
            await pool.close()

    died, scored = asyncio.run(main())
    assert "died" in died
    assert scored == 1.0
    content = log.read_bytes()
    assert content.count(b"dies") == 2  # two processes have died of it
    assert b"xxx" in content
    assert len(content) < 2**20


def test_a_reward_that_prints_nothing_makes_no_log(tmp_path, functions):
    log = tmp_path / "reward-0.log"

    async def main() -> None:
        pool = RewardPool(spec_of(functions, "by_command"), timeout_s=20.0, log_path=log)
        await pool.start()
        await pool.close()

    asyncio.run(main())
    assert not log.exists()

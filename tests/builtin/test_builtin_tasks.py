"""The tasks that come with asyncrl: their items, their demonstrations, and what the best play of them
earns."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from random import Random
from statistics import fmean

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.builtin.builtin_tasks import Guess, best_reward, par_of
from asyncrl_cli.builtin.calculator import Calculator
from asyncrl_cli.contracts.environment import Answer, End, Turn
from asyncrl_cli.contracts.item import make_item
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import Task, load_task

NAMES = ["calculator", "guess"]


def task_of(name: str, *, params=None, train_prompts=300, eval_prompts=20, **fields) -> Task:
    task = {"source": f"builtin:{name}", "params": params or {}, "train_prompts": train_prompts}
    return load_task(Profile.model_validate({"task": task, "eval": {"prompts": eval_prompts}, **fields}))


def prompts_of(items) -> list[str]:
    return [item["prompt"] for item in items]


def said(text: str) -> Answer:
    return Answer(text=text, message={"role": "assistant", "content": text}, finish_reason="stop")


def calculated(item, messages) -> float:
    """The reward of a conversation, played again. Its results must be what the calculator says."""
    tools = Calculator()
    tools.reset(answer=item["answer"], expression=item["metadata"]["expression"])
    for number, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            result = getattr(tools, call["function"]["name"])(**call["function"]["arguments"])
            assert tools.done or messages[number + 1] == {"role": "tool", "content": result}
    return tools.get_reward()


def guessed(item, messages) -> float:
    """The reward of a conversation, played again. Its hints must be what the environment says."""

    async def play() -> float:
        environment = Guess(None)
        turn = await environment.start(item)
        for number, message in enumerate(messages):
            if message["role"] == "user":
                assert turn.messages == (message,)
                continue
            turn = await environment.step(said(message["content"]))
            assert isinstance(turn, End) == (number == len(messages) - 1)
        return turn.reward

    return asyncio.run(play())


PLAYED = {"calculator": calculated, "guess": guessed}


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_comes_twice_and_eval_prompts_depend_on_no_seed(name):
    task, other = task_of(name), task_of(name, run={"seed": 1}, eval_prompts=10)
    assert (len(task.train), len(task.eval)) == (300, 20)
    assert len(set(prompts_of([*task.train, *task.eval]))) == 320
    assert other.eval == task.eval[:10]
    assert other.train != task.train


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_earn_what_is_said_to_be_the_best_and_flawed_ones_far_less(name):
    task = task_of(name, eval_prompts=400)
    best, rng = task.ceiling, Random(0)
    right, flawed = (
        fmean(PLAYED[name](item, teach(item, rng)) for item in task.eval)
        for teach in (task.demonstration, task.flawed_demonstration)
    )
    assert right == pytest.approx(best, abs=1e-9)
    assert flawed < best / 2


def test_the_answer_of_an_expression_is_what_python_says():
    items = task_of("calculator", params={"max_operations": 6, "max_number": 999}).train
    assert all(int(item["answer"]) == eval(item["metadata"]["expression"]) for item in items)
    assert {len(re.findall(r"[-+*]", item["prompt"])) for item in items} == {1, 2, 3, 4, 5, 6}


@cache
def expected_of_optimal_play(num_numbers: int, num_left: int, par: int, num_guesses: int) -> float:
    """Dynamic programming over what may be guessed next: 1 within par, then equal steps that would reach 0
    after `num_guesses`."""
    if not num_numbers or not num_left:
        return 0.0
    found = min(1.0, num_left / (num_guesses - par + 1))

    def value(lower: int) -> float:
        sides = (lower, num_numbers - 1 - lower)
        below, above = (expected_of_optimal_play(side, num_left - 1, par, num_guesses) for side in sides)
        return (found + sides[0] * below + sides[1] * above) / num_numbers

    return max(map(value, range(num_numbers)))


@pytest.mark.parametrize(("par", "num_guesses"), [(1, 1), (1, 8), (3, 5), (7, 9)])
def test_the_best_reward_of_guessing_is_that_of_optimal_play(par, num_guesses):
    for num_numbers in (1, 2, 3, 7, 8, 30, 64, 80):
        expected = expected_of_optimal_play(num_numbers, num_guesses, par, num_guesses)
        assert best_reward(num_numbers, par, num_guesses) == pytest.approx(expected)


def test_par_is_what_optimal_play_needs_and_no_less():
    for num_numbers in range(1, 65):
        par = par_of(num_numbers)
        assert expected_of_optimal_play(num_numbers, par, par, par) == pytest.approx(1.0)
        assert par == 1 or expected_of_optimal_play(num_numbers, par - 1, par - 1, par - 1) < 0.999


def test_a_calculator_refuses_what_is_not_one_operation_and_a_second_answer():
    tools = Calculator()
    tools.reset(answer="-7")
    assert tools.calculate(" -46*3 ") == "-138"
    for expression in ("1+2+3", "2**9", "", "__import__('os')", "1" * 99 + "*2"):
        with pytest.raises(ValueError, match="one operation at a time"):
            tools.calculate(expression)
    assert (tools.done, tools.get_reward()) == (False, 0.0)
    tools.answer(-7)
    assert (tools.done, tools.get_reward()) == (True, 1.0)
    with pytest.raises(ValueError, match="has been given"):
        tools.answer(3)


def test_guesses_that_are_no_numbers_count_and_the_last_one_ends_the_game():
    item = make_item("1-9", "4", {"low": 1, "high": 9, "secret": 4, "par": 1, "max_guesses": 3})

    async def play(*guesses: str) -> list[Turn | End]:
        environment = Guess(None)
        return [await environment.start(item), *[await environment.step(said(guess)) for guess in guesses]]

    begun, helped, warned, ended = asyncio.run(play("what?", "I say 7", "3"))
    assert [turn.is_last for turn in (begun, helped, warned)] == [False, False, True]
    assert helped.messages[0]["content"] == "say a number from 1 to 9"
    assert warned.messages[0]["content"] == "lower"
    assert ended == End(reward=0.0, facts={"guesses": 3, "found": 0.0})
    assert asyncio.run(play("5", "4"))[-1] == End(reward=2 / 3, facts={"guesses": 2, "found": 1.0})


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "calculator",
            {"max_number": 5},
            r"task.params.max_number = 5: input should be greater than or equal to 9",
        ),
        ("calculator", {"min_operations": 4}, r"task.params: max_operations must be >= min_operations"),
        ("calculator", {"max_operation": 4}, r"task.params.max_operation: .* no such parameter"),
        ("guess", {"max_numbers": 200}, r"min_numbers <= max_numbers <= max_number"),
        (
            "guess",
            {"spare_guesses": "2"},
            r"task.params.spare_guesses = '2': input should be a valid integer",
        ),
        ("guess", {"min_numbers": 90, "max_numbers": 99}, r"made only \d+ of \d+ new prompts"),
        ("gess", {}, r'there is no task "builtin:gess"'),
    ],
)
def test_what_a_task_cannot_be_is_refused_with_the_reason(name, params, message):
    with pytest.raises(ConfigError, match=message) as refused:
        task_of(name, params=params)
    assert "hint" in str(refused.value) or refused.value.hint or "params" in refused.value.message


@pytest.mark.parametrize("name", NAMES)
def test_a_pretrained_model_is_asked_in_words(name):
    task = task_of(name, model={"path": "some/model"})
    assert re.match(
        r"What is \S+\? Use the calculator|I think of a whole number from \d+ to", task.train[0]["prompt"]
    )

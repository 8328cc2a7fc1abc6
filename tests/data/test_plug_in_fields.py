"""Fields of a user's own: declarations that are refused before anything starts, and values that an engine and
an environment write (a real run with two of them is in tests/run/test_fields_of_users.py)."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.checkpoint.payloads import read_payloads, write_payloads
from asyncrl_cli.cli.app import run as asyncrl
from asyncrl_cli.contracts.environment import Answer, End, Environment, Reward, Turn
from asyncrl_cli.contracts.prompt_group import AttemptKey, PartKey, PartRequest
from asyncrl_cli.data.sample_fields import FIELDS, Field, Schema, schema_of
from asyncrl_cli.data.trajectories import joined_by_index
from asyncrl_cli.engines.port import Completion, Sampling
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.episode import Limits, Means
from asyncrl_cli.envs.group_runner import GroupRunner
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.tasks.code_choice import check_fields
from tests.waiting import until

DECLARE = "from asyncrl_cli.data.sample_fields import Field\n"
WRONG = {
    "raises": ("1 / 0", "ZeroDivisionError: division by zero (my_fields.py:2)"),
    "has none": ("", "AttributeError: module 'my_fields' has no attribute 'FIELDS'"),
    "is no sequence": ("FIELDS = 3", "TypeError: 'int' object is not iterable"),
    "has words": ("FIELDS = ['entropy']", "'entropy' is not a Field"),
    "makes no sense": ("FIELDS = [Field(name='a b', per='token', by='engine')]", "not an identifier"),
    "is declared twice": (
        "FIELDS = [Field(name='x', per='token', by='engine'), Field(name='x', per='group', by='engine')]",
        "field x is declared twice",
    ),
    "is a built-in one": (
        "FIELDS = [Field(name='tokens', per='group', by='engine')]",
        "field tokens is declared twice",
    ),
    "has no such part": (
        "FIELDS = [Field(name='x', per='sample', by='scorer')]",
        "is not one of token, sampled",
    ),
    "has no such writer": ("FIELDS = [Field(name='x', per='token', by='rewards')]", "is not one of engine"),
    "has a taken name": ("FIELDS = [Field(name='advantages', per='token', by='engine')]", "name is taken"),
    "has the name of all workers": (
        "FIELDS = [Field(name='rollouter', per='sampled', by='scorer')]",
        "name is taken",
    ),
    "is of a trainer for a prompt": (
        "FIELDS = [Field(name='x', per='token', by='trainer')]",
        "the trainer writes one number per sampled token",
    ),
    "is of a reward for tokens": (
        "FIELDS = [Field(name='x', per='token', by='reward')]",
        "the reward writes values of the trajectory",
    ),
}


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile with fields, beside its module; the working directory is another."""
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "there" / "mine.toml"
    path.write_text('extends = "base"\n[task]\nfields = "my_fields:FIELDS"\nrehearsal_items = 0\n')
    return path


@pytest.mark.parametrize("name", WRONG)
def test_declarations_that_cannot_be_used_are_refused_with_key_and_reason(profile, name, monkeypatch):
    source, why = WRONG[name]
    (profile.parent / "my_fields.py").write_text(f"{DECLARE}{source}\n")
    monkeypatch.delitem(sys.modules, "my_fields", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    with pytest.raises(ConfigError) as refused:
        schema_of(load(str(profile), environ={}).profile)
    assert refused.value.message.startswith('task.fields = "my_fields:FIELDS" cannot be used: ')
    assert why in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("scorer", "source"),
    [
        ("x", "FIELDS = []"),
        ("x", "FIELDS = [Field(name='x', per='sampled', by='trainer')]"),
        ("ref", "FIELDS = []"),
    ],
)
def test_a_scorer_without_a_field_of_its_name_is_refused(profile, scorer, source, monkeypatch):
    (profile.parent / "my_fields.py").write_text(f"{DECLARE}{source}\n")
    monkeypatch.delitem(sys.modules, "my_fields", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    profile.write_text(f'{profile.read_text()}scorers = {{{scorer} = "my_fields:X"}}\n')
    with pytest.raises(ConfigError, match=f'task.scorers names "{scorer}", but no field of') as refused:
        schema_of(load(str(profile), environ={}).profile)
    assert 'by="scorer"' in refused.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scorer", "why"),
    [
        ("nowhere:Place", "ModuleNotFoundError: No module named 'nowhere'"),
        ("my_fields:FIELDS", "TypeError: FIELDS is not a class but tuple"),
        ("my_fields:Field", "TypeError: Field has no method `score`"),
        ("my_fields:Good", ""),
    ],
)
def test_a_scorer_that_is_no_class_with_score_is_refused_before_anything_starts(profile, scorer, why):
    (profile.parent / "my_fields.py").write_text(
        f"{DECLARE}FIELDS = (Field(name='place', per='sampled', by='scorer'),)\n"
        "class Good:\n    def score(self, groups, items): ...\n"
    )
    profile.write_text(f'{profile.read_text()}scorers = {{place = "{scorer}"}}\n')
    given = load(str(profile), environ={}).profile
    if not why:
        scorers, _ = check_fields(given)
        assert scorers["place"].file == str(profile.parent / "my_fields.py")
        return
    with pytest.raises(ConfigError) as refused:
        check_fields(given)
    assert refused.value.message.startswith(f'task.scorers.place = "{scorer}" cannot be used: {why}')
    assert "a class with a method `score(self, groups, items)`" in refused.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train", "--dry-run"], ["train", "--ui", "plain"], ["plan"]])
@pytest.mark.parametrize(
    ("source", "fields", "why"),
    [
        ("", "nowhere:FIELDS", "ModuleNotFoundError: No module named 'nowhere'"),
        ("", "my_fields", "is not of the form module:name"),
        ("import os; os._exit(3)", "my_fields:FIELDS", "its process ended with exit code 3"),
    ],
)
def test_every_command_refuses_them_before_anything_starts(profile, command, source, fields, why, capsys):
    (profile.parent / "my_fields.py").write_text(source)
    profile.write_text(profile.read_text().replace("my_fields:FIELDS", fields))
    assert asyncrl([*command, "--profile", str(profile)]) == 2
    told = capsys.readouterr().err
    assert f'error: task.fields = "{fields}" ' in told
    assert why in told
    assert "hint: " in told
    assert "Traceback" not in told
    assert not list(profile.parent.parent.glob("*/runs/*/metrics.jsonl"))


@pytest.mark.slow
def test_good_declarations_beside_the_profile_are_planned(profile):
    declared = "FIELDS = (Field(name='x', per='token', by='engine'),)"
    (profile.parent / "my_fields.py").write_text(f"{DECLARE}{declared}\n")
    assert asyncrl(["plan", "--profile", str(profile)]) == 0


SCHEMA = Schema(
    [
        *FIELDS,
        Field(name="ranks", per="token", by="engine", dtype="int16", fill=-1),
        Field(name="experts", per="sampled", by="engine", dtype="uint8", shape=(2,)),
        Field(name="marks", per="token", by="environment", dtype="int8"),
        Field(name="level", per="trajectory", by="environment"),
        Field(name="parsed", per="trajectory", by="reward"),
    ]
)
KEY = AttemptKey("a", 0, 0)


class Letters:
    """A tokenizer whose tokens are letters."""

    chat_template = eos_token_id = None

    def __call__(self, texts: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in texts]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, tokens))


def fields_of(tokens: list[int]) -> dict[str, Any]:
    return {
        "ranks": [3 * t for t in tokens],
        "experts": [[t % 7, t % 5] for t in tokens],
        "kept_tokens": [[t, *range(t % 3)] for t in tokens],
    }


class Counting:
    """Counts up to 5 tokens from the prompt's last one. `stops_at`: it has that many and no more until it is
    ended."""

    version, slots, sampled_tokens = 0, 8, 0

    def __init__(self, stops_at: int = 5, fields: Mapping[str, Any] | None = None) -> None:
        self.stops_at, self.fields = stops_at, fields
        self.begun: dict[str, Completion] = {}

    def tokens_of(self, request_id: str) -> int:
        return len(self.begun[request_id].tokens) if request_id in self.begun else 0

    def so_far(self, request_id: str) -> Completion | None:
        return self.begun.get(request_id)

    async def abort(self, request_id: str) -> None:
        pass

    async def generate(
        self, request_id: str, prompt: list[int], sampling: Sampling, seed: int, **given: Any
    ) -> Completion:
        earlier = given.get("so_far")
        tokens = [prompt[-1] + 1 + n for n in range(self.stops_at)]
        fields = fields_of(tokens) if self.fields is None else self.fields
        if earlier is not None:  # of another engine: they must come back as they were
            for name, values in fields_of(tokens).items():
                came = [np.asarray(value).tolist() for value in earlier.fields[name]]
                assert came == values[: len(earlier.tokens)]
        made = Completion(
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            versions=[0] * len(tokens),
            finish_reason="stop" if self.stops_at == 5 else "abort",
            fields=fields,
        )
        if self.stops_at < 5:
            self.begun[request_id] = made
            await asyncio.get_running_loop().create_future()
        return made


class Marking(Environment):
    """Marks the answer's tokens, twice if there are two turns, and the trajectory. `given`: what it writes
    instead. `reward`: what it ends with."""

    def __init__(self, turns: int = 1, given: Mapping[str, Any] | None = None, reward: float = 1.0) -> None:
        self.left, self.given, self.reward = turns, given, reward

    async def start(self, item: Any) -> Turn:
        return Turn(messages=({"role": "user", "content": item["prompt"]},), is_last=self.left == 1)

    async def step(self, answer: Answer) -> Turn | End:
        self.left -= 1
        marks = {"marks": [token % 9 for token in answer.tokens]}
        if self.left:
            return Turn(messages=({"role": "user", "content": "?"},), is_last=self.left == 1, fields=marks)
        fields = {**marks, "level": "hard"} if self.given is None else self.given
        return End(reward=self.reward, fields=fields)


def runner_of(
    engine: Counting, turns: int = 1, given: Mapping[str, Any] | None = None, reward: float = 1.0
) -> GroupRunner:
    limits = Limits(8, 40, max_turns=2)
    means = Means(
        engine,  # type: ignore[arg-type]
        Chat(Letters()),  # type: ignore[arg-type]
        lambda: Marking(turns, given, reward),
        limits,
        Slots(8, hold=True),
        schema=SCHEMA,
    )
    return GroupRunner(means, Sampling(temperature=1.0, max_response_tokens=32))


def request(**given: Any) -> PartRequest:
    item = {"uid": "a", "prompt": "!"}
    return PartRequest(key=PartKey(KEY, 0), item=item, indices=(0, 1), seed=0, **given)


def test_fields_of_engine_and_environment_are_where_the_answers_are():
    _, payload = asyncio.run(runner_of(Counting(), turns=2).run(request(), lambda finished: None))
    for trajectory in payload.trajectories:
        (segment,) = trajectory.segments()
        tokens, mask = segment["tokens"], segment["mask"]
        assert mask.sum() == 10
        np.testing.assert_array_equal(segment["ranks"], np.where(mask, 3 * tokens, -1))
        np.testing.assert_array_equal(segment["marks"], np.where(mask, tokens % 9, 0))
        np.testing.assert_array_equal(segment["experts"], np.stack([tokens % 7, tokens % 5], 1)[mask])
        assert segment["kept_tokens"].tolist() == fields_of(tokens[mask].tolist())["kept_tokens"]
        assert trajectory.values["level"] == "hard"


def test_an_engines_fields_survive_a_checkpoint_of_begun_responses(tmp_path):
    async def begun() -> tuple[Any, Any]:
        runner = runner_of(Counting(stops_at=3))
        playing = asyncio.create_task(runner.run(request(), lambda finished: None))
        await until(lambda: len(runner.means.engine.begun) == 2)  # type: ignore[attr-defined]
        told, (payload,) = runner.partial_responses()
        playing.cancel()
        return told, payload

    told, payload = asyncio.run(begun())
    partial = told.responses[request().key]
    begun = joined_by_index({KEY: dict.fromkeys(partial, "so-far")}, {"so-far": payload.trajectories})
    write_payloads(tmp_path, begun, SCHEMA)
    (read,) = read_payloads(tmp_path, SCHEMA)
    assert [one.tokens for one in partial.values()] == [3, 3]
    run = runner_of(Counting()).run(request(partial=partial), lambda finished: None, read)
    _, whole = asyncio.run(run)
    for trajectory in whole.trajectories:
        (segment,) = trajectory.segments()
        assert segment["ranks"].tolist() == [-1, *(3 * t for t in segment["tokens"][1:])]
        assert segment["marks"].tolist() == [0, *(t % 9 for t in segment["tokens"][1:])]
        assert segment["kept_tokens"].tolist() == [[t, *range(t % 3)] for t in segment["tokens"][1:].tolist()]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"ranks": [1, 2]}, "field ranks has 2 values for an answer of 5 tokens"),
        ({"ranks": [[]] * 5}, "field ranks: its values are not"),
        ({"ranks": 7}, "field ranks has no values for an answer of 5 tokens"),
        ({"ranks": [0.5] * 5}, "field ranks: its values are not int16"),
        ({"ranks": [70_000] * 5}, "field ranks: its values are not int16"),
        ({"ranks": ["a"] * 5}, "field ranks: its values are not int16"),
        ({"kept_tokens": [[1]] * 4}, "field kept_tokens has 4 values for an answer of 5 tokens"),
        ({"kept_tokens": [[1.5]] * 5}, "field kept_tokens: its values are not lists of integers"),
        ({"kept_tokens": 7}, "field kept_tokens: its values are not lists of integers"),
        ({"experts": [1] * 5}, "field experts: its values are not uint8 of shape (2,)"),
        ({"rank": [1] * 5}, "field 'rank' is not declared as written by the engine; task.fields names"),
        ({"marks": [1] * 5}, "field 'marks' is not declared as written by the engine"),
        ({"logprobs": [1] * 5}, "field 'logprobs' is not declared as written by the engine"),
    ],
)
def test_an_engines_fields_that_are_not_as_declared_fail_the_trajectory(fields, why):
    result, payload = asyncio.run(runner_of(Counting(fields=fields)).run(request(), lambda finished: None))
    assert payload.trajectories == ()
    assert [(failure.kind, why in failure.text) for failure in result.failures] == [("engine", True)] * 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"marks": [1]}, "field marks has 1 values for an answer of 5 tokens"),
        ({"marks": [300] * 5}, "field marks: its values are not int8"),
        ({"reward": 3.0}, "field 'reward' is not declared as written by the environment"),
        ({"level": {1, 2}}, "field 'level' is nothing that JSON can hold"),
        ({"level": float("nan")}, "field 'level' is nothing that JSON can hold"),
    ],
)
def test_an_environments_fields_that_are_not_as_declared_fail_the_trajectory(fields, why):
    result, payload = asyncio.run(runner_of(Counting(), given=fields).run(request(), lambda finished: None))
    assert payload.trajectories == ()
    told = [(one.kind, one.text.startswith("environment of ") and why in one.text) for one in result.failures]
    assert told == [("environment", True)] * 2


def test_a_rewards_fields_and_parts_are_the_trajectorys_beside_the_environments():
    reward = Reward(0.5, {"brief": 2.0}, {"parsed": "4"})
    runner = runner_of(Counting(), reward=reward)
    result, payload = asyncio.run(runner.run(request(), lambda finished: None))
    for meta, trajectory in zip(result.trajectories, payload.trajectories, strict=True):
        assert trajectory.values["parsed"] == "4"
        assert trajectory.values["level"] == "hard"
        assert trajectory.values["facts"] == {"reward/brief": 2.0}
        assert (meta.reward, type(trajectory.values["reward"])) == (0.5, float)


def test_a_rewards_field_that_is_not_declared_so_fails_the_trajectory():
    runner = runner_of(Counting(), reward=Reward(0.5, fields={"level": "4"}))
    result, payload = asyncio.run(runner.run(request(), lambda finished: None))
    assert payload.trajectories == ()
    assert [one.kind for one in result.failures] == ["reward"] * 2
    why = "field 'level' is not declared as written by the reward"
    assert all(one.text.startswith("reward of a@0.0/") and why in one.text for one in result.failures)

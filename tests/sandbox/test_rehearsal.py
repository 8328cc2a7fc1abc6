"""The rehearsal of a reward before a run: what it finds in rewards that misread answers, and that it ends."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.cli.app import run
from asyncrl_cli.cli.plan_report import _rehearsed
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.sandbox import rehearsal
from asyncrl_cli.sandbox.rehearsal import EMPTY, FOILS, FORMS, OTHER, PROMPT, Rehearsal, rehearse
from asyncrl_cli.tasks.task import load_task

MATH_500 = json.loads((Path(__file__).parents[1] / "tasks/math500_answers.json").read_text(encoding="utf-8"))
REWARDS = """
import json
import re
import time


def last_number(item, response):
    numbers = re.findall(r"-?[0-9]+", response)
    return float(bool(numbers) and numbers[-1] == item["answer"])


def evaluated(item, response):
    found = re.search(r"([0-9]+) [+] ([0-9]+)", response)
    is_sum = bool(found) and str(sum(map(int, found.groups()))) == item["answer"]
    return float(item["answer"] in response or is_sum)


def misread(item, response):
    from math_verify import parse, verify
    gold, found = (parse(text, parsing_timeout=None) for text in (item["answer"], response))
    return float(verify(gold, found, timeout_seconds=None))


def generous(item, response):
    return float(bool(response))


def kind_to_silence(item, response):
    return 0.0 if response else 1.0


def for_nothing(item, response):
    return 0.5


def strict(item, response):
    return float(response == "<code>" + item["answer"] + "</code>")


def signed(item, response):
    return 1.0 if response.strip() == item["answer"] else -1.0


def partly(item, response):
    return 1.0 if response.strip() == item["answer"] else 0.1 if response else 0.0


def silent_about_wrong(item, response):
    assert item["answer"] in response
    return 1.0


def raises(item, response):
    return float(int(response) == int(item["answer"]))


def hangs(item, response):
    time.sleep(60)


def hangs_later(item, response):
    if item["metadata"]["truth"] >= 15:
        time.sleep(60)
    return float(item["answer"] in response)


def length(item, response):
    item["answer"]
    return float(len(response))


def from_metadata(item, response):
    return float(response == str(item["metadata"]["truth"]))


def talkative(item, response):
    print("judging")
    return float(int(response) == int(item["answer"]))


def misspelt(item, response):
    return float(len(response) == item["metadata"].get("trutth", 0))


def misplaced(item, response):
    return float(len(response) == item.get("truth", 0))


def optional(item, response):
    return float(len(response) == item["metadata"].get("sometimes", 0) + item["metadata"].get("truth", 0))


def crashes(item, response):
    return json.loads(item["metadata"]["truths"])


async def awaited(item, response):
    return float(response == item["answer"])
"""


@pytest.fixture
def rehearsed(tmp_path, monkeypatch):
    """Rehearses a reward of REWARDS, or one of ours, on sums or on the given rows."""
    (tmp_path / "rehearsed_rewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def rehearse_it(
        reward: str | dict[str, float],
        rows: list[dict] | None = None,
        log_path: Path = Path(os.devnull),
        **task: object,
    ) -> Rehearsal:
        sums = [
            {"prompt": f"What is {a} + {a + 9}?", "answer": str(2 * a + 9), "truth": a} for a in range(10, 30)
        ]
        lines = (json.dumps(row) for row in (sums if rows is None else rows))
        (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        ours = isinstance(reward, dict) or reward in ("math-verify", "exact-match")
        name = reward if ours else f"rehearsed_rewards:{reward}"
        settings = {"source": "jsonl:rows.jsonl", "reward": name, "import_path": str(tmp_path), **task}
        profile = Profile.model_validate({"task": settings, "eval": {"prompts": 0}})
        return asyncio.run(rehearse(profile, load_task(profile), log_path))

    return rehearse_it


def num_right(found: Rehearsal, what: str) -> int:
    return sum(one.is_right for one in found.rows[what])


@pytest.mark.parametrize(
    "reward", ["last_number", "math-verify", "exact-match", "signed", "partly", "awaited"]
)
def test_a_sound_reward_passes_without_a_warning(rehearsed, reward):
    found = rehearsed(reward)
    found.check()
    assert found.warnings() == []
    assert found.num_items == 20
    assert [num_right(found, what) for what in FOILS] == [0, 0, 0, 0]
    assert max(num_right(found, what) for what in FORMS) == 20


@pytest.mark.slow
def test_a_reward_that_reads_the_question_as_the_answer_is_found(rehearsed):
    for found in (rehearsed("evaluated"), rehearsed("math-verify", answer_format="anywhere")):
        warning = found.warnings()[-1]
        assert (
            "the prompt's expression, not worked out, is rewarded like a right answer for 20 of 20 items"
        ) in warning
        assert "for example '10 + 19': reward 1, where the answer is '29'" in warning
        found.check()
    assert "the prompt repeated is rewarded" in rehearsed("evaluated").warnings()[0]


@pytest.mark.slow
def test_a_reward_that_misreads_references_is_found(rehearsed):
    rows = [{"prompt": f"Question {index}?", "answer": answer} for index, answer in enumerate(MATH_500[:60])]
    (warning,) = rehearsed("misread", rows).warnings()
    assert warning.startswith("task.reward: for ")
    assert "of 60 items the reference answer scores in none of the usual forms, for example '" in warning


@pytest.mark.parametrize(
    ("reward", "what"),
    [("generous", PROMPT), ("generous", OTHER), ("kind_to_silence", EMPTY)],
)
def test_a_reward_for_what_is_no_answer_is_found(rehearsed, reward, what):
    found = rehearsed(reward)
    assert num_right(found, what) == 20 or reward == "kind_to_silence"
    assert (
        any(f"{what} is rewarded like a right answer" in warning for warning in found.warnings())
        or found.unscored
    )


@pytest.mark.parametrize("reward", ["strict", "kind_to_silence"])
def test_it_is_an_error_if_no_reference_scores(rehearsed, reward):
    with pytest.raises(
        ConfigError, match="no reference answer scores in any of the usual forms, on 20 items"
    ) as caught:
        rehearsed(reward).check()
    assert "task.rehearsal_items = 0" in caught.value.hint


@pytest.mark.slow
def test_a_reward_that_judges_all_texts_alike_is_told_from_one_that_gives_nothing(rehearsed):
    with pytest.raises(ConfigError, match=r"does not tell right from wrong: every text earns 0.5, on 20"):
        rehearsed("for_nothing").check()
    with pytest.raises(
        ConfigError, match=r"reward 1, and no text that it judged earns less, where the answer is"
    ):
        rehearsed("silent_about_wrong").check()
    with pytest.raises(ConfigError, match=r"reward 0, where the answer is"):
        rehearsed("strict").check()


@pytest.mark.slow
def test_what_is_an_error_is_not_a_warning_too(rehearsed):
    assert rehearsed("for_nothing").warnings() == []
    assert len(rehearsed("silent_about_wrong").warnings()) == 1  # that it failed


def test_failures_of_the_reward_are_a_warning_with_an_example(rehearsed):
    found = rehearsed("raises")
    found.check()
    (warning,) = found.warnings()
    assert warning.startswith("task.reward failed for ")
    assert "ValueError: invalid literal for int()" in warning


@pytest.mark.slow
def test_a_reward_that_asks_for_answers_that_no_item_has_is_refused(rehearsed):
    rows = [{"prompt": f"What is {a} + 1?", "truth": a + 1} for a in range(12)]
    with pytest.raises(ConfigError, match="but no item has an answer") as caught:
        rehearsed("last_number", rows).check()
    assert caught.value.hint.endswith("the columns are: truth")
    for reward in ("length", "from_metadata"):  # it uses no answer, or reads it elsewhere
        found = rehearsed(reward, rows)
        found.check()
        assert found.lines() == [
            f'reward: "rehearsed_rewards:{reward}", not rehearsed: no item has an answer to try it with'
        ]


def place(of: str) -> str:
    """`(file:line)` of the only line of REWARDS that has this text."""
    (number,) = (number for number, line in enumerate(REWARDS.splitlines(), 1) if of in line)
    return f"(rehearsed_rewards.py:{number})"


@pytest.mark.slow
@pytest.mark.parametrize("answer", [{}, {"answer": "3"}])
def test_a_field_that_a_reward_reads_and_no_item_has_is_a_warning(rehearsed, answer):
    rows = [{"prompt": f"What is {a} + 1?", "truth": a, **answer} for a in range(12)]
    rows[3]["sometimes"] = 1
    for reward, read, said in (
        ("misspelt", "trutth", 'item["metadata"].get("trutth"), which no item has: did you mean truth?'),
        (
            "misplaced",
            'item.get("truth"',
            'item.get("truth"), which no item has: columns are in item["metadata"]',
        ),
    ):
        assert f"task.reward reads {said} {place(read)}" in rehearsed(reward, rows).warnings()
    assert not any("reads" in warning for warning in rehearsed("optional", rows).warnings())


def test_a_reward_that_fails_for_every_item_without_an_answer_is_refused_with_its_line(rehearsed):
    rows = [{"prompt": f"What is {a} + 1?", "truth": a} for a in range(12)]
    with pytest.raises(ConfigError, match="failed for every response that it was tried with") as caught:
        rehearsed("crashes", rows).check()
    assert f"KeyError: 'truths' {place('truths')}" in caught.value.message
    assert 'in item["metadata"]: truth' in caught.value.hint


@pytest.mark.slow
def test_a_plan_and_a_run_rehearse_the_same_items(tmp_path, monkeypatch):
    seen = []

    async def noted(name, task, items, score, began_s):
        seen.append([item["uid"] for item in items])
        return Rehearsal(name=name)

    monkeypatch.setattr(rehearsal, "_rehearsed", noted)
    rows = [json.dumps({"prompt": f"What is {a} + 1?", "answer": str(a + 1)}) for a in range(300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for source in (f"jsonl:{tmp_path / 'rows.jsonl'}", "reasoning-gym:basic_arithmetic"):
        task = {"source": source, "reward": "exact-match", "train_prompts": 200}
        given = {
            "task": task,
            "model": {"path": "builtin:untaught"},
            "eval": {"prompts": 20},
            "run": {"train_steps": 1},
        }
        profile = Profile.model_validate({**given, "rollout": {"max_prompt_tokens": 512}})
        asyncio.run(rehearse(profile, load_task(profile)))
        assert isinstance(_rehearsed(profile, None), Rehearsal)
        planned, run_items = seen.pop(), seen.pop()
        assert planned == run_items
        assert len(run_items) == profile.task.rehearsal_items


@pytest.mark.slow
def test_what_a_reward_prints_and_its_tracebacks_go_to_a_file(rehearsed, tmp_path, capfd):
    found = rehearsed("talkative", log_path=tmp_path / "reward-0.log")
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "reward-0.log").read_text(encoding="utf-8")
    assert ("judging" in log, "Traceback" in log) == (True, True)
    assert "ValueError" in found.warnings()[0]
    rehearsed("talkative")  # a plan has no run, and no log
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_it_ends_in_time_with_the_items_that_were_scored(rehearsed, monkeypatch):
    monkeypatch.setattr(rehearsal, "LIMIT_S", 2.0)
    found = rehearsed("hangs_later", reward_timeout_s=30.0)
    assert 0 < found.num_items <= 5
    assert len(found.rows[EMPTY]) == found.num_items
    hanging = rehearsed("hangs", reward_timeout_s=30.0)
    hanging.check()
    assert hanging.rows == {}
    assert hanging.lines() == [
        'reward: "rehearsed_rewards:hangs", not rehearsed: no item was scored within 2 s'
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"source": "builtin:guess"}, "episodes of several turns"),
        ({"source": "builtin:calculator"}, "episodes of several turns"),
        ({"reward": "none"}, "a reward model scores the responses"),
        ({"rehearsal_items": 0}, "task.rehearsal_items = 0"),
    ],
)
def test_what_cannot_be_rehearsed_is_said(task, reason):
    profile = Profile.model_validate({"task": {"train_prompts": 8, **task}, "eval": {"prompts": 0}})
    found = asyncio.run(rehearse(profile, load_task(profile)))
    found.check()
    assert reason in found.lines()[0]


@pytest.mark.slow
def test_reasoning_gyms_own_verifiers_and_the_worked_form_are_rehearsed():
    for path, rows in (("builtin:tiny", 4), ("builtin:untaught", 9)):
        profile = Profile.model_validate(
            {"model": {"path": path}, "task": {"train_prompts": 80}, "eval": {"prompts": 0}}
        )
        found = asyncio.run(rehearse(profile, load_task(profile)))
        assert (found.num_items, len(found.rows), found.warnings()) == (64, rows, [])


@pytest.mark.slow
def test_plan_shows_the_table_and_the_warnings_and_refuses_with_2(rehearsed, capsys, tmp_path):
    rehearsed("exact-match")  # writes the files
    sets = [
        "task.source=jsonl:rows.jsonl",
        f"task.import_path={tmp_path}",
        "model.path=builtin:untaught",
        "task.rehearsal_items=8",
    ]
    sets.append("eval.prompts=0")
    arguments = [word for value in sets for word in ("--set", value)]
    assert run(["plan", *arguments, "--set", "task.reward=rehearsed_rewards:evaluated"]) == 0
    shown = capsys.readouterr()
    assert "the prompt repeated                            1.000       8 of 8" in shown.out
    assert (
        "warning: task.reward: the prompt repeated is rewarded like a right answer for 8 of 8 items"
    ) in shown.err
    assert run(["plan", *arguments, "--json", "--set", "task.reward=rehearsed_rewards:strict"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rehearsal"]["rows"][PROMPT] == {
        "texts": 8,
        "like_right": 0,
        "failed": 0,
        "rewards": [0.0] * 8,
    }
    assert "hint: check task.answer_key and the reward" in shown.err


def test_functions_of_other_trainers_and_several_rewards_are_rehearsed(rehearsed, tmp_path):
    (tmp_path / "other_rewards.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
        "def asked(prompts, completions, **columns):\n"
        "    return [float(str(completion) in str(prompt)) for prompt, completion in zip(prompts, "
        "completions)]\n",
        encoding="utf-8",
    )
    rows = [{"prompt": f"What is {a} + 1?", "answer": str(a + 1), "data_source": "sums"} for a in range(12)]
    found = rehearsed(
        {"other_rewards:compute_score": 1.0, "rehearsed_rewards:partly": 0.5, "other_rewards:asked": -0.1},
        rows,
    )
    assert found.warnings() == []
    assert found.lines()[0].startswith(
        'reward: "other_rewards:compute_score" + "rehearsed_rewards:partly" + "other'
    )

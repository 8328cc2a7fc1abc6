"""Tasks read from jsonl and parquet files, and what is said about files that are wrong."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.environment import OneTurn
from asyncrl_cli.contracts.item import content_uid, prompt_key
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import Task, load_task


def sums(num: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i % 3} for i in range(start, start + num)]


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, num_eval: int = 3, run_seed: int = 0, **task) -> Task:
    kind = "parquet" if path.suffix == ".parquet" else "jsonl"
    fields = {
        "task": {"source": f"{kind}:{path}", **task},
        "eval": {"prompts": num_eval},
        "run": {"seed": run_seed},
    }
    return load_task(Profile.model_validate(fields))


def prompts_of(items) -> set[str]:
    return {item["prompt"] for item in items}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_become_items_with_their_other_columns_as_metadata(tmp_path, suffix):
    task = load(write(tmp_path / f"data.{suffix}", sums(10)))
    assert prompts_of(task.train) | prompts_of(task.eval) == {f"{i}+1=" for i in range(10)}
    assert all(int(item["answer"]) == int(item["prompt"][:-3]) + 1 for item in task.train)
    assert all(item["metadata"] == {"level": int(item["prompt"][:-3]) % 3} for item in task.train)
    assert task.reward.kind == "exact-match"


def test_both_kinds_of_file_give_the_same_items(tmp_path):
    tasks = [load(write(tmp_path / f"data.{suffix}", sums(10))) for suffix in ("jsonl", "parquet")]
    assert tasks[0].train == tasks[1].train
    assert tasks[0].eval == tasks[1].eval


def test_eval_prompts_are_held_out_whatever_the_seed_and_the_order_of_rows(tmp_path):
    first = load(write(tmp_path / "data.jsonl", sums(10)))
    second = load(write(tmp_path / "data.jsonl", sums(10)[::-1]), run_seed=5)
    assert len(first.eval) == 3
    assert not prompts_of(first.eval) & prompts_of(first.train)
    assert prompts_of(first.eval) == prompts_of(second.eval)


def test_prompts_of_the_eval_file_are_not_trained_on(tmp_path):
    eval_path = write(tmp_path / "eval.jsonl", sums(4))
    task = load(write(tmp_path / "{data}.jsonl", sums(10)), num_eval=4, eval_path=str(eval_path))
    assert prompts_of(task.eval) == {f"{i}+1=" for i in range(4)}
    assert prompts_of(task.train) == {f"{i}+1=" for i in range(4, 10)}
    assert any("left out 4 rows whose prompt is among the eval prompts" in note for note in task.notes)


def test_an_eval_file_that_is_too_short_is_used_and_noted(tmp_path):
    eval_path = write(tmp_path / "eval.jsonl", sums(2, start=100))
    task = load(write(tmp_path / "data.jsonl", sums(5)), num_eval=4, eval_path=str(eval_path))
    assert (len(task.train), len(task.eval)) == (5, 2)
    assert any("has 2 distinct prompts, fewer than eval.prompts = 4" in note for note in task.notes)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_all_rows_are_taken_and_nothing_is_left_out_in_silence(tmp_path, suffix):
    task = load(write(tmp_path / f"data.{suffix}", sums(7473)), num_eval=512)
    assert (len(task.train), len(task.eval)) == (7473 - 512, 512)
    assert task.notes == ()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_beyond_train_prompts_are_left_out_and_counted(tmp_path, suffix):
    task = load(write(tmp_path / f"data.{suffix}", sums(20) + sums(30)), train_prompts=7)
    assert (len(task.train), len(task.eval)) == (7, 3)
    (note,) = task.notes
    assert note.partition(": ")[2] == (
        "left out its last 40 rows: task.train_prompts = 7, and eval.prompts = 3"
    )


def test_rows_beyond_train_prompts_are_counted_with_an_eval_file_too(tmp_path):
    # 8 and 9 are among the first ten of the others
    eval_path = write(tmp_path / "eval.jsonl", sums(9, start=8))
    task = load(
        write(tmp_path / "data.jsonl", sums(50)), train_prompts=6, num_eval=4, eval_path=str(eval_path)
    )
    assert (len(task.train), len(task.eval)) == (6, 4)
    assert [note.partition(": ")[2] for note in task.notes] == [
        "left out its last 5 rows: eval.prompts = 4",
        "left out 2 rows whose prompt is among the eval prompts",
        "left out its last 42 rows: task.train_prompts = 6",
    ]


def test_a_file_with_no_more_rows_than_wanted_is_taken_whole(tmp_path):
    task = load(write(tmp_path / "data.jsonl", sums(10)), train_prompts=7)
    assert (len(task.train), len(task.eval), task.notes) == (7, 3, ())


def test_other_column_names_and_numbers_as_answers_are_read(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"question": f"{i}+1=", "result": i + 1} for i in range(5)])
    task = load(path, prompt_key="question", answer_key="result")
    assert {item["answer"] for item in (*task.train, *task.eval)} == {"1", "2", "3", "4", "5"}


def dapo(num: int) -> list[dict]:
    """Rows as verl's DAPO data has them; a system message in every third one."""
    return [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "system", "content": "Think."}] * (i % 3 == 0)
            + [{"role": "user", "content": f"{i}+1=?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i + 1), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(i)},
        }
        for i in range(num)
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_of_verl_is_read_as_it_is(tmp_path, suffix):
    task = load(write(tmp_path / f"data.{suffix}", dapo(9)), reward="math-verify")
    items = sorted((*task.train, *task.eval), key=lambda item: int(item["answer"]))
    assert [item["answer"] for item in items] == [str(i + 1) for i in range(9)]
    system, user = items[3]["prompt"]
    assert (system, user) == ({"role": "system", "content": "Think."}, {"role": "user", "content": "3+1=?"})
    assert [message["role"] for message in items[4]["prompt"]] == ["user"]
    assert items[4]["metadata"]["data_source"] == "math_dapo"
    assert items[4]["metadata"]["extra_info"] == {"index": "4"}
    assert len({item["uid"] for item in items}) == 9
    assert asyncio.run(OneTurn(None).start(items[3])).messages == (system, user)
    assert asyncio.run(OneTurn(None).start({"prompt": "x"})).messages == ({"role": "user", "content": "x"},)


def test_the_answer_of_a_verl_file_is_named_in_the_hint_for_a_wrong_key(tmp_path):
    with pytest.raises(ConfigError, match='no column "solution"') as refused:
        load(write(tmp_path / "data.parquet", dapo(5)), answer_key="solution")
    assert refused.value.hint == 'set task.answer_key = "reward_model.ground_truth"'


def test_the_answer_of_a_skyrl_file_is_found_and_a_column_answer_comes_before_it(tmp_path):
    row = {"prompt": "x", "reward_spec": {"ground_truth": "7"}}
    assert load(write(tmp_path / "data.jsonl", [row]), num_eval=0).train[0]["answer"] == "7"
    assert (
        load(write(tmp_path / "data.jsonl", [{**row, "answer": "8"}]), num_eval=0).train[0]["answer"] == "8"
    )


def test_a_ground_truth_that_is_no_text_is_left_to_the_users_function(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def score(item, response): return 0.0")
    row = {"prompt": "x", "reward_model": {"ground_truth": {"target": ["a", "b"]}}}
    path = write(tmp_path / "data.parquet", [row])
    (item,) = load(path, num_eval=0, reward="my_rewards:score", import_path=str(tmp_path)).train
    assert (item["answer"], item["metadata"]["reward_model"]) == (None, row["reward_model"])
    with pytest.raises(ConfigError, match="neither text nor a number but dict"):
        load(path)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (72.0, "72"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (1e300, "1e+300"),
        (Decimal("72.00"), "72"),
        (Decimal("1.50"), "1.50"),
    ],
)
def test_a_whole_number_of_a_column_of_doubles_is_an_integer(tmp_path, value, answer):
    path = write(tmp_path / "data.parquet", [{"prompt": "x", "answer": value}])
    assert load(path, num_eval=0).train[0]["answer"] == answer


AS_TEXT = {"prompt": "What is 1+1?", "answer": "2"}
AS_MESSAGES = {"prompt": [{"content": " What is 1+1?\n", "role": "user"}], "answer": "2"}


@pytest.mark.parametrize("repeated", [(AS_TEXT, AS_MESSAGES), (AS_MESSAGES, AS_TEXT)])
def test_a_text_and_the_same_text_as_the_users_message_are_one_prompt(tmp_path, repeated):
    first, second = repeated
    source = write(tmp_path / "train.jsonl", [first, second, *sums(3)])
    held_out = str(write(tmp_path / "eval.jsonl", [second]))
    assert len(load(source, num_eval=0).train) == 4
    assert len(load(source, num_eval=1, eval_path=held_out).train) == 3
    fields = {
        "task": {"source": f"jsonl:{source}"},
        "eval": {"prompts": 0, "sets": {"other": f"jsonl:{held_out}"}},
    }
    assert len(load_task(Profile.model_validate(fields)).train) == 3


def test_a_system_message_makes_another_prompt():
    user = {"role": "user", "content": "x"}
    assert (
        prompt_key([{"role": "system", "content": "Think."}, user]) != prompt_key("x") == prompt_key([user])
    )
    assert prompt_key([{**user, "role": "system"}]) != prompt_key("x")


def test_uids_stay_those_of_earlier_versions():
    assert content_uid("What is 1+1?", "2") == "fdbe58a675b5a179"
    assert content_uid([{"role": "user", "content": "What is 1+1?"}], "2") == "85e7a5d06ecc6c00"


def test_a_verl_file_is_noted_if_its_rewards_would_be_exact_matches(tmp_path):
    path = write(tmp_path / "data.parquet", dapo(5))
    (note,) = load(path, answer_key="reward_model.ground_truth").notes
    assert "data_source" in note
    assert "math-verify" in note
    assert load(path, answer_key="reward_model.ground_truth", reward="math-verify").notes == ()


@pytest.mark.parametrize(("name", "found"), [("a.b", "whole"), ("a.c", "inner"), ("d.e.f", "deep")])
def test_a_key_names_a_column_or_a_field_in_it(tmp_path, name, found):
    row = {"prompt": "x", "a.b": "whole", "a": {"b": "hidden", "c": "inner"}, "d": {"e": {"f": "deep"}}}
    assert (
        load(write(tmp_path / "data.jsonl", [row]), num_eval=0, answer_key=name).train[0]["answer"] == found
    )


def test_a_file_that_ends_in_empty_lines_is_fine(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in sums(5)) + "\n\n\n")
    assert len(load(path).train) == 2


GOOD = json.dumps({"prompt": "1+1=", "answer": "2"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{GOOD}\n\n{GOOD}\n", "data.jsonl:2: the line is empty"),
        (f'{GOOD}\n{{"promt": "x", "answer": "y"}}\n', ':2: no column "prompt"; it has: promt, answer'),
        ('{"prompt": "x", "answer": ""}\n', 'data.jsonl:1: column "answer" is empty'),
        ('{"prompt": "x", "answer": null}\n', '"answer" is neither text nor a number but null'),
        (f"{GOOD}\n", "has 1 distinct prompts, and eval.prompts = 3 of them are held out"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(tmp_path, text, message):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_missing_column_is_refused_with_the_nearest_one(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompts": "x", "answer": "y"}])
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert refused.value.hint == 'set task.prompt_key = "prompts"'


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path):
    path = write(tmp_path / "data.parquet", [*sums(2), {"prompt": "", "answer": "1"}])
    with pytest.raises(ConfigError, match=r'data.parquet:3: column "prompt" is empty'):
        load(path)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_pattern_reads_several_files_in_the_order_of_their_names(tmp_path, suffix):
    for number in (1, 0, 2):
        write(tmp_path / f"train-{number}.{suffix}", sums(4, start=3 * number))
    write(tmp_path / f"other.{suffix}", sums(4, start=50))
    assert prompts_of(load(tmp_path / f"train-*.{suffix}", num_eval=0).train) == {
        f"{i}+1=" for i in range(10)
    }
    task = load(tmp_path / f"train-*.{suffix}", num_eval=0, train_prompts=5)
    assert prompts_of(task.train) == {f"{i}+1=" for i in range(5)}
    assert [note.partition(": ")[2] for note in task.notes] == [
        "left out 1 rows whose prompt repeats an earlier one",
        "left out its last 6 rows: task.train_prompts = 5, and eval.prompts = 0",
    ]
    with pytest.raises(ConfigError, match=r"task.source: no file matches .*test-\*"):
        load(tmp_path / f"test-*.{suffix}")


def test_parameters_and_the_worked_form_are_refused_for_files(tmp_path):
    path = write(tmp_path / "data.jsonl", sums(5))
    with pytest.raises(ConfigError, match=r"task.params is for reasoning-gym"):
        load(path, params={"x": 1})
    with pytest.raises(ConfigError, match="has no worked form"):
        load(path, adapter="worked")


def load_sets(tmp_path: Path, sets: dict[str, str], source: str = "") -> Task:
    data = write(tmp_path / "data.jsonl", sums(10))
    fields = {
        "task": {"source": source or f"jsonl:{data}"},
        "eval": {"prompts": 2, "sets": sets},
        "run": {"seed": 0},
    }
    return load_task(Profile.model_validate(fields))


def test_eval_sets_are_files_by_name_whose_prompts_are_not_trained_on(tmp_path):
    sets = {
        "hard": f"jsonl:{write(tmp_path / 'hard.jsonl', sums(3))}",
        "new": f"parquet:{write(tmp_path / 'new.parquet', sums(5, 90))}",
    }
    task = load_sets(tmp_path, sets)
    assert {name: len(items) for name, items in task.eval_sets.items()} == {"hard": 3, "new": 5}
    assert not prompts_of(task.train) & prompts_of(task.eval_sets["hard"])
    assert any("whose prompt is in one of eval.sets" in note for note in task.notes)


@pytest.mark.parametrize(
    ("sets", "source", "message"),
    [
        ({"a/b": "jsonl:x.jsonl"}, "", 'eval.sets: "a/b" cannot name a set'),
        ({"aime": "x.jsonl"}, "", 'eval.sets.aime = "x.jsonl" is neither jsonl:<path> nor parquet:<path>'),
        (
            {"aime": "parquet:x.jsonl"},
            "",
            'eval.sets.aime = "parquet:x.jsonl": the file does not look like parquet',
        ),
        ({"aime": "jsonl:nowhere.jsonl"}, "", "eval.sets.aime: nowhere.jsonl does not exist"),
        (
            {"aime": "jsonl:x.jsonl"},
            "reasoning-gym:chain_sum",
            "the reward of reasoning-gym:chain_sum judges its own prompts only",
        ),
    ],
)
def test_a_wrong_eval_set_is_named(tmp_path, sets, source, message):
    with pytest.raises(ConfigError) as refused:
        load_sets(tmp_path, sets, source)
    assert message in str(refused.value)
    assert refused.value.hint


def test_a_class_that_gives_its_own_reward_needs_no_answers(tmp_path, monkeypatch):
    # its trial imports transformers
    monkeypatch.setattr("asyncrl_cli.tasks.task.resolve_tool_class", lambda *_: (None, ()))
    rows = [{"prompt": f"buy {i}", "price": i} for i in range(9)]
    file = write(tmp_path / "shop.jsonl", rows)
    task = load(file, environment="shop:Shop")
    assert [item["answer"] for item in (*task.train, *task.eval)] == [None] * 9
    with pytest.raises(ConfigError, match='no column "answer"'):
        load(file, environment="shop:Shop", reward="exact-match")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("train.parquet", 'task.source = "parquet:train.parquet"'),
        ("data/train.jsonl", 'task.source = "jsonl:data/train.jsonl"'),
        ("openai/gsm8k", "a dataset of the hub is written to a file first"),
    ],
)
def test_a_source_without_its_kind_is_refused_with_the_one_that_was_meant(source, hint):
    with pytest.raises(ConfigError, match="is not one of builtin:<task>") as caught:
        load_task(Profile.model_validate({"task": {"source": source}}))
    assert caught.value.hint.startswith(hint)


def test_a_built_in_reward_with_a_slip_is_refused_with_its_name(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n', encoding="utf-8")
    task = {"source": f"jsonl:{tmp_path / 'rows.jsonl'}", "reward": "math_verify"}
    with pytest.raises(ConfigError, match="not of the form module:function") as caught:
        load_task(Profile.model_validate({"task": task, "eval": {"prompts": 0}}))
    assert caught.value.hint == "did you mean math-verify?"

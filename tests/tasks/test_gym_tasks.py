"""Tasks made from reasoning-gym datasets."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.item import content_uid
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks import gym
from asyncrl_cli.tasks.gym import make_dataset, stream_seed
from asyncrl_cli.tasks.reward_functions import build_reward
from asyncrl_cli.tasks.task import Task, load_task

SOURCE_ROOT = str(Path(__file__).resolve().parents[2] / "src")


def profile_of(source: str = "reasoning-gym:number_sorting", **fields) -> Profile:
    task = {"source": source, "adapter": "plain", "train_prompts": 60, **fields.pop("task", {})}
    return Profile.model_validate({"task": task, "eval": {"prompts": 20}, **fields})


@pytest.fixture(scope="module", autouse=True)
def made_here() -> Iterator[None]:
    """Prompts are made in this process, so that reasoning_gym is imported once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym, "call_once", lambda function, *arguments, **options: function(*arguments))
        yield


def prompts_of(items) -> list[str]:
    return [item["prompt"] for item in items]


@pytest.fixture(scope="module")
def plain() -> Task:
    return load_task(profile_of())


def test_there_are_as_many_items_as_asked_for(plain):
    assert (len(plain.train), len(plain.eval)) == (60, 20)
    assert plain.name == "reasoning-gym:number_sorting"


def test_an_item_is_the_question_and_the_answer_of_the_dataset(plain):
    item = plain.train[0]
    numbers = item["prompt"].partition("order: ")[2].partition("\n")[0].split(", ")
    ordered = sorted(map(float, numbers), reverse="descending" in item["prompt"])
    assert [float(number) for number in json.loads(item["answer"].replace("'", '"'))] == ordered
    assert item["uid"] == content_uid(item["prompt"], item["answer"])
    assert item["metadata"]["entry"]["question"] == item["prompt"]


@pytest.mark.slow
def test_the_worked_form_holds_as_many_prompts_out_however_many_an_eval_uses():
    """What a model is taught, the training prompts, would else depend on the number of eval prompts."""
    few, usual, more = (
        load_task(profile_of(task={"adapter": "worked"}, eval={"prompts": n})) for n in (20, 512, 600)
    )
    assert few.train == usual.train
    assert few.eval == usual.eval[:20]
    for task in (few, usual, more):
        assert not set(prompts_of(task.train)) & set(prompts_of(task.eval))


@pytest.mark.slow
def test_a_worked_dataset_with_few_prompts_is_split_as_asked():
    # Lists of two of twelve values in two directions: 288 prompts.
    task = {"adapter": "worked", "params": {"max_numbers": 2}, "train_prompts": 150}
    few = load_task(profile_of(task=task, eval={"prompts": 40}))
    assert (len(few.train), len(few.eval)) == (150, 40)
    assert not set(prompts_of(few.train)) & set(prompts_of(few.eval))


def test_train_and_eval_share_no_prompt_even_where_prompts_are_few():
    # Two digits of 0..9 in two directions make 200 prompts; 199 of them are asked for.
    params = {"min_numbers": 2, "max_numbers": 2, "max_decimals": 0, "min_value": -0.49, "max_value": 9.49}
    task = load_task(profile_of(task={"params": params, "train_prompts": 150}, eval={"prompts": 40}))
    train, held_out = prompts_of(task.train), prompts_of(task.eval)
    assert (len(set(train)), len(set(held_out))) == (150, 40)
    assert not set(train) & set(held_out)


def test_a_dataset_that_cannot_make_enough_prompts_says_so_with_numbers():
    params = {"min_numbers": 1, "max_numbers": 1, "max_decimals": 0, "min_value": 0.51, "max_value": 4.49}
    with pytest.raises(
        ConfigError, match=r"only 3 of 60 new prompts for task.train_prompts in \d+ tries \(8 distinct"
    ):
        load_task(profile_of(task={"params": params}, eval={"prompts": 5}))


def test_eval_prompts_do_not_depend_on_the_seed_and_training_prompts_do(plain):
    other = load_task(profile_of(run={"seed": 1}))
    assert prompts_of(other.eval) == prompts_of(plain.eval)
    assert not set(prompts_of(other.train)) & set(prompts_of(plain.train))


def test_more_eval_prompts_begin_with_the_same_ones(plain):
    more = load_task(profile_of(eval={"prompts": 50}))
    assert prompts_of(more.eval)[:20] == prompts_of(plain.eval)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["ransom_note", "list_functions"])
def test_the_same_profile_gives_the_same_items_in_another_process(dataset):
    # The first iterates over sets of strings, the second draws from the global generator.
    script = (
        "from asyncrl_cli.profile.schema import Profile\n"
        "from asyncrl_cli.tasks.task import load_task\n"
        f"task = {{'source': 'reasoning-gym:{dataset}', 'train_prompts': 20}}\n"
        "print([i['uid'] for i in load_task(Profile.model_validate({'task': task, 'eval': {'prompts': "
        "5}})).train])\n"
    )
    uids = [
        subprocess.check_output(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": SOURCE_ROOT, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    assert uids[0] == uids[1]


@pytest.mark.slow
def test_five_thousand_items_are_made_in_a_few_seconds():
    began_s = time.process_time()
    task = load_task(Profile.model_validate({"eval": {"prompts": 1000}}))
    assert len(task.train) + len(task.eval) == 5096
    assert time.process_time() - began_s < 10  # of this process alone; usually 0.5 s


def test_parameters_reach_the_dataset():
    task = load_task(profile_of(task={"params": {"min_numbers": 4, "max_numbers": 4}}))
    assert {item["prompt"].partition("order: ")[2].partition("\n")[0].count(",") for item in task.train} == {
        3
    }


@pytest.mark.slow
def test_a_dataset_that_reads_its_own_data_files_is_made_too():
    assert len(load_task(profile_of("reasoning-gym:word_ladder")).train) == 60


def test_an_unknown_dataset_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError, match='no dataset "number_sort"') as refused:
        load_task(profile_of("reasoning-gym:number_sort"))
    assert "number_sorting" in refused.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "message", "hint"),
    [
        ({"max_number": 5}, "task.params.max_number: .* no such parameter", "max_numbers"),
        ({"max_numbers": "five"}, "task.params.max_numbers = 'five': input should be a valid integer", ""),
        ({"max_numbers": True}, "task.params.max_numbers = True: input should be a valid integer", ""),
        ({"max_numbers": 1}, "task.params.max_numbers = 1: max_numbers must be >= min_numbers", ""),
        ({"min_numbers": 0}, "task.params.min_numbers = 0: min_numbers must be positive", ""),
        ({"seed": 3}, "task.params.seed cannot be set", "run.seed"),
        ({"size": 3}, "task.params.size cannot be set", "task.train_prompts"),
    ],
)
def test_a_bad_parameter_is_named_with_the_reason(params, message, hint):
    with pytest.raises(ConfigError, match=message) as refused:
        load_task(profile_of(task={"params": params}))
    assert hint in refused.value.hint


@pytest.mark.parametrize("source", ["number_sorting", "reasoning-gym:", "csv:data.csv"])
def test_a_source_of_no_known_form_is_refused(source):
    with pytest.raises(ConfigError, match="reasoning-gym:<dataset>, jsonl:<path>, parquet:<path>"):
        load_task(profile_of(source))


def test_an_eval_path_is_refused_for_a_dataset():
    with pytest.raises(ConfigError, match=r"task.eval_path is for tasks that are read from a file"):
        load_task(profile_of(task={"eval_path": "eval.jsonl"}))


@pytest.mark.slow
def test_the_worked_form_is_taken_for_the_tiny_model_only():
    assert load_task(profile_of(task={"adapter": "auto"})).reward.adapter == "worked"
    elsewhere = load_task(profile_of(task={"adapter": "auto"}, model={"path": "some/model"}))
    assert elsewhere.reward.adapter == "plain"
    assert elsewhere.demonstration is None


@pytest.mark.slow
def test_worked_items_come_with_demonstrations_that_survive_pickling():
    task = pickle.loads(pickle.dumps(load_task(profile_of(task={"adapter": "worked"}))))
    for demonstrate in (task.demonstration, task.flawed_demonstration):
        texts = [demonstrate(item, Random(0)) for item in task.train]
        assert all(texts)
        assert texts == [demonstrate(item, Random(0)) for item in task.train]


def test_only_the_last_list_of_a_worked_response_is_judged_and_samples_say_so():
    task = load_task(profile_of(task={"adapter": "worked"}))
    item = next(one for one in task.train if "," in task.expected(one))
    right = task.expected(item).rpartition(",")[2]
    score = build_reward(task.reward)
    assert [score(item, text) for text in (right, f"{right[::-1]},00,{right}", f"{right},00")] == [
        1.0,
        1.0,
        0.0,
    ]
    assert task.shown_answer(item) == f"the last list of {task.expected(item)}"
    plain = load_task(profile_of(task={"adapter": "plain"}))
    assert plain.shown_answer(plain.train[0]) == plain.train[0]["answer"]


def test_a_dataset_without_a_worked_form_is_refused_with_those_that_have_one():
    with pytest.raises(ConfigError, match="reasoning-gym:chain_sum has no worked form; only number_sorting"):
        load_task(profile_of("reasoning-gym:chain_sum", task={"adapter": "worked"}))


@pytest.mark.slow
def test_parameters_that_the_worked_form_cannot_write_are_refused():
    with pytest.raises(ConfigError, match="whole numbers") as refused:
        load_task(profile_of(task={"adapter": "worked", "params": {"max_decimals": 2}}))
    assert "task.params" in refused.value.hint


def test_streams_lie_far_apart():
    # Item i of a reasoning-gym dataset is made from seed + i, so neighbouring seeds would share nearly all
    # items.
    seeds = sorted(stream_seed("number_sorting", {}, f"train/{seed}/0") for seed in range(100))
    assert min(after - before for before, after in pairwise(seeds)) > 10_000


@pytest.mark.slow
def test_prompts_are_made_without_importing_reasoning_gym_here():
    script = (
        "import sys; from asyncrl_cli.profile.schema import Profile\n"
        "from asyncrl_cli.tasks.task import load_task\n"
        "profile = {'task': {'train_prompts': 2}, 'eval': {'prompts': 2}}\n"
        "assert load_task(Profile.model_validate(profile)).train\n"
        "assert not {'sympy', 'matplotlib', 'reasoning_gym'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": SOURCE_ROOT}, check=True)


@pytest.mark.slow
def test_a_dataset_rebuilt_elsewhere_scores_the_entry_of_an_item(plain):
    dataset = make_dataset(plain.reward.dataset, plain.reward.params, seed=99, size=1)
    item = plain.train[0]
    assert dataset.score_answer(item["answer"], item["metadata"]["entry"]) == 1.0
    assert dataset.score_answer("[1]", item["metadata"]["entry"]) == 0.0

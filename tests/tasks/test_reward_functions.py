"""Reward functions of the user's by their signature: ours, TRL's and verl's; and several rewards with
weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.observe.conftest import trajectory

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.environment import MAX_REWARD, Reward, RewardSpec, figures_of, reward_parts
from asyncrl_cli.contracts.item import make_item
from asyncrl_cli.observe.step_values import episode_values
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.resolved import from_document, to_document, to_toml
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.sandbox.parent_rewards import RewardFailed, RewardPool
from asyncrl_cli.tasks.code_choice import resolve_reward

TEXT = make_item("2+2", "4", {"level": 3})
CHAT = make_item([{"role": "user", "content": "2+2"}], "4", {"level": 3})
VERL = make_item(
    "2+2", "4", {"data_source": "math", "extra_info": {"index": 7}, "reward_model": {"ground_truth": "4"}}
)


def spec_of(directory: Path, source: str, reward: Any = "mine:reward", **task: Any) -> RewardSpec:
    (directory / "mine.py").write_text(source)
    profile = Profile.model_validate({"task": {"reward": reward, "import_path": str(directory), **task}})
    return resolve_reward(profile, RewardSpec(kind="none"), None)[0]


def scored(spec: RewardSpec, response: str, item: Any = TEXT) -> Any:
    """The reward that a reward process gives, or why it gives none."""

    async def main() -> Any:
        pool = RewardPool(spec, timeout_s=20.0)
        try:
            return await pool.score(item, response)
        except RewardFailed as failed:
            return str(failed)
        finally:
            await pool.close()

    return asyncio.run(main())


def own_figures(reward: Any) -> dict[str, float]:
    """The figures of the function itself: every reward here also says that the response names the answer."""
    figures = figures_of(reward)
    assert figures.pop("reward/names_answer") == 1.0
    return figures


TRL = {
    "all columns": (
        "prompts, completions, answer, **columns",
        "(prompts, answer, columns['level']) == (['2+2'], ['4'], [3])",
    ),
    "only some": ("completions, level", "level == [3]"),
    "its trainer's state": ("completions, trainer_state, log_extra, **columns", "trainer_state is None"),
    "ids that it may lack": ("completions, completion_ids=None", "completion_ids is None"),
}


@pytest.mark.parametrize("name", TRL)
def test_a_function_in_trls_signature_is_called_with_lists_of_one(tmp_path, name):
    signature, condition = TRL[name]
    source = (
        f"def reward({signature}):\n    assert {condition}\n    return [float(text == '4') for text in "
        "completions]\n"
    )
    spec = spec_of(tmp_path, source)
    assert (scored(spec, "4"), scored(spec, "5")) == (1.0, 0.0)


def test_a_trl_function_gets_messages_for_a_prompt_of_messages(tmp_path):
    source = (
        "def reward(prompts, completions, **columns):\n    return [float([prompts, completions] == "
        "EXPECTED)]\n"
    )
    expected = [[[{"role": "user", "content": "2+2"}]], [[{"role": "assistant", "content": "4"}]]]
    assert scored(spec_of(tmp_path, f"EXPECTED = {expected}\n{source}"), "4", CHAT) == 1.0


def test_a_trl_function_finds_the_answer_under_the_name_of_its_column(tmp_path):
    source = "def reward(completions, solution, **columns): return [float(completions == solution)]"
    assert scored(spec_of(tmp_path, source, answer_key="solution"), "4") == 1.0


def test_an_async_trl_function_is_awaited_and_its_figures_come_with_the_reward(tmp_path):
    source = (
        "async def reward(completions, log_metric, **columns):\n    log_metric('a/b', 2)\n    return [0.5]\n"
    )
    reward = scored(spec_of(tmp_path, source), "4")
    assert (reward, own_figures(reward)) == (0.5, {"reward/a.b": 2.0})


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("[1.0, 2.0]", "2 rewards for one completion"),
        ("[]", "0 rewards"),
        ("[None]", "not a number: None"),
        ("3", "not iterable"),
    ],
)
def test_what_is_no_list_of_one_number_is_no_reward_of_trl(tmp_path, returned, why):
    assert why in scored(spec_of(tmp_path, f"def reward(completions, **columns): return {returned}"), "4")


@pytest.mark.parametrize(
    "parameters",
    ["data_source, solution_str, ground_truth, extra_info=None", "solution_str, ground_truth, **more"],
)
def test_a_function_in_verls_signature_is_called_with_verls_columns(tmp_path, parameters):
    source = f"""
def reward({parameters}):
    given = {{**locals(), **locals().get("more", {{}})}}
    assert (given["data_source"], given["extra_info"]) == ("math", {{"index": 7}})
    return {{"score": float(solution_str == ground_truth), "acc": True, "pred": "text"}}
"""
    reward = scored(spec_of(tmp_path, source), "4", VERL)
    assert (reward, own_figures(reward)) == (1.0, {"reward/acc": 1.0})


@pytest.mark.parametrize(
    ("column", "settings"),
    [("reward_model", {}), ("reward_spec", {}), ("graded", {"answer_key": "graded.ground_truth"})],
)
@pytest.mark.parametrize("truth", [{"target": ["4"]}, 4, 0])
def test_verls_function_gets_a_ground_truth_that_is_no_text_as_it_is(tmp_path, column, settings, truth):
    item = make_item(
        "2+2", None if isinstance(truth, dict) else str(truth), {column: {"ground_truth": truth}}
    )
    source = f"def reward(solution_str, ground_truth): return float(ground_truth == {truth!r})"
    assert scored(spec_of(tmp_path, source, **settings), "4", item) == 1.0


SEVERAL = """
def right(item, response): return float(response == item["answer"])
def brief(completions, **columns):
    return [None if "skip" in text else 1.0 / len(text) for text in completions]
async def slow(solution_str, ground_truth): return {"score": 2.0, "acc": 0.5}
"""


def test_several_rewards_are_summed_with_their_weights_and_each_is_a_figure(tmp_path):
    weights = {"exact-match": 1.0, "mine:brief": 0.5, "mine:slow": -0.25}
    reward = scored(spec_of(tmp_path, SEVERAL, weights), "4")
    assert reward == 1.0 + 0.5 * 1.0 - 0.25 * 2.0
    parts = {"reward/exact-match": 1.0, "reward/mine.brief": 1.0, "reward/mine.slow": 2.0}
    assert own_figures(reward) == parts | {"reward/acc": 0.5}


def test_a_reward_may_have_a_name_of_the_users(tmp_path):
    rewards = {
        "right": {"use": "exact-match"},
        "short": {"use": "mine:brief", "weight": 0.5},
        "mine:slow": 2.0,
    }
    spec = spec_of(tmp_path, SEVERAL, rewards)
    reward = scored(spec, "4")
    assert reward == 1.0 + 0.5 * 1.0 + 2.0 * 2.0
    parts = {"reward/right": 1.0, "reward/short": 1.0, "reward/mine.slow": 2.0}
    assert own_figures(reward) == parts | {"reward/acc": 0.5}
    assert reward_parts(figures_of(reward).items()) == {
        "right": 1.0, "short": 1.0, "mine.slow": 2.0, "acc": 0.5, "names_answer": 1.0
    }  # fmt: skip


FIELDS = """
def mine(item, response):
    if response == "set": return {"reward": 1.0, "parsed": {1}}
    if response == "none": return {"parsed": "4"}
    return {"reward": 0.5, "parsed": response[-1], "size": len(response)}
"""


def test_a_reward_may_come_with_values_of_fields_also_as_one_of_several(tmp_path):
    expected = {"parsed": "4", "size": 3}
    alone = scored(spec_of(tmp_path, FIELDS, "mine:mine"), "= 4")
    assert (alone, alone.fields, own_figures(alone)) == (0.5, expected, {})
    several = scored(spec_of(tmp_path, FIELDS, {"exact-match": 1.0, "mine:mine": 2.0}), "= 4")
    assert (several, several.fields) == (1.0, expected)


def test_a_mapping_without_a_reward_or_with_what_json_cannot_hold_fails_with_the_reason(tmp_path):
    spec = spec_of(tmp_path, FIELDS, "mine:mine")
    assert "set is not JSON serializable" in scored(spec, "set")
    assert "the reward returned dict, not a number: {'parsed': '4'}" in scored(spec, "none")


def test_a_list_of_rewards_has_weights_of_one(tmp_path):
    spec = spec_of(tmp_path, SEVERAL, ("mine:right", "mine:brief"))
    assert scored(spec, "4") == 2.0
    assert [code.name for code in spec.functions] == ["mine:right", "mine:brief"]


def test_the_answers_format_goes_to_math_verify_among_several(tmp_path):
    spec = spec_of(tmp_path, SEVERAL, ("mine:right", "math-verify"), answer_format="anywhere")
    assert [part.spec.answer_format for part in spec.parts if part.name == "math-verify"] == ["anywhere"]


def test_trls_none_is_left_out_of_several_but_is_no_reward_alone(tmp_path):
    assert scored(spec_of(tmp_path, SEVERAL, ("mine:right", "mine:brief")), "skip") == 0.0
    assert "none of the rewards applies" in scored(spec_of(tmp_path, SEVERAL, {"mine:brief": 1.0}), "skip")


@pytest.mark.parametrize(
    ("returned", "is_taken"),
    [("1e9", True), ("-1e9", True), ("1e308", False), ("-2e9", False), ("10**400", False)],
)
def test_an_absurd_reward_is_a_failure(tmp_path, returned, is_taken):
    reward = scored(spec_of(tmp_path, f"def reward(item, response): return {returned}"), "4")
    assert reward == float(returned) if is_taken else isinstance(reward, str)


def test_a_weight_cannot_make_an_absurd_reward_of_a_sane_one(tmp_path):
    assert "a reward is a number from" in scored(
        spec_of(tmp_path, SEVERAL, {"mine:right": 2 * MAX_REWARD}), "4"
    )


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ([], "it has 0 rewards"),
        (["a:b"] * 2, "a reward is named twice"),
        (["exact-match", "auto"], '"auto" is not one of several'),
        ({"none": 1.0, "a:b": 1.0}, '"none" is not one of several'),
        ({"a:b": 0}, "a weight is 0"),
        ([f"a:b{number}" for number in range(17)], "it has 17 rewards"),
    ],
)
def test_a_wrong_list_of_rewards_is_refused(reward, told):
    with pytest.raises(ConfigError, match=told):
        check(Profile.model_validate({"task": {"reward": reward}}))


def test_one_of_several_that_is_unknown_is_refused_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match='"exactmatch" is not one of'):
        spec_of(tmp_path, SEVERAL, ("mine:right", "exactmatch"))


FORMS = (
    '["exact-match", "mine:right"]',
    '{exact-match = 1.0, "mine:right" = 0.5}',
    '{same = {use = "exact-match"}, right = {use = "mine:right", weight = 0.5}}',
)


@pytest.mark.parametrize("form", FORMS)
def test_several_rewards_are_written_in_a_profile_or_set_and_survive_being_written(
    tmp_path, monkeypatch, form
):
    (tmp_path / "mine.py").write_text(SEVERAL)
    file = tmp_path / "own.toml"
    file.write_text(f'extends = "base"\n[task]\nreward = {form}\n')
    loaded = load(str(file), environ={})
    assert loaded.profile.task.import_path == str(tmp_path)  # where the module is
    assert [one.use for one in loaded.profile.task.rewards] == ["exact-match", "mine:right"]
    assert load("base", [f"task.reward={form}"], environ={}).profile.task.reward == loaded.profile.task.reward
    assert from_document(to_document(loaded.profile, loaded.origins)).profile == loaded.profile
    file.write_text(to_toml(loaded.profile, loaded.origins))
    assert load(str(file), environ={}).profile == loaded.profile


def test_each_of_several_rewards_has_its_mean_in_the_metrics():
    facts = [figures_of(Reward(value, {"mine:right": value})) for value in (1.0, 0.0, 0.5)]
    values = episode_values([replace(trajectory(0.0, (0, 1)), facts=tuple(entry.items())) for entry in facts])
    assert {name: value.value for name, value in values.items()} == {"reward/mine.right/mean": 0.5}

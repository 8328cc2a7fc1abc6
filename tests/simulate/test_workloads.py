from __future__ import annotations

import random
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.rollout_sections import AsyncTrainingSection
from asyncrl_cli.profile.toml_files import shipped_profiles, shipped_workloads
from asyncrl_cli.simulate.responses import ResponseLengths
from asyncrl_cli.simulate.workload import Lengths
from asyncrl_cli.simulate.workload_files import load_workload, profile_for
from tests.simulate.small_workload import COSTS

KEYS = """
windows = 3
[profile.trainer]
ppo_mini_batch_size = 4
[profile.rollout]
n = 2
slots = 8
[profiles.stale-samples.async_training]
trigger_parameter_sync_step = 4
"""
SMALL = KEYS + COSTS


def small(directory: Path, old: str = "", new: str = "") -> str:
    path = directory / "small.toml"
    assert old in SMALL
    path.write_text(SMALL.replace(old, new) if old else SMALL, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_every_shipped_workload_loads_and_runs_every_shipped_profile() -> None:
    for name in shipped_workloads():
        workload = load_workload(name)
        assert workload.name == name
        for profile in shipped_profiles():
            assert profile_for(workload, profile, environ={}).profile.eval.prompts == 0


def test_workloads_are_no_profiles() -> None:
    assert "verl-7b-math-128" in shipped_workloads()
    assert not set(shipped_workloads()) & set(shipped_profiles())


def test_a_wrong_name_lists_every_workload():
    with pytest.raises(ConfigError) as refused:
        load_workload("verl")
    assert [name for name in shipped_workloads() if name not in (refused.value.hint or "")] == []


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("sigma = 0.5", "sigm = 0.5", "unknown key lengths.sigm", "lengths.sigma"),
        ("step_s = 0.01\n", "", "decoding.step_s is missing", "Seconds of a decode step"),
        ("step_s = 0.01\n", "step_s = -1.0\n", "decoding.step_s = -1.0", "Seconds of a decode step"),
        ("slots = 8", "slot = 8", "unknown key rollout.slot", "rollout.slots"),
        ("stale-samples.", "stale-sample.", "there is no profile 'stale-sample'", "stale-samples"),
        ("sigma = 0.5\n", "", "lengths: a lognormal needs median_tokens and sigma", ""),
        ("[decoding]", "[decodings]", "unknown key decodings", "decoding"),
    ],
)
def test_a_wrong_workload_is_refused_with_file_key_and_the_way_out(
    tmp_path: Path, old: str, new: str, message: str, hint: str
) -> None:
    path = small(tmp_path, old, new)
    with pytest.raises(ConfigError, match=r"small\.toml") as refused:
        load_workload(path)
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_an_unknown_workload_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_workload("verl-7b-math-12")
    assert "verl-7b-math-128" in refused.value.hint


def test_a_workload_lies_above_the_profile_and_below_environment_and_sets(tmp_path: Path) -> None:
    workload = load_workload(small(tmp_path))
    plain = profile_for(workload, "stale-samples", environ={})
    assert plain.profile.rollout.slots == 8
    assert plain.profile.async_training.trigger_parameter_sync_step == 4
    assert plain.origins["rollout.slots"] == "workload small"
    environ = {"ASYNCRL_ROLLOUT__SLOTS": "9"}
    for sets, slots in (((), 9), (("rollout.slots=10",), 10)):
        loaded = profile_for(workload, "stale-samples", sets, environ=environ)
        assert loaded.profile.rollout.slots == slots


def test_a_file_has_the_keys_that_the_workload_sets_for_the_profile_it_extends_below_its_own(
    tmp_path: Path,
) -> None:
    workload = load_workload(small(tmp_path))

    def schedule_of(toml: str) -> AsyncTrainingSection:
        (tmp_path / "mine.toml").write_text(toml, encoding="utf-8")
        return profile_for(workload, str(tmp_path / "mine.toml"), environ={}).profile.async_training

    stale = 'extends = "stale-samples"\n'
    assert schedule_of(stale).trigger_parameter_sync_step == 4
    key = "async_training.trigger_parameter_sync_step = 3"
    assert schedule_of(stale + key).trigger_parameter_sync_step == 3
    shipped = profile_for(workload, "partial-rollout", environ={}).profile
    assert schedule_of('extends = "partial-rollout"') == shipped.async_training


def test_all_profiles_train_the_groups_in_whole_steps_whatever_length_was_set(tmp_path: Path) -> None:
    workload = load_workload(small(tmp_path))
    for name in ("colocate", "stale-samples", "partial-rollout"):
        assert Schedule.of(profile_for(workload, name, groups=12, environ={}).profile).groups == 12
    uneven = profile_for(
        workload, "stale-samples", ["async_training.require_batches=5"], groups=12, environ={}
    ).profile
    assert Schedule.of(uneven).groups == 20
    assert uneven.run.total_rollout_steps is None
    for environ, sets in (({}, ["run.train_steps=7"]), ({"ASYNCRL_RUN__TRAIN_STEPS": "7"}, [])):
        free, fixed = (
            profile_for(workload, "colocate", sets, groups=groups, environ=environ).profile.run.train_steps
            for groups in (None, 12)
        )
        assert (free, fixed) == (7, 3)


def test_lengths_have_the_mean_of_their_closed_form_and_never_exceed_the_cap() -> None:
    lengths = Lengths(median_tokens=1000.0, sigma=1.2, prompt_variance_ratio=0.4)
    draw = ResponseLengths(lengths, 8000)
    drawn = [tokens for seed in range(4000) for tokens in draw(random.Random(seed), 8)]
    assert max(drawn) == 8000
    assert min(drawn) >= 1
    assert sum(drawn) / len(drawn) == pytest.approx(draw.mean, rel=0.02)


def test_one_groups_lengths_depend_on_its_seed_alone_and_resemble_each_other() -> None:
    alike = ResponseLengths(Lengths(median_tokens=100.0, sigma=1.0, prompt_variance_ratio=1.0), 10_000)
    assert len(set(alike(random.Random(3), 8))) == 1
    apart = ResponseLengths(Lengths(median_tokens=100.0, sigma=1.0), 10_000)
    assert apart(random.Random(3), 8) == apart(random.Random(3), 8)
    assert len(set(apart(random.Random(3), 8))) > 4


def test_a_list_is_drawn_from_evenly() -> None:
    draw = ResponseLengths(
        Lengths(distribution="list", response_tokens=(1, 2, 3, 900), prompt_variance_ratio=0.5), 100
    )
    drawn = [tokens for seed in range(2000) for tokens in draw(random.Random(seed), 4)]
    assert {1, 2, 3, 100} == set(drawn)
    assert all(1800 < drawn.count(tokens) < 2200 for tokens in (1, 2, 3, 100))

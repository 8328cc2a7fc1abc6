"""Who may be compared: the same work on the same resources, or an error that says what differs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from asyncrl_cli.bench.compare import Contest, contest_of
from asyncrl_cli.bench.entries import check_sets
from asyncrl_cli.errors import ConfigError


def contest(*profiles: str, baseline: str = "colocate", sets: Sequence[str] = (), **length: int) -> Contest:
    return contest_of(baseline, profiles, sets=("placement.device=cpu", *sets), **length)


def test_all_shipped_profiles_can_be_compared_over_384_groups() -> None:
    names = ("on-policy-pipeline", "stream-off-policy", "stale-samples", "partial-rollout", "one-step-off")
    made = contest(*names)
    assert [entry.name for entry in made.entries] == ["colocate", *names]
    assert made.groups == 384
    assert {entry.plan.cpus for entry in made.entries} == {2}


def test_windows_are_the_baselines() -> None:
    assert contest("partial-rollout", windows=12).groups == 192
    assert contest("colocate", baseline="stream-off-policy", windows=10).groups == 640


def test_a_profile_named_twice_takes_part_once_and_not_against_itself() -> None:
    assert len(contest("partial-rollout", "partial-rollout").entries) == 2
    with pytest.raises(ConfigError, match="compared with itself"):
        contest("colocate")


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[rollout]\nn = 4", "different work: rollout.n is 8 and 4"),
        ("[model]\nwarm_start_steps = 7", "model.warm_start_steps"),
        ("[placement]\ncpus_per_worker = 2", "uses 2 CPU cores and 'other' 4"),
        ("[trainer]\nppo_mini_batch_size = 8", "trainer.ppo_mini_batch_size is 16 and 8"),
    ],
)
def test_other_work_or_other_resources_are_refused(toml: str, said: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "other.toml").write_text(f'extends = "partial-rollout"\n{toml}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        contest(str(tmp_path / "other.toml"))


@pytest.mark.parametrize(("groups", "said"), [(100, "no multiple of R = 16"), (64, "not 3 windows of 'stream-off-policy'")])
def test_groups_must_make_whole_steps_and_windows_to_measure(groups: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        contest("stream-off-policy", groups=groups)


@pytest.mark.parametrize("groups", [1, 16, 50, 64, 100])
@pytest.mark.parametrize("profiles", [("stream-off-policy",), ("one-step-off", "partial-rollout")])
def test_the_groups_of_a_hint_can_be_typed(groups: int, profiles: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        contest(*profiles, groups=groups)
    flag, number = refused.value.hint.split()
    assert flag == "--groups"
    assert contest(*profiles, groups=int(number)).groups == int(number) >= groups


@pytest.mark.parametrize("toml", ["[rollout]\nn = 4", "[placement]\ncpus_per_worker = 2", '[model]\ncache_dir = "elsewhere"'])
@pytest.mark.parametrize("baseline", ["colocate", "stale-samples"])
def test_the_sets_of_a_hint_make_work_and_resources_the_same(toml: str, baseline: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "other.toml").write_text(f'extends = "partial-rollout"\n{toml}\n', encoding="utf-8")
    other = str(tmp_path / "other.toml")
    with pytest.raises(ConfigError) as refused:
        contest(other, baseline=baseline)
    words = shlex.split(refused.value.hint.removesuffix(" sets it for all of them"))
    assert set(words[::2]) == {"--set"}
    assert len(contest(other, baseline=baseline, sets=words[1::2]).entries) == 2


def test_groups_and_windows_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="both set"):
        contest("partial-rollout", groups=64, windows=4)


def test_what_the_bench_sets_itself_is_no_set() -> None:
    with pytest.raises(ConfigError, match=r"run\.seed") as refused:
        check_sets(["rollout.slots=32", "run.seed=4"])
    assert refused.value.hint == "use --seed"

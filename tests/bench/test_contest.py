"""Who may be compared: the same work on the same resources, or an error that says what differs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.bench import contest as contest_module
from asyncrl_cli.bench.contest import Contest, contest_of
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.simulate.workload_files import load_workload, profile_for
from tests.simulate.small_workload import COSTS


def contest(*profiles: str, baseline: str = "colocate", sets: Sequence[str] = (), **length: int) -> Contest:
    return contest_of(baseline, profiles, sets=("placement.device=cpu", *sets), **length)


def test_all_shipped_profiles_can_be_compared_over_384_groups() -> None:
    names = ("on-policy-pipeline", "stream-off-policy", "stale-samples", "partial-rollout", "one-step-off")
    made = contest(*names)
    assert [entry.name for entry in made.entries] == ["colocate", *names]
    assert made.groups == 384
    assert {entry.plan.cpus for entry in made.entries} == {2}


def test_a_contest_on_a_cluster_has_the_sizes_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for CPUs are defaults on this machine only, and a window follows from them."""
    elsewhere = ClusterResources(nodes=(NodeResources(name="far", cpus=8, gpus=0),), elastic_cpus=False)
    monkeypatch.setattr(contest_module, "_cluster_at", lambda address: elsewhere)
    sets = ("placement.device=cpu", "model.path=some/model")
    for address, groups in (("head:6379", 16), (None, 4)):
        made = contest_of("colocate", ["partial-rollout"], sets=sets, address=address)
        assert {entry.profile.trainer.ppo_mini_batch_size for entry in made.entries} == {groups}
        assert [entry.step_groups for entry in made.entries] == [groups, groups]


def test_a_simulated_contest_has_the_sizes_of_its_runs_whatever_the_model() -> None:
    sets, workload = ["model.path=some/model"], load_workload("laptop-tiny")
    made = contest_of("colocate", ["partial-rollout"], sets=sets, workload=workload)
    for entry in made.entries:
        simulated = profile_for(workload, entry.reference, sets, groups=made.groups).profile
        assert entry.window_groups == Schedule.of(simulated).window_groups


def test_a_profile_named_twice_takes_part_once_and_not_against_itself() -> None:
    assert len(contest("partial-rollout", "partial-rollout").entries) == 2
    with pytest.raises(ConfigError, match="compared with itself"):
        contest("colocate")


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (1, "no multiple of R = 16"),
        (100, "no multiple of R = 16"),
        (64, "not 3 windows of '.*', which has W = 64"),
        (176, "not 3 windows of '.*', which has W = 64"),
    ],
)
@pytest.mark.parametrize("profiles", [("stream-off-policy",), ("one-step-off", "partial-rollout")])
def test_groups_make_whole_steps_and_three_windows_and_those_of_a_hint_do(
    groups: int, said: str, profiles: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=f"{groups} groups are {said}") as refused:
        contest(*profiles, groups=groups)
    flag, number = refused.value.hint.split()
    assert flag == "--groups"
    assert contest(*profiles, groups=int(number)).groups == int(number) >= groups


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[rollout]\nn = 4", "different work: rollout.n is 8 and 4"),
        ('[model]\ncache_dir = "elsewhere"', "model.cache_dir"),
        ("[placement]\ncpus_per_worker = 2", "uses 2 CPU cores and 'other' 4"),
        ("[trainer]\nppo_mini_batch_size = 8", "trainer.ppo_mini_batch_size is 16 and 8"),
    ],
)
@pytest.mark.parametrize("baseline", ["colocate", "stale-samples"])
def test_other_work_or_resources_are_refused_and_the_sets_of_the_hint_make_them_the_same(
    toml: str, said: str, baseline: str, tmp_path: Path
) -> None:
    (tmp_path / "other.toml").write_text(f'extends = "partial-rollout"\n{toml}\n', encoding="utf-8")
    other = str(tmp_path / "other.toml")
    with pytest.raises(ConfigError, match=said) as refused:
        contest(other, baseline=baseline)
    words = shlex.split(refused.value.hint.removesuffix(" sets it for all of them"))
    assert set(words[::2]) == {"--set"}
    assert len(contest(other, baseline=baseline, sets=words[1::2]).entries) == 2


def test_what_the_bench_sets_itself_is_no_set() -> None:
    with pytest.raises(ConfigError, match=r"run\.seed") as refused:
        contest("partial-rollout", sets=["rollout.slots=32", "run.seed=4"])
    assert refused.value.hint == "use --seed"


OWN = """
extends = "partial-rollout"
[model]
path = "builtin:untaught"
[task]
source = "reasoning-gym:chain_sum"
[trainer]
ppo_mini_batch_size = 10
[rollout]
n = 4
workers = 2
min_workers = 1
interrupt = "recompute-kv"
[async_training]
on_stale = "requeue"
max_staleness = 2
[placement]
tasks = [["train"], ["prox"], ["rollout"]]
[algorithm]
old_logprobs = "recompute"
"""


@pytest.mark.parametrize(("keep_k", "window"), [(False, (4, 40)), (True, (1, 10))])
def test_a_profile_of_ones_own_is_compared_with_its_colocated_twin_at_the_first_try(
    keep_k: bool, window, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "my.toml").write_text(OWN, encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    sets = ["placement.device=cpu", "async_training.staleness_threshold=1"]
    twin, own = contest_of(None, [str(tmp_path / "my.toml")], directory=out, keep_k=keep_k, sets=sets).entries
    assert [twin.name, own.name] == ["my-colocate", "my"]
    assert (twin.mode, own.mode) == ("colocate", "partial-rollout")
    assert (twin.window_steps, twin.window_groups) == window
    assert twin.plan.cpus == own.plan.cpus == 4
    assert twin.profile.task == own.profile.task
    assert twin.profile.model == own.profile.model
    assert Path(twin.reference) == out / "my-colocate.toml"


@pytest.mark.parametrize(
    "keys",
    [
        "[placement]\nlend = true",
        "[async_training]\ntarget_kl = 0.02",
        '[async_training]\nmixed_versions = "reject"',
        "[trainer]\nwarmup_steps = 20",
        '[algorithm]\nadv_estimator = "gae"\n[critic]\nhead_start_steps = 20',
    ],
)
def test_what_has_no_meaning_in_turns_or_in_a_single_step_is_no_obstacle(keys: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(f'extends = "partial-rollout"\n{keys}\n', encoding="utf-8")
    made = contest_of(None, [str(tmp_path / "my.toml")], directory=tmp_path, sets=["placement.device=cpu"])
    assert [entry.mode for entry in made.entries] == ["colocate", "partial-rollout"]
    assert not made.warnings


def test_real_runs_are_checked_at_the_length_that_they_will_have(tmp_path: Path) -> None:
    """24 optimizer steps of 16 groups."""
    (tmp_path / "my.toml").write_text(
        'extends = "partial-rollout"\ntrainer.warmup_steps = 50\n', encoding="utf-8"
    )
    made = contest_of(None, [str(tmp_path / "my.toml")], directory=tmp_path, sets=["placement.device=cpu"])
    assert any("warmup_steps" in warning for warning in made.warnings)


def test_on_gpus_the_twin_takes_turns_on_as_many(tmp_path: Path) -> None:
    rollout = "[rollout]\nengine = 'vllm'\n[weights]\ntransport = 'nccl'\n[trainer]\nn_gpus_per_node = 2\n"
    gpus = f"{rollout}[placement]\ndevice = 'cuda'\ngpus = 8\nratio = '1:3'\n"
    (tmp_path / "my.toml").write_text(f'extends = "partial-rollout"\n{gpus}', encoding="utf-8")
    (tmp_path / "at.toml").write_text(COSTS, encoding="utf-8")
    at = load_workload(str(tmp_path / "at.toml"))
    twin, own = contest_of(None, [str(tmp_path / "my.toml")], directory=tmp_path, workload=at).entries
    assert (twin.plan.gpus, own.plan.gpus, twin.plan.trainer_workers) == (8, 8, 8)
    assert twin.profile.weights.transport == "object-store"


def test_the_length_suits_both_sides_unless_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(OWN, encoding="utf-8")
    own = [str(tmp_path / "my.toml")]
    assert contest_of(None, own, directory=tmp_path).groups == 390  # the next multiple of R = 10 from 384 on
    with pytest.raises(ConfigError, match="384 groups are no multiple of R = 10"):
        contest_of(None, own, directory=tmp_path, groups=384)
    assert not (tmp_path / "my-colocate.toml").exists()


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('extends = "colocate"', "'my' is colocated, like its baseline would be"),
        (
            'extends = "one-step-off"\n[reward_model]\npath = "judge"',
            "has a reward model, which needs its own resources",
        ),
    ],
)
def test_a_profile_without_a_twin_says_why(toml: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(toml, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as refused:
        contest_of(None, [str(tmp_path / "my.toml")], directory=tmp_path)
    assert refused.value.hint.startswith("--compare")


def test_k_is_kept_only_for_a_twin() -> None:
    with pytest.raises(ConfigError, match="--keep-k is for the baseline"):
        contest_of(None, ["partial-rollout"], keep_k=True)

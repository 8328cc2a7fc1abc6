"""Workloads whose times follow from a model and a GPU, and what their fits leave open."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.toml_files import shipped_workloads
from asyncrl_cli.simulate.costs import imbalance
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import (
    load_workload,
    miniature,
    profile_for,
    reference_sets,
    window_parts,
)
from asyncrl_cli.simulate.world import simulate, virtual_cluster

PHYSICAL = """
[profile.placement]
gpus = 4
[lengths]
median_tokens = 20.0
sigma = 0.5
[physics]
parameters = 30e9
active_parameters = 3e9
expert_ratio = 0.1
gpu_flop_per_s = 1e15
gpu_bytes_per_s = 3e12
bandwidth_efficiency = 0.5
launch_s = 0.003
decode_mfu = 0.5
train_mfu = 0.25
train_flop_per_parameter = 6.0
[memory]
gpu_memory_gib = 80.0
kv_bytes_per_token = 100_000
[training]
fixed_step_s = 2.0
[syncing]
parameter_bytes = 60e9
gather_bytes_per_s = 1e10
send_bytes_per_s = 1e10
load_bytes_per_s = 1e10
[[unknowns]]
key = "physics.train_mfu"
prior = [0.2, 0.5]
factors = [2.0, 8.0]
[[unknowns]]
key = "lengths.median_tokens"
prior = [30.0, 0.5]
factors = [0.5, 1.5]
"""


def loaded(tmp_path: Path, text: str = PHYSICAL) -> Workload:
    (tmp_path / "physical.toml").write_text(text, encoding="utf-8")
    return load_workload(str(tmp_path / "physical.toml"))


def test_times_follow_from_bytes_and_flop(tmp_path: Path) -> None:
    workload = loaded(tmp_path)
    placement = profile_for(
        workload, "partial-rollout", ["placement.gpus_per_rollout_worker=2"]
    ).profile.placement
    times, training = workload.on(placement).decoding, workload.training
    # 30 = dense + experts, 3 = dense + experts / 10: all experts 30, so nothing is left for the rest
    assert times.batch_step_s(0) == pytest.approx(0.003)
    assert times.experts_s == pytest.approx(60e9 / (2 * 1.5e12))
    assert times.step_s_per_sequence == pytest.approx(6e9 / (2 * 0.5e15))
    assert times.step_s_per_context_token == pytest.approx(100_000 / 3e12)
    assert training.s_per_token == pytest.approx(18e9 / 0.25e15)
    assert training.old_logprob_s_per_token == pytest.approx(6e9 / 0.25e15)
    assert training.fixed_step_s == 2.0


def test_a_draw_has_other_values_of_what_was_fitted(tmp_path: Path) -> None:
    workload = loaded(tmp_path)
    assert workload.drawn(0) is workload
    first, second = workload.drawn(1), workload.drawn(2)
    assert first.training.s_per_token == pytest.approx(workload.training.s_per_token / 2)
    assert (first.lengths.median_tokens, second.lengths.median_tokens) == (10.0, 30.0)
    assert second.physics is not None
    assert second.physics.train_mfu == 1.0, "a share stays one"
    assert second.training.fixed_step_s == 2.0


def test_a_time_that_is_computed_cannot_be_given_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.s_per_token is computed from \[physics\]"):
        loaded(tmp_path, PHYSICAL.replace("fixed_step_s = 2.0", "s_per_token = 1e-3"))
    with pytest.raises(ConfigError, match="decoding = 3: should be"):
        loaded(tmp_path, "decoding = 3\n" + PHYSICAL)
    with pytest.raises(ConfigError, match=r"physical\.toml: physics\.train_mfu = 2\.5: should be [^\n]*$"):
        loaded(tmp_path, PHYSICAL.replace("train_mfu = 0.25", "train_mfu = 2.5"))


@pytest.mark.slow
def test_every_published_row_has_a_profile_and_a_miniature_with_the_same_work_per_gpu() -> None:
    for name in shipped_workloads():
        workload = load_workload(name)
        for reference in workload.references if workload.physics else ():
            sets = reference_sets(reference)
            whole = profile_for(workload, reference.profile, sets, environ={}).profile
            small, factor = miniature(workload, whole)
            plans = [compile_job(profile, virtual_cluster(profile)) for profile in (whole, small)]
            windows = [Schedule.of(profile).window_groups for profile in (whole, small)]
            assert windows[0] / windows[1] == factor
            assert plans[0].trainer_workers / plans[1].trainer_workers == factor, (name, reference.source)
            assert plans[0].rollout_workers / plans[1].rollout_workers == factor, (name, reference.source)


def test_what_was_fitted_has_draws_around_its_best_value() -> None:
    for name in shipped_workloads():
        unknowns = load_workload(name).unknowns
        assert len({len(one.factors) for one in unknowns}) <= 1, name
        for one in unknowns:
            assert len(one.factors) > 20, (name, one.key)
            assert min(one.factors) < 1 < max(one.factors), (name, one.key)


def test_a_colocated_worker_spans_the_gpus_of_the_published_engine(tmp_path: Path) -> None:
    workload = loaded(tmp_path, PHYSICAL.replace("[physics]", "[physics]\ncolocated_gpus = 2"))
    profile = profile_for(workload, "colocate", ["run.train_steps=1"]).profile
    costs = simulate(profile, workload, groups=1).costs
    assert (costs.workers, costs.ranks) == (2, 4)
    assert costs.workload.decoding.experts_s == pytest.approx(60e9 / (2 * 1.5e12))


def test_the_fullest_rank_has_as_many_tokens_as_dealing_many_times_shows() -> None:
    rng = random.Random(0)
    for ranks, each in ((2, 128), (8, 64), (32, 16)):
        lengths = [int(rng.lognormvariate(6, 0.9)) + 200 for _ in range(4000)]
        ratios = []
        for _ in range(300):
            sums = [sum(rng.choices(lengths, k=each)) for _ in range(ranks)]
            ratios.append(max(sums) / statistics.fmean(sums))
        assert imbalance(lengths, ranks * each, ranks) == pytest.approx(statistics.fmean(ratios), rel=0.05)
    assert imbalance([10, 30], 100, ranks=1) == 1.0
    assert imbalance([10, 10], 100, ranks=8) == 1.0


def test_unequal_ranks_and_the_hosts_memory_make_an_update_longer(tmp_path: Path) -> None:
    given = loaded(tmp_path, PHYSICAL.replace("lengths]", "lengths]\nprompt_tokens = 0"))
    uneven, fetched = (
        given.model_copy(update={"training": given.training.model_copy(update=changes)})
        for changes in ({"gpus_per_rank": 1}, {"colocated_s": 3.0})
    )

    def train_s(workload: Workload, name: str) -> float:
        sets = ["async_training.require_batches=2", "async_training.trigger_parameter_sync_step=2"]
        profile = profile_for(workload, name, sets, environ={}).profile
        run = simulate(profile, workload, groups=6 * Schedule.of(profile).window_groups)
        return window_parts(run)["train"]

    assert train_s(uneven, "stale-samples") > train_s(given, "stale-samples")
    assert train_s(fetched, "colocate") == pytest.approx(train_s(given, "colocate") + 3.0)
    assert train_s(fetched, "stale-samples") == pytest.approx(train_s(given, "stale-samples"))

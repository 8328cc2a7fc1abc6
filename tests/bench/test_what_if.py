"""Which resource limits, what a change does, and how speed grows with GPUs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.bench.effects import Change, Effect, Interval, Scaling, limit
from asyncrl_cli.bench.results import read_results
from asyncrl_cli.bench.space import Setting
from asyncrl_cli.bench.what_if import (
    BATCH,
    WEIGHTS_READ,
    WhatIf,
    changes,
    effects,
    resources,
)
from asyncrl_cli.cli.app import run
from asyncrl_cli.cli.tune_answers import _print_effects
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.profile.arithmetic import window_groups_of
from asyncrl_cli.report.scaling import drawing
from asyncrl_cli.simulate.workload import Links, Workload
from asyncrl_cli.simulate.workload_files import load_workload, profile_for
from asyncrl_cli.simulate.world import virtual_cluster
from tests.simulate.small_workload import COSTS

Capture = pytest.CaptureFixture[str]

SIZES = """
[profile.trainer]
ppo_mini_batch_size = 2
[profile.rollout]
n = 4
slots = 16
[profile.async_training]
require_batches = 1
[profile.placement]
gpus = 4
[memory]
gpu_memory_gib = 1.0
kv_bytes_per_token = 1000
"""


def small(tmp_path: Path, *replaced: tuple[str, str]) -> Workload:
    text = SIZES + COSTS
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    return load_workload(str(tmp_path / "small.toml"))


def limits(tmp_path: Path, *replaced: tuple[str, str]) -> list[Effect]:
    workload = small(tmp_path, *replaced)
    profile = profile_for(workload, "partial-rollout").profile
    with ThreadPoolExecutor(1) as pool:
        return effects(pool, workload, "partial-rollout", (), resources(workload, profile), draws=1)


@pytest.mark.slow
def test_the_resource_that_limits_is_named(tmp_path: Path) -> None:
    slow_trainer = limits(tmp_path, ("s_per_token = 0.001", "s_per_token = 0.02"))
    assert limit(slow_trainer).startswith("trainer: arithmetic (")
    slow_steps = limits(tmp_path, ("step_s = 0.01", "step_s = 0.3"))
    assert limit(slow_steps).startswith("rollouts: weights read per decode step (")
    slow_gather = limits(tmp_path, ("gather_bytes_per_s = 1e8", "gather_bytes_per_s = 1e5"))
    assert limit(slow_gather).startswith("sync: rank 0 (")


@pytest.mark.slow
def test_a_cache_that_is_too_small_limits_the_rollouts(tmp_path: Path) -> None:
    # 0.9 GiB hold some 480 tokens of 2 MB, so a dozen sequences of 40
    little = ("kv_bytes_per_token = 1000", "kv_bytes_per_token = 2_000_000\nblock_tokens = 4")
    found = limits(tmp_path, ("step_s = 0.01", "step_s = 0.3"), ("slots = 16", "slots = 64"), little)
    savings = {effect.change.label: effect.saving for effect in found}
    assert savings["rollouts: KV memory"] > 0.1 > savings["rollouts: slots"]


def test_one_change_of_each_kind_is_tried(tmp_path: Path) -> None:
    workload = small(tmp_path)
    profile = profile_for(workload, "partial-rollout").profile
    tried = {one.label: one for one in changes(workload, profile)}
    splits = ("split 3:1 (trainer:rollout)", "split 1:3 (trainer:rollout)")
    kinds = {"K = 8", "K = 2", "eta = 1", "eta = 0.25", *splits, "slots = 8", "slots = 32"}
    assert kinds | {"dispatch by group", "+8 GPUs, divided as before", "longest response 48"} <= tried.keys()
    for one in tried.values():  # each is a profile that can be planned
        changed = profile_for(workload, "partial-rollout", one.sets).profile
        compile_job(changed, virtual_cluster(changed))


@pytest.mark.slow
def test_with_links_it_says_what_another_transport_or_encoding_would_do(tmp_path: Path) -> None:
    """A version takes 10 s over the network of two nodes, and with deltas 1 s."""
    workload = small(tmp_path)
    links = Links(
        gpus_per_node=2,
        node_bytes_per_s=workload.syncing.parameter_bytes / 10,
        **dict.fromkeys(("device_bytes_per_s", "group_bytes_per_s", "copy_bytes_per_s"), 1e15),
        **dict.fromkeys(("compare_bytes_per_s", "apply_bytes_per_s"), 1e15),
        changed_ratio=0.1,
    )
    workload = workload.model_copy(update={"links": links})
    sets = ["rollout.engine=vllm", "model.dtype=bfloat16"]
    profile = profile_for(workload, "on-policy-pipeline", sets).profile
    tried = [one for one in changes(workload, profile) if one.label in ("transport nccl", "encoding delta")]
    in_turns = profile_for(workload, "colocate", sets).profile  # whose syncs use no link
    assert not {one.label for one in tried} & {one.label for one in changes(workload, in_turns)}
    with ThreadPoolExecutor(1) as pool:
        found = effects(pool, workload, "on-policy-pipeline", sets, [Change(label=""), *tried])
    assert [one.error for one in found if one.ratio is None] == []
    seconds = {one.change.label: window_groups_of(profile) / one.groups_per_s.value for one in found}
    assert seconds[""] - seconds["encoding delta"] == pytest.approx(9.0, rel=0.05)
    assert seconds[""] - seconds["transport nccl"] == pytest.approx(10.0, rel=0.05)


def test_costs_of_decoding_that_are_not_known_apart_are_one_resource(tmp_path: Path) -> None:
    apart, together = (
        {one.label: one.factors for one in resources(workload, profile)}
        for workload in (
            small(tmp_path),
            small(tmp_path, ("step_s = 0.01", "step_s = 0.01\ntells_batch = false")),
        )
        for profile in [profile_for(workload, "partial-rollout").profile]
    )
    both = {label: factors for label, factors in apart.items() if label in (BATCH, WEIGHTS_READ)}
    merged = together.pop("rollouts: decode steps")
    assert merged == {key: factor for factors in both.values() for key, factor in factors.items()}
    assert together.keys() == apart.keys() - both.keys()


def test_the_setting_that_is_changed_is_shown(tmp_path: Path, capsys: Capture) -> None:
    workload = small(tmp_path)
    profile = profile_for(workload, "partial-rollout").profile
    setting = Setting.of(profile, compile_job(profile, virtual_cluster(profile)))
    one = Interval(value=1.0, low=1.0, high=1.0)
    as_it_is = Effect(change=Change(label="as it is"), groups_per_s=one, ratio=one, staleness=one, cost_s=one)
    _print_effects(WhatIf(workload=workload, profile="mine", setting=setting, effects=[as_it_is]))
    assert "as it is: split 2:2, K 4, batches 1, eta 0.5, slots 16, bound 1" in capsys.readouterr().out


@pytest.mark.slow
def test_changes_are_compared_with_the_same_draws(tmp_path: Path) -> None:
    workload, more = small(tmp_path), Change(label="more GPUs", sets=("placement.gpus=8",))
    with ThreadPoolExecutor(1) as pool:
        unchanged, same, faster, broken = effects(
            pool,
            workload,
            "partial-rollout",
            (),
            [Change(label="nothing"), more, Change(label="none", sets=("placement.gpus=1",))],
            draws=2,
        )
    assert unchanged.ratio == same.ratio == Interval(value=1.0, low=1.0, high=1.0)
    assert faster.ratio is not None
    assert faster.ratio.value > 1
    assert broken.ratio is None
    assert "GPU" in broken.error


def test_gpus_pay_until_twice_as_many_make_less_than_a_quarter_more() -> None:
    def effect(ratio: float) -> Effect:
        figure = Interval(value=ratio, low=ratio, high=ratio)
        return Effect(change=Change(label=""), groups_per_s=figure, ratio=figure)

    scaling = Scaling(profile="p", gpus=(32, 64, 128, 256), effects=[*map(effect, (1.0, 1.9, 3.0, 3.3))])
    assert scaling.linearity == pytest.approx([1.0, 0.95, 0.75, 3.3 / 8])
    assert scaling.enough_gpus == 128


def test_an_interval_holds_nine_of_ten_normal_values() -> None:
    one = Interval.of([8.0, 12.5])  # logarithms 2.079 and 2.526: mean 2.303, deviation 0.316
    assert (one.value, one.low, one.high) == pytest.approx((10.0, 5.95, 16.8), rel=0.01)
    assert Interval.of([0.0, 0.0]) == Interval(value=0.0, low=0.0, high=0.0)  # on-policy


def test_a_chart_of_one_size_has_its_point() -> None:
    figure = Interval(value=2.0, low=1.0, high=3.0)
    base = Effect(change=Change(label=""), groups_per_s=figure, ratio=figure)
    failed = Effect(change=Change(label=""), error="too many")
    assert "<polyline" in drawing([Scaling(profile="p", gpus=(4, 8), effects=[base, failed])])


def test_a_scale_is_at_least_two_numbers_and_a_chart_a_new_page(tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "scaling.html"
    page.write_text("mine", encoding="utf-8")
    for words, message in (
        (["--scale", "32"], "--scale 32 is no list of at least two numbers of GPUs"),
        (["--scale", "32,x"], "--scale 32,x is no list"),
        (["--scale", "32,64", "--out", "a.toml"], "a.toml: the file has to end in .html"),
        (["--what-if", "--out", "a.toml"], "--out has no effect with --what-if"),
        (["--what-if", "--scale", "32,64"], "--what-if has no effect with --scale"),
        (["--scale", "32,64", "--gpus", "8"], "--gpus has no effect with --scale"),
        (["--scale", "32,64", "--out", str(page)], "is not overwritten"),
        (["--scale", "32,64", "--out", str(tmp_path / "none/x.html")], "there is no directory"),
        (["--scale", "32,64"], "laptop-tiny runs on CPUs, where 32 GPUs mean nothing"),
        (["--what-if", "--max-staleness", "2"], "--max-staleness has no effect with --what-if"),
    ):
        assert run(["tune", "laptop-tiny", *words]) == (4 if str(tmp_path) in words[-1] else 2)
        assert message in " ".join(capsys.readouterr().err.split())
    assert page.read_text(encoding="utf-8") == "mine"


@pytest.mark.slow
def test_tune_answers_both_questions_and_draws_the_second(tmp_path: Path, capsys: Capture) -> None:
    file, page = tmp_path / "small.toml", tmp_path / "scaling.html"
    file.write_text(SIZES + COSTS, encoding="utf-8")
    assert run(["tune", str(file), "--what-if", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["simulated"]
    assert (answer["setting"]["slots"], answer["setting"]["split"]) == (16, "2:2")
    assert answer["effects"][0]["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    asked = ["tune", str(file), "--scale", "2,4,8", "--profile", "partial-rollout", "--out", str(page)]
    assert run(asked) == 0
    shown, drawn = capsys.readouterr().out, page.read_text(encoding="utf-8")
    assert "partial-rollout: more pay up to 8 GPUs" in shown
    assert drawn.count("<polyline") == 1
    assert "SIMULATED" in drawn


@pytest.mark.slow
def test_a_simulated_bench_says_what_limits_each_profile_and_draws_its_speed_over_gpus(
    tmp_path: Path, capsys: Capture
) -> None:
    small(tmp_path, ("gather_bytes_per_s = 1e8", "gather_bytes_per_s = 1e5"))
    out = tmp_path / "bench"
    words = ["bench", "--simulate", str(tmp_path / "small.toml"), "--groups", "48", "--out", str(out)]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "SIMULATED, partial-rollout: limited by sync: rank 0 (" in said
    found = json.loads((out / "results.json").read_text())
    assert [one["gpus"] for one in found["scalings"]] == [[4, 8, 16], [4, 8, 16]]
    again = read_results(out / "results.json").scalings
    assert [one.linearity for one in again] == [one["linearity"] for one in found["scalings"]]
    assert drawing(again) in (out / "report.html").read_text()
    found["scalings"][0]["effects"][0]["ratio"] = {"value": "much"}
    (out / "results.json").write_text(json.dumps(found))
    with pytest.raises(RefusedError, match="is malformed"):
        read_results(out / "results.json")

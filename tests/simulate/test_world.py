from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.events import Observer, StepRecord
from asyncrl_cli.measure.states import Span, State
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.costs import Costs, Spent
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import WINDOW, profile_for, residuals, window_parts
from asyncrl_cli.simulate.world import simulate, virtual_cluster
from tests.job.test_memory_vllm import planned
from tests.llama import LLAMA_7B

PROFILES = ("on-policy-pipeline", "stream-off-policy", "stale-samples", "partial-rollout", "one-step-off")


def workload(**changes: Any) -> Workload:
    """4 GPUs, 100 tokens each at 10 ms: a response takes exactly 1 s, and 4 groups of 2 train in 0.8 s on 2
    GPUs."""
    values: dict[str, Any] = {
        "name": "exact",
        "profile": {
            "trainer": {"ppo_mini_batch_size": 4},
            "rollout": {"n": 2, "slots": 8, "max_response_tokens": 1000},
            "placement": {"device": "cuda", "gpus": 4},
        },
        "profiles": {},
        "lengths": {"median_tokens": 100.0, "sigma": 0.0, "prompt_tokens": 0},
        "decoding": {"step_s": 0.01, "step_s_per_sequence": 0.0},
        "training": dict(
            s_per_token=1e-3, reference_gpus=2, old_logprob_s_per_token=5e-4, step_overhead_s=0.05
        ),
        "syncing": {
            "parameter_bytes": 1e6,
            "gather_bytes_per_s": 1e7,
            "send_bytes_per_s": 2e6,
            "load_bytes_per_s": 5e6,
            "colocated_s": 0.3,
        },
    }
    return Workload.model_validate(values | changes)


class Spans(Observer):
    """Keeps the executors' spans."""

    def __init__(self) -> None:
        self.spans: defaultdict[str, list[Span]] = defaultdict(list)

    def step(self, record: StepRecord) -> None:
        for name, spans in record.spans.items():
            self.spans[name] += spans


def profile(name: str, work: Workload, *sets: str, groups: int = 40) -> Profile:
    return profile_for(work, name, sets, groups=groups, environ={}).profile


@pytest.mark.parametrize("name", [*PROFILES, "colocate"])
def test_every_profile_trains_its_groups_within_its_staleness(name: str) -> None:
    work = workload()
    chosen = profile(name, work)
    kept = Spans()
    run = simulate(chosen, work, observers=[kept])
    assert run.error is None
    assert run.lines[-1]["groups_trained"] == 40
    oldest = max(line["staleness/max"] for line in run.lines)
    assert oldest <= (1 if chosen.async_training.staleness_threshold else 0)
    assert kept.spans["trainer-0"]


def test_colocates_window_is_the_sum_of_its_phases() -> None:
    work = workload()
    sets = 'algorithm.old_logprobs="recompute"', "async_training.require_batches=2"
    parts = window_parts(simulate(profile("colocate", work, *sets), work))
    # 8 groups of 2 on 4 workers: all at once, 100 steps of 10 ms. 1600 tokens at 1 ms on 2 GPUs take 0.8 s on
    # 4, and the old logprobs of the second mini-batch (800 tokens) 0.2 s.
    assert parts["wait_data"] == pytest.approx(1.0, abs=0.05)
    assert parts["train"] == pytest.approx(0.8)
    assert parts["old_logprob"] == pytest.approx(0.2)
    assert parts["gather"] == pytest.approx(0.3)
    assert parts["other"] == pytest.approx(0.05, abs=0.01)


def test_processes_slow_each_other_where_more_compute_at_once_than_there_are_cores() -> None:
    """4 colocated workers or ranks on 3 cores, 2 and 2 apart: these take turns in this profile, as well."""
    plain = workload()
    crowded = plain.model_copy(update={"cores": 3})
    before, after = (window_parts(simulate(profile("colocate", work), work)) for work in (plain, crowded))
    assert after["wait_data"] == pytest.approx(before["wait_data"] * 4 / 3, rel=0.02)
    assert after["train"] == pytest.approx(before["train"] * 4 / 3)
    apart = [window_parts(simulate(profile("on-policy-pipeline", work), work)) for work in (plain, crowded)]
    assert apart[0] == apart[1]


def test_apart_the_trainer_has_its_share_of_the_gpus() -> None:
    work = workload()
    parts = window_parts(simulate(profile("on-policy-pipeline", work), work))
    assert parts["train"] == pytest.approx(0.8)  # 800 tokens at 1 ms on the 2 GPUs that they are measured on
    assert parts["gather"] == pytest.approx(0.1)
    assert parts["wait_data"] == pytest.approx(1.0 + 0.5 + 0.2, abs=0.06)  # the response, after send and load


def test_a_synchronous_trainer_waits_for_send_and_load_in_its_gather() -> None:
    work = workload()
    parts = window_parts(simulate(profile("on-policy-pipeline", work, "weights.mode=sync"), work))
    assert parts["gather"] == pytest.approx(0.1 + 0.5 + 0.2, abs=0.01)
    assert parts["wait_data"] == pytest.approx(1.0, abs=0.06)  # the response alone
    assert parts["train"] == pytest.approx(0.8)


@pytest.mark.parametrize(("dual_buffer", "pause_s"), [("true", 0.2), ("false", 0.7)])
def test_without_a_second_buffer_workers_stand_still_for_the_send_too(
    dual_buffer: str, pause_s: float
) -> None:
    work = workload()
    name = "partial-rollout"  # rollouts run while weights arrive
    kept = Spans()
    run = simulate(profile(name, work, f"weights.dual_buffer={dual_buffer}"), work, observers=[kept])
    keys = ("sync/send_s", "sync/load_s", "sync/pause_s")
    assert {tuple(round(line[key], 6) for key in keys) for line in run.lines[1:]} == {(0.5, 0.2, pause_s)}
    loading = [span.end_s - span.start_s for span in kept.spans["rollout-0"] if span.state is State.LOADING]
    assert max(loading) == pytest.approx(pause_s)  # a span ends where a report cuts it


def test_capacities_are_those_of_full_workers_and_of_the_trainer_alone() -> None:
    work = workload()
    run = simulate(profile("partial-rollout", work), work)
    capacities = run.costs.capacities(0, run.lines[-1]["groups_trained"])
    assert capacities.rollout_tokens_per_s == pytest.approx(2 * 8 / 0.01)
    assert capacities.trainer_tokens_per_s == pytest.approx(1000.0)
    assert not capacities.colocated


def test_the_capacity_of_workers_is_that_of_the_speeds_that_they_drew() -> None:
    alone = simulate(profile("partial-rollout", workload()), workload()).costs
    unlike = replace(alone, speeds=(0.5, 2.0))  # a step takes half as long, and twice
    assert unlike.capacities(0, 4).rollout_tokens_per_s == pytest.approx((2 + 0.5) * 8 / 0.01)


def test_the_capacity_of_a_stretch_is_that_of_the_steps_in_it() -> None:
    alone = simulate(profile("partial-rollout", workload()), workload()).costs
    spent = [
        Spent(),
        Spent(seconds=2.0, response_tokens=100, trajectories=16),
        Spent(seconds=5.0, response_tokens=400, trajectories=32),
    ]
    stretch = replace(alone, spent=spent)
    found = [stretch.capacities(*edges).trainer_tokens_per_s for edges in ((0, 4), (4, 8), (0, 8))]
    assert found == [50.0, 100.0, 80.0]


WEIGHT_BYTES = 1_000_000  # of the workload above


def memory(tokens: int, **changes: Any) -> dict[str, Any]:
    """Memory whose half holds the weights and so many tokens of 1,000 bytes each."""
    gib = 2 * (WEIGHT_BYTES + 1000 * tokens) / 2**30
    return (
        dict(gpu_memory_gib=gib, gpu_memory_utilization=0.5, kv_bytes_per_token=1000, block_tokens=10)
        | changes
    )


def test_a_small_cache_preempts_and_makes_the_window_longer() -> None:
    sets = ["rollout.max_response_tokens=100"]
    works = workload(), workload(memory=memory(800)), workload(memory=memory(150))
    unlimited, plenty, little = (simulate(profile("colocate", work, *sets), work) for work in works)
    assert not any("rollouter/preemptions" in line for line in unlimited.lines)
    assert window_parts(plenty) == window_parts(unlimited)
    assert sum(line["rollouter/preemptions"] for line in plenty.lines) == 0
    assert sum(line["rollouter/preemptions"] for line in little.lines) > 0
    assert window_parts(little)[WINDOW] > window_parts(unlimited)[WINDOW]


def test_the_cache_has_what_a_plan_gives_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B), encoding="utf-8")
    estimate = planned("rollout.gpu_memory_utilization=0.7", model=str(tmp_path), gpus=2, gpu_gib=80)
    items = [item for item in estimate.items if item.role == ROLLOUT and item.kind == "device"]
    held = {item.what: item.num_bytes for item in items}
    cache_bytes = held.pop("engine's cache")
    sizes = {"gpu_memory_gib": 80, "gpu_memory_utilization": 0.7, "kv_bytes_per_token": 524_288}
    syncing = workload().syncing.model_dump() | {"parameter_bytes": sum(held.values())}
    work = workload(memory=sizes, syncing=syncing)
    costs = Costs(workload=work, profile=profile("partial-rollout", work), ranks=1, workers=1)
    assert costs.worker_times().cache.blocks == cache_bytes // (524_288 * 16)


def test_a_gather_by_rows_is_shared_among_the_ranks_and_one_of_whole_weights_is_not() -> None:
    def gather_s(ranks: int, *sets: str, gathers_rows: bool = True) -> float:
        work = workload(syncing=workload().syncing.model_dump() | {"gathers_rows": gathers_rows})
        shape = profile_for(work, "partial-rollout", sets, environ={}).profile
        return Costs(workload=work, profile=shape, ranks=ranks, workers=1).trainer_times().gather_s

    # 1 MB at 10 MB/s, measured with two ranks
    assert [gather_s(ranks) for ranks in (1, 2, 8)] == pytest.approx([0.2, 0.1, 0.025])
    assert [gather_s(ranks, gathers_rows=False) for ranks in (1, 8)] == pytest.approx([0.1, 0.1])
    assert gather_s(8, "weights.transport=disk") == pytest.approx(0.2)


def test_a_cache_that_cannot_hold_one_response_is_refused() -> None:
    work = workload(memory=memory(250))
    with pytest.raises(ConfigError, match="too little for one sequence of 1000 tokens"):
        simulate(profile("partial-rollout", work), work)


def test_the_same_prompts_have_the_same_lengths_in_every_profile() -> None:
    work = workload(lengths={"median_tokens": 60.0, "sigma": 0.8, "prompt_variance_ratio": 0.5})

    def tokens(name: str, seed: int) -> int:
        return simulate(profile(name, work), work, seed=seed).lines[-1]["tokens_trained"]

    same = {tokens(name, 3) for name in ("colocate", "on-policy-pipeline", "stream-off-policy")}
    assert len(same) == 1
    assert tokens("colocate", 4) not in same


def test_a_run_repeats_itself() -> None:
    work = workload(lengths={"median_tokens": 60.0, "sigma": 0.8})
    first, again = (simulate(profile("partial-rollout", work), work, seed=1) for _ in range(2))
    assert first.lines == again.lines


def test_progress_is_told_and_its_error_ends_the_run() -> None:
    told: list[int] = []
    work = workload()

    class Told(Observer):
        def step(self, record: StepRecord) -> None:
            told.append(record.ledger["trained"])
            if record.ledger["trained"] == 16:
                raise KeyError("enough")

    simulate(profile("colocate", work), work, groups=12, observers=[Told()])
    assert told == [4, 8, 12]
    with pytest.raises(KeyError, match="enough"):
        simulate(profile("colocate", work), work, observers=[Told()])


def test_residuals_compare_every_part_of_every_reference() -> None:
    row = {"profile": "on-policy-pipeline", "window_time_s": 5.2, "parts_s": {"train": 1.6}}
    work = workload(references=[row])
    found = residuals(work, work.references[0], windows=2)
    assert [(residual.part, residual.measured_s) for residual in found] == [("window", 5.2), ("train", 1.6)]
    assert found[0].ratio == pytest.approx(0.5, abs=0.02)
    assert found[1].ratio == pytest.approx(0.5)


STAGE_KEYS = (
    *("timing/step_s", "timing/train_s", "timing/critic_s"),
    *("timing/ref_s", "ref/idle_ratio", "timing/teacher_s", "teacher/idle_ratio"),
)
TRAINER_OF_ONE, THREE_WORKERS = "placement.trainer_workers=1", ("placement.gpus=4", "rollout.workers=3")


def means(*sets: str) -> dict[str, float]:
    """Of the figures of stages, over the second half of a run."""
    loaded = profile_for(workload(), "partial-rollout", ("placement.gpus=5", *sets), groups=400)
    ran = simulate(loaded.profile, workload(), groups=400)
    assert ran.error is None
    lines = ran.lines[len(ran.lines) // 2 :]
    keys = [key for key in STAGE_KEYS if key in lines[0]]
    return {key: sum(line[key] for line in lines) / len(lines) for key in keys}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "asked"), [("ref", "algorithm.use_kl_loss=true"), ("teacher", "teacher.path=/a/teacher")]
)
def test_a_reference_or_a_teacher_of_its_own_takes_its_time_beside_training(task, asked):
    """On one GPU a step trains for 1.6 s, and the other model's pass takes a third of that: it lengthens the
    step, unless it has a GPU of its own."""
    tasks = f'placement.tasks=[["train"],["{task}"],["rollout"]]'
    without_s = means(TRAINER_OF_ONE, *THREE_WORKERS)["timing/step_s"]
    together = means(asked, TRAINER_OF_ONE, *THREE_WORKERS)
    apart = means(asked, tasks, "placement.ratios=[1,1,3]")
    score_s = together[f"timing/{task}_s"]
    assert score_s == pytest.approx(together["timing/train_s"] / 3)
    assert together["timing/step_s"] > without_s + 0.9 * score_s
    assert apart["timing/step_s"] < without_s + 0.1 * score_s
    assert f"timing/{task}_s" not in apart
    assert apart[f"{task}/idle_ratio"] == pytest.approx(1 - score_s / apart["timing/step_s"], abs=0.1)


@pytest.mark.slow
def test_a_critic_of_its_own_learns_beside_the_policy_and_its_values_come_after():
    """Values take a third of the policy's training, and what the critic learns as long as that."""
    gae, tasks = "algorithm.adv_estimator=gae", 'placement.tasks=[["train"],["critic"],["rollout"]]'
    without = means(TRAINER_OF_ONE, *THREE_WORKERS)
    together = means(gae, TRAINER_OF_ONE, *THREE_WORKERS)
    apart = means(gae, tasks, "placement.ratios=[1,1,3]")
    values_s = together["timing/critic_s"]
    assert together["timing/train_s"] == pytest.approx(2 * without["timing/train_s"], rel=0.05)
    assert values_s == pytest.approx(without["timing/train_s"] / 3, rel=0.05)
    assert together["timing/step_s"] == pytest.approx(without["timing/step_s"] + 4 * values_s, rel=0.05)
    assert apart["timing/step_s"] == pytest.approx(without["timing/step_s"] + values_s, rel=0.1)
    assert "timing/critic_s" not in apart


@pytest.mark.slow
def test_an_epoch_more_costs_the_trainer_as_much_as_the_first():
    """Also the critic's learning; its values are computed once."""
    gae = "algorithm.adv_estimator=gae"
    one = means(gae, TRAINER_OF_ONE, *THREE_WORKERS)
    three = means(gae, "trainer.ppo_epochs=3", TRAINER_OF_ONE, *THREE_WORKERS)
    assert three["timing/train_s"] == pytest.approx(3 * one["timing/train_s"], rel=0.05)
    assert three["timing/critic_s"] == pytest.approx(one["timing/critic_s"], rel=0.05)


def test_prox_apart_hides_the_pass_behind_training_where_a_window_has_several_steps():
    """With K = 4 a step's groups are scored while the one before is trained; the trainer has no pass of its
    own then."""
    sets = "algorithm.old_logprobs=recompute", "async_training.trigger_parameter_sync_step=4", TRAINER_OF_ONE

    def lines(*more: str) -> list[dict[str, Any]]:
        chosen = profile("stale-samples", workload(), *sets, *more, groups=96)
        ran = simulate(chosen, workload(), groups=96)
        assert ran.error is None
        return ran.lines[len(ran.lines) // 2 :]

    together = lines(*THREE_WORKERS)
    tasks = 'placement.tasks=[["train"],["prox"],["rollout"]]', "placement.ratios=[1,1,3]"
    apart = lines("placement.gpus=5", *tasks)
    assert sum(line["timing/old_logprob_s"] for line in apart) == 0
    steps_s = [sum(line["timing/step_s"] for line in lines) for lines in (apart, together)]
    assert steps_s[0] < 0.93 * steps_s[1]
    assert all(0 < line["prox/idle_ratio"] <= 1 for line in apart)


def test_the_trainer_reports_the_kl_of_its_tokens_ages_if_a_governor_needs_it():
    """One step off, from the second window on every token is one version old: 0.001 + 0.012 nats."""
    work = workload()
    governed = simulate(profile("one-step-off", work, "async_training.target_kl=0.02"), work)
    assert governed.error is None
    found = [(line["window"], line["staleness/mean"], line["correction/kl"]) for line in governed.lines]
    for window, age, kl in found:
        assert (age, kl) == ((1, pytest.approx(0.013)) if window else (0, pytest.approx(0.001)))
    assert not any("correction/kl" in line for line in simulate(profile("one-step-off", work), work).lines)


def test_the_assumed_kl_is_that_of_measured_runs():
    """docs/learning.md: mean versions old and KL of three corrections, at eta 1, 4 and 8."""
    text = (Path(__file__).parents[2] / "docs" / "learning.md").read_text()
    table = text[text.index("versions old / KL") :].splitlines()
    names = ("naive PPO", "token TIS", "decoupled PPO")
    rows = [
        line.split("|")[3:6] for line in table[:8] if line.startswith(tuple(f"| {name} |" for name in names))
    ]
    points = [tuple(map(float, cell.split("/")[:2])) for row in rows for cell in row]
    assert len(points) == 9
    drift = workload().drift
    ratios = [(drift.fresh_kl + drift.version_kl * age**drift.exponent) / kl for age, kl in points]
    assert min(ratios) > 0.4, "token TIS at eta 8"
    assert max(ratios) < 2.1, "naive PPO at eta 1"
    assert 0.85 < math.prod(ratios) ** (1 / 9) < 1.15


def test_evals_take_workers_time_if_they_are_asked_for() -> None:
    def windows_s(*sets: str) -> tuple[float, float]:
        profile = profile_for(workload(), "partial-rollout", sets, groups=48, environ={}).profile
        parts = window_parts(simulate(profile, workload()))
        return parts[WINDOW], parts["eval"]

    window_s, eval_s = windows_s()
    assert eval_s == 0
    # 40 answers of 1 s on the slots that two workers have beside their groups
    longer_s, eval_s = windows_s("eval.every_versions=1", "eval.prompts=40")
    assert eval_s > 0
    assert longer_s > window_s + 0.5


def test_a_run_on_cpus_that_numbers_only_its_rollout_workers_can_be_simulated():
    profile = load("base", ["run.train_steps=4", "rollout.workers=2"]).profile
    job = compile_job(profile, virtual_cluster(profile))
    assert (job.device, [(role.role, role.workers) for role in job.roles]) == (
        "cpu",
        [(TRAINER, 1), (ROLLOUT, 2)],
    )

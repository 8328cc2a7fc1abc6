from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.events import Event, Observer
from asyncrl_cli.observe.live_status import facts_of
from asyncrl_cli.observe.observers import StartStatus
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.resolved import to_document, to_toml
from asyncrl_cli.simulate.calibration import calibrate
from asyncrl_cli.simulate.observations import Point, Sharing, fit_line
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for, residuals
from asyncrl_cli.simulate.world import simulate

PARAMETER_BYTES = 3e6


def truth(cores: int | None = 1) -> Workload:
    """Trainer and rollouts share a core; loads pause their worker, too."""
    return Workload.model_validate(
        dict(
            profile=dict(
                trainer=dict(ppo_mini_batch_size=8), rollout=dict(n=4, slots=32), placement=dict(device="cpu")
            ),
            cores=cores,
            profiles={},
            lengths=dict(median_tokens=20.0, sigma=0.8, prompt_tokens=0),
            decoding=dict(step_s=0.004, step_s_per_sequence=0.0004),
            training=dict(
                s_per_token=4e-4,
                step_s=0.1,
                old_logprob_s_per_token=1.5e-4,
                step_overhead_s=0.01,
            ),
            syncing=dict(
                parameter_bytes=PARAMETER_BYTES,
                gather_bytes_per_s=2e8,
                send_bytes_per_s=1e8,
                load_bytes_per_s=1e9,
                pause_s=0.02,
            ),
        )
    )


class Events(Observer):
    """Keeps what events.jsonl would hold."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def event(self, event: Event) -> None:
        # simulated weights have none
        size = {"num_bytes": int(PARAMETER_BYTES)} if event.name == "published" else {}
        self.lines.append({"time_s": event.time_s, "event": event.name, **event.fields, **size})


def write_run(directory: Path, workload: Workload, name: str, steps: int, *sets: str) -> Path:
    """What a real run of that workload would have left behind."""
    loaded = profile_for(workload, name, [f"run.train_steps={steps}", *sets], environ={})
    events = Events()
    run = simulate(loaded.profile, workload, observers=(events,))
    assert run.error is None
    directory.mkdir()
    document = to_document(loaded.profile, loaded.origins)
    (directory / "config.resolved.json").write_text(json.dumps(document), encoding="utf-8")
    (directory / "profile.toml").write_text(to_toml(loaded.profile, loaded.origins), encoding="utf-8")
    write_lines(directory / "metrics.jsonl", run.lines)
    write_lines(directory / "events.jsonl", events.lines)
    facts = replace(facts_of(loaded.profile, directory, 1), cores=workload.cores)
    StartStatus(directory / "status.json", facts)
    return directory


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["partial-rollout", "stale-samples", "on-policy-pipeline"])
def test_a_run_on_a_shared_machine_is_predicted_back(tmp_path: Path, name: str) -> None:
    found = calibrate(write_run(tmp_path / "run", truth(), name, 60))
    window = next(residual for residual in residuals(found, found.references[0]) if residual.part == "window")
    assert window.ratio == pytest.approx(1.0, abs=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["partial-rollout", "one-step-off"])
def test_work_on_shared_cores_is_found_as_it_would_be_on_cores_of_its_own(tmp_path: Path, name: str) -> None:
    known, found = truth(), calibrate(write_run(tmp_path / "run", truth(), name, 80))
    full = [work.decoding.batch_step_s(10) for work in (known, found)]
    assert full[1] == pytest.approx(full[0], rel=0.05)
    step = [work.training.step_s + 800 * work.training.s_per_token for work in (known, found)]
    assert step[1] == pytest.approx(step[0], rel=0.05)
    assert found.cores == 1


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """What is found from a run on machines of its own."""
    work = truth(cores=None)
    return calibrate(write_run(tmp_path_factory.mktemp("apart") / "run", work, "partial-rollout", 40))


def test_a_run_on_machines_of_its_own_gives_back_what_made_it(apart: Workload) -> None:
    found = apart
    assert found.training.s_per_token == pytest.approx(4e-4, rel=0.05)
    assert found.training.step_s == pytest.approx(0.1, rel=0.3)
    full = found.decoding.step_s + 24 * found.decoding.step_s_per_sequence
    assert full == pytest.approx(0.004 + 24 * 0.0004, rel=0.05)  # the pauses of loads are not in it
    assert found.syncing.load_bytes_per_s == pytest.approx(1e9)
    assert found.syncing.pause_s == pytest.approx(0.02)
    # lognormal, cut at 96: its limited expected value
    assert statistics.fmean(found.lengths.response_tokens) == pytest.approx(26.5, rel=0.1)


@pytest.mark.slow
def test_it_predicts_profiles_that_it_was_not_calibrated_on(apart: Workload) -> None:
    known, found = truth(cores=None), apart
    for name in ("stale-samples", "on-policy-pipeline", "one-step-off", "colocate"):
        times_s = []
        for work in (known, found):
            profile = profile_for(work, name, ["run.train_steps=30"], environ={}).profile
            times_s.append(simulate(profile, work).lines[-1]["time_s"])
        assert times_s[1] / times_s[0] == pytest.approx(1.0, abs=0.15), name


@pytest.mark.slow
def test_a_run_with_tools_is_predicted_back_from_its_mean_turns(tmp_path: Path) -> None:
    turns = dict(
        number=dict(values=(2, 3, 4)), tool_s=dict(median=0.4, sigma=0.3), result_tokens=dict(median=5.0)
    )
    given = truth(cores=None).model_dump() | {"turns": turns}
    sets = ["env.max_context_tokens=4000", "rollout.hold_slots=false"]
    made = Workload.model_validate(given)
    found = calibrate(write_run(tmp_path / "run", made, "partial-rollout", 40, *sets))
    assert found.turns is not None
    assert found.turns.number.values == (3.0,)
    assert found.turns.tool_s.values[0] == pytest.approx(0.4 * math.exp(0.3**2 / 2), rel=0.1)
    assert statistics.fmean(found.lengths.response_tokens) == pytest.approx(26.5, rel=0.1)
    assert found.profile["rollout"]["hold_slots"] is False
    window = next(residual for residual in residuals(found, found.references[0]) if residual.part == "window")
    assert window.ratio == pytest.approx(1.0, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("window_steps", [1, 4])
def test_old_logprobs_cost_what_they_cost_per_scored_token(tmp_path: Path, window_steps: int) -> None:
    sets = ["algorithm.old_logprobs=recompute", "async_training.require_batches=2"]
    sets.append(f"async_training.trigger_parameter_sync_step={window_steps}")
    work = truth(cores=None)
    found = calibrate(write_run(tmp_path / "run", work, "stream-off-policy", 24, *sets))
    assert found.training.old_logprob_s_per_token == pytest.approx(1.5e-4, rel=1e-6)
    assert "old_logprob" not in found.notes


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_scorers_cost_what_they_cost_per_token_of_the_trainers_devices(tmp_path: Path, apart: bool) -> None:
    sets = ["algorithm.old_logprobs=recompute", "algorithm.use_kl_loss=true"]
    sets += ["async_training.require_batches=2", "async_training.trigger_parameter_sync_step=1"]
    if apart:
        sets += ['placement.tasks=[["train"],["ref"],["prox"],["rollout"]]', "placement.ratios=[2,1,1,2]"]
    else:
        sets += ["placement.trainer_workers=2", "rollout.workers=2"]
    work = truth(cores=None)
    training = work.training.model_copy(update={"ref_s_per_token": 3e-4, "reference_gpus": 2})
    work = work.model_copy(update={"training": training})
    found = calibrate(write_run(tmp_path / "run", work, "stream-off-policy", 24, *sets))
    assert found.training.old_logprob_s_per_token == pytest.approx(1.5e-4, rel=0.01)
    assert found.training.ref_s_per_token == pytest.approx(3e-4, rel=0.01)
    assert found.training.reward_s_per_token is None


@pytest.mark.slow
def test_scorers_of_their_own_are_among_those_who_share_cores(tmp_path: Path) -> None:
    """2 ranks, 2 scorers' processes and 2 workers on 2 cores: without the scorers, theirs would seem to take
    2.8 times as long, decoding and training 1.5 times."""
    work = truth(cores=2)
    training = work.training.model_copy(update={"ref_s_per_token": 3e-4, "reference_gpus": 2})
    work = work.model_copy(update={"training": training})
    sets = ["algorithm.old_logprobs=recompute", "algorithm.use_kl_loss=true"]
    sets += ['placement.tasks=[["train"],["ref"],["prox"],["rollout"]]', "placement.ratios=[2,1,1,2]"]
    sets += ["async_training.trigger_parameter_sync_step=4"]
    found = calibrate(write_run(tmp_path / "run", work, "one-step-off", 40, *sets))
    for cost_s in (
        lambda one: one.training.ref_s_per_token,
        lambda one: one.training.old_logprob_s_per_token,
        lambda one: one.training.step_s + 800 * one.training.s_per_token,
        lambda one: one.decoding.batch_step_s(10),
    ):
        assert cost_s(found) == pytest.approx(cost_s(work), rel=0.1)


@pytest.mark.slow
def test_what_one_run_cannot_tell_is_in_the_notes(tmp_path: Path) -> None:
    found = calibrate(write_run(tmp_path / "run", truth(), "colocate", 20))
    assert found.training.old_logprob_s_per_token == 0.0
    words = ["scaling_exponent 1", "prompt_variance_ratio 0", "rewards", "old_logprob_s_per_token 0"]
    assert [word for word in (*words, "shared 1 core") if word not in found.notes] == []
    for device, is_said in (("cpu", True), ("auto", False)):  # with numbers of GPUs, auto is a GPU
        sets = [f"placement.device={device}", "placement.gpus=2", "placement.ratio=1:1"]
        found = calibrate(write_run(tmp_path / device, truth(cores=None), "partial-rollout", 10, *sets))
        assert ("How many cores its processes shared is unknown" in found.notes) == is_said


@pytest.mark.slow
def test_its_row_is_the_run_itself(tmp_path: Path) -> None:
    sets = ["rollout.interrupt=recompute-kv", "async_training.max_staleness=2"]
    sets.append("algorithm.old_logprobs=recompute")
    found = calibrate(write_run(tmp_path / "run", truth(), "partial-rollout", 20, *sets))
    row = found.references[0]
    assert row.profile == "partial-rollout"
    assert row.set == {
        "algorithm": {"old_logprobs": "recompute"},
        "rollout": {"interrupt": "recompute-kv"},
        "async_training": {"max_staleness": 2},
    }
    again = calibrate(write_run(tmp_path / "again", truth(), "colocate", 20))
    assert (again.references[0].profile, again.references[0].set) == ("colocate", {})


@pytest.mark.slow
def test_a_row_of_a_profile_of_ones_own_points_at_the_run(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "colocate"\n', encoding="utf-8")
    directory = write_run(tmp_path / "run", truth(cores=None), str(mine), 80)
    found = calibrate(directory)
    assert found.references[0].profile == str(directory / "profile.toml")
    assert load(found.references[0].profile, environ={}).profile.placement.colocate
    assert residuals(found, found.references[0], windows=60)[0].ratio == pytest.approx(1.0, abs=0.04)


def test_a_run_that_is_too_short_or_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"2 of 4 train steps can be used \(1 warm-up, 1 the last\); a calibration needs 3"
    ):
        calibrate(write_run(tmp_path / "short", truth(), "partial-rollout", 4))
    with pytest.raises(ConfigError, match=r"config\.resolved\.json cannot be read"):
        calibrate(tmp_path)


def test_a_run_whose_lines_say_nothing_is_refused(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", truth(), "partial-rollout", 20)
    metrics, keys = directory / "metrics.jsonl", "rollouter/tokens_per_s rollouter/decode_batch_mean"
    lines = read_lines(metrics)
    for key in (*keys.split(), "timing/train_s", "response_tokens/mean"):
        write_lines(metrics, [{**line, key: 0.0} for line in lines])
        with pytest.raises(ConfigError, match="a calibration needs 3"):
            calibrate(directory)


def test_what_a_process_has_of_shared_cores_is_the_mean_over_the_times_with_the_other_side() -> None:
    """3 workers and 2 ranks on 2 cores: 0.6 of the time the ranks compute, 0.8 the workers, 0.42 both."""
    step = {
        "timing/step_s": 2.0,
        "trainer/idle_ratio": 0.4,
        "rollouter/idle_ratio": 0.2,
        "overlap_ratio": 0.7,
    }
    sharing = Sharing({"rollout": 3, "train": 2}, places=2)
    assert sharing.of("rollout", [step]) == pytest.approx((0.38 * 2 / 3 + 0.42 * 2 / 5) / 0.8)
    assert sharing.of("train", [step]) == pytest.approx((0.18 * 2 / 2 + 0.42 * 2 / 5) / 0.6)
    assert Sharing({"rollout": 3, "train": 2}).of("rollout", [step]) == 1
    # a scorer's process that computes a quarter of the time, whatever the others do
    scored = [{**step, "ref/idle_ratio": 0.75}, step]  # in the second step it was not measured
    sharing = Sharing({"rollout": 3, "train": 2, "ref": 1}, places=2)
    alone, beside = 0.38 * 2 / 3 + 0.42 * 2 / 5, 0.38 * 2 / 4 + 0.42 * 2 / 6
    assert sharing.of("rollout", scored) == pytest.approx((0.75 * alone + 0.25 * beside) / 0.8)
    assert sharing.of("ref", scored) == pytest.approx(0.02 + 0.18 * 2 / 3 + 0.38 * 2 / 4 + 0.42 * 2 / 6)


def test_a_fit_says_whether_its_amounts_tell_the_slope() -> None:
    points = [Point(amount=amount, seconds=1 + 0.1 * amount) for amount in (30.0, 31.0, 32.0)]
    assert not fit_line(points).tells_slope
    assert fit_line([*points, Point(amount=8.0, seconds=1.8)]).tells_slope


def test_the_predictions_of_a_fit_add_up_to_what_a_noisy_machine_took() -> None:
    """Relative least squares alone ask for sum(1/x) / sum(1/x^2): 1.46 s for these four steps of 1 to 4 s,
    whose mean is 2.5."""
    points = [Point(amount=100.0, seconds=seconds) for seconds in (1.0, 2.0, 3.0, 4.0)]
    fit = fit_line(points)
    assert fit.constant + 100 * fit.slope == pytest.approx(2.5)
    rng = random.Random(3)
    noisy = [
        Point(amount, (0.1 + 0.002 * amount) * rng.lognormvariate(0, 0.5)) for amount in range(50, 450, 4)
    ]
    fit = fit_line(noisy)
    predicted = [fit.constant + fit.slope * point.amount for point in noisy]
    assert statistics.fmean(predicted) == pytest.approx(statistics.fmean(point.seconds for point in noisy))


def test_a_first_short_run_is_enough_for_a_rough_calibration_and_its_notes_say_so(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", truth(), "partial-rollout", 8)
    made = calibrate(directory)
    rough = "ROUGH: only 5 train steps could be used; 8 or more make the times reliable."
    assert made.notes.startswith(rough)
    assert residuals(made, made.references[0], windows=12)[0].ratio == pytest.approx(1.0, abs=0.25)
    assert "ROUGH" not in calibrate(write_run(tmp_path / "longer", truth(), "partial-rollout", 13)).notes


def test_a_refusal_says_which_steps_were_left_out_and_why(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", truth(), "partial-rollout", 8)
    lines = read_lines(directory / "metrics.jsonl")
    lines[3] |= {"timing/eval_s": 0.5 * lines[3]["timing/step_s"]}
    lines[4] |= {"timing/checkpoint_s": 0.5 * lines[4]["timing/step_s"]}
    del lines[5]["rollouter/idle_ratio"]
    write_lines(directory / "metrics.jsonl", lines)
    with pytest.raises(ConfigError) as refused:
        calibrate(directory)
    left_out = (
        "2 warm-up, 1 beside an eval, 1 beside a checkpoint, 1 without a report of each side (steps far "
        "below a second), 1 the last"
    )
    assert f"2 of 8 train steps can be used ({left_out})" in refused.value.message

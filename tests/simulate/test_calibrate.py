from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.layers import load
from asyncrl_cli.profile.resolved import to_document
from asyncrl_cli.simulate.calibrate import calibrate, fit_line
from asyncrl_cli.simulate.references import residuals
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workloads import profile_for
from asyncrl_cli.simulate.world import simulate


def truth() -> Workload:
    return Workload.model_validate(
        {
            "profile": {"trainer": {"ppo_mini_batch_size": 8}, "rollout": {"n": 4, "slots": 32}, "placement": {"device": "cpu"}},
            "profiles": {},
            "lengths": {"median_tokens": 20.0, "sigma": 0.8, "prompt_variance_ratio": 0.3, "prompt_tokens": 0},
            "decoding": {"step_s": 0.004, "step_s_per_sequence": 0.0004},
            "training": {"s_per_token": 4e-4, "step_s": 0.1, "step_overhead_s": 0.01},
            "syncing": {"parameter_bytes": 3e6, "gather_bytes_per_s": 2e8, "send_bytes_per_s": 1e8, "load_bytes_per_s": 1e9},
        }
    )


def write_run(directory: Path, workload: Workload, name: str, steps: int) -> Path:
    """What a real run of that workload would have left behind."""
    profile = profile_for(workload, name, [f"run.train_steps={steps}"], environ={}).profile
    run = simulate(profile, workload)
    directory.mkdir()
    document = to_document(profile, load(name, environ={}).origins)
    (directory / "config.resolved.json").write_text(json.dumps(document), encoding="utf-8")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.lines), encoding="utf-8")
    syncing = workload.syncing
    send_s, load_s = syncing.parameter_bytes / syncing.send_bytes_per_s, syncing.parameter_bytes / syncing.load_bytes_per_s
    events = [
        {"event": "published", "num_bytes": 3_000_000, "publish_s": 0.0},
        {"event": "loaded", "send_s": send_s, "load_s": load_s, "pause_s": load_s},
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return directory


def test_a_calibrated_workload_gives_back_what_made_the_run(tmp_path: Path) -> None:
    known = truth()
    found = calibrate(write_run(tmp_path / "run", known, "partial-rollout", 40))
    assert found.training.s_per_token == pytest.approx(4e-4, rel=0.05)
    assert found.training.step_s == pytest.approx(0.1, rel=0.3)
    full = found.decoding.step_s + 24 * found.decoding.step_s_per_sequence
    assert full == pytest.approx(0.004 + 24 * 0.0004, rel=0.15)
    assert found.syncing.load_bytes_per_s == pytest.approx(1e9)
    observed = found.lengths.response_tokens
    assert sum(observed) / len(observed) == pytest.approx(26.5, rel=0.1)  # lognormal, cut at 96: its limited expected value


def test_it_predicts_the_calibrated_run_and_other_profiles(tmp_path: Path) -> None:
    known = truth()
    found = calibrate(write_run(tmp_path / "run", known, "partial-rollout", 40))
    assert residuals(found)[0].ratio == pytest.approx(1.0, abs=0.1)
    for name in ("stale-samples", "on-policy-pipeline", "one-step-off", "colocate"):
        times = [
            simulate(profile_for(work, name, ["run.train_steps=30"], environ={}).profile, work).lines[-1]["time_s"]
            for work in (known, found)
        ]
        assert times[1] / times[0] == pytest.approx(1.0, abs=0.15), name


def test_a_run_that_is_too_short_or_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a calibration needs 8"):
        calibrate(write_run(tmp_path / "short", truth(), "partial-rollout", 6))
    with pytest.raises(ConfigError, match=r"config\.resolved\.json cannot be read"):
        calibrate(tmp_path)


def test_the_fit_finds_constant_slope_and_interference() -> None:
    amounts = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    shared = [0.0, 1.0, 0.2, 0.9, 0.5, 0.0]
    seconds = [(0.5 + 0.25 * amount) * (1 + 0.4 * share) for amount, share in zip(amounts, shared, strict=True)]
    fit = fit_line(amounts, seconds, shared)
    assert fit.constant == pytest.approx(0.5)
    assert fit.slope == pytest.approx(0.25)
    assert fit.interference == pytest.approx(0.4)

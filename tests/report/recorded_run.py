"""A run's directory, written by hand: 6 train steps, resumed after the 3rd, with figures that can be read
off."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.resolved import to_document, to_toml
from tests.statuses import write_status

STEPS = 6


def line(step, **more):
    return {
        "step": step,
        "version": step // 2,
        "window": step // 2,
        "time_s": 10.0 * step,
        "groups_trained": 16 * step,
        "tokens_trained": 1000 * step,
        "reward/mean": 0.1 * step,
        "response_tokens/mean": 12.5,
        "response_tokens/max": 40,
        "response_tokens/quantiles": [float(place) for place in range(41)],
        "timing/step_s": 10.0,
        "timing/wait_data_s": 6.0,
        "timing/train_s": 4.0,
        "trainer/idle_ratio": 0.6,
        "rollouter/idle_ratio": 0.05,
        "rollouter/slot_utilization": 0.9,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "staleness/histogram": [64, 64],
        "sync/logprob_abs_diff": 3.7373073639408237e-07,
        "waste/tokens_discarded": 5,
        **more,
    }


EVENTS = [
    {"time_s": 0.5, "event": "published", "version": 0, "step": 0},
    {"time_s": 20.0, "event": "eval", "version": 0, "step": 2, "reward_mean": 0.25, "num_prompts": 64},
    {"time_s": 30.1, "event": "checkpointed", "version": 1, "step": 3},
    # before the kill
    {"time_s": 39.0, "event": "eval", "version": 2, "step": 4, "reward_mean": 0.99, "num_prompts": 64},
    {"time_s": 30.0, "event": "resumed", "version": 1, "step": 3, "from_step": 3},
    {"time_s": 45.0, "event": "restarted", "worker": "rollout-0", "restart_s": 2.0, "step": 4},
    {"time_s": 60.0, "event": "eval", "version": 3, "step": 6, "reward_mean": 0.5, "num_prompts": 64},
]


def make_run(directory: Path, *, lines=None, sets=(), purpose="To be reported.") -> Path:
    loaded = load(
        "partial-rollout", ["run.train_steps=6", "trainer.ppo_mini_batch_size=16", *sets], environ={}
    )
    profile = loaded.profile.model_copy(update={"purpose": purpose})
    directory.mkdir(parents=True)
    (directory / "config.resolved.json").write_text(
        json.dumps(to_document(profile, loaded.origins), default=str)
    )
    (directory / "profile.toml").write_text(to_toml(loaded.profile, loaded.origins))
    lines = [line(step) for step in range(1, STEPS + 1)] if lines is None else lines
    timeline = []
    for step, ended_s in enumerate((10.0 * step for step in range(1, len(lines) + 1)), 1):
        stays = [["starved", ended_s - 10, ended_s - 4], ["busy", ended_s - 4, ended_s]]
        timeline.append({"step": step, "spans": {"trainer": stays}})
    for name, records in (("metrics", lines), ("events", EVENTS), ("timeline", timeline)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    trainer = {"name": "trainer", "role": "trainer", "state": "done", "waiting_for": ""}
    trainer |= {"state_s": {}, "gauges": {}}
    return write_status(directory, executors=[trainer], progress={"time_s": 60.0}, phase="done")

"""On-policy distillation against the RL that made the teacher: real runs of the default task, for
docs/learning.md.

    python -m benchmarks.distillation run --directory DIR [--seeds 0 1 2]
    python -m benchmarks.distillation table --directory DIR

For each seed, a run of profile `partial-rollout` learns from rewards; its export is the teacher. Then a
student begins where that run began, from the warm start, and learns from the teacher alone, with a quarter of
the run's samples. Both are scored on the same held-out prompts. `run` makes the runs that are missing in DIR,
`table` prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.training import train

from asyncrl_cli.observe.recorded import read_metrics
from asyncrl_cli.profile.loaded import load

RL_STEPS, STEP_SAMPLES, SHARE = 110, 128, 4
STUDENT_STEPS = RL_STEPS // SHARE
EARLY_VERSION = 8
"""The RL run's eval that is nearest to a quarter of its samples."""
STUDENT = (
    "algorithm.adv_estimator=none",
    "algorithm.distill_loss=full",
    f"run.train_steps={STUDENT_STEPS}",
    "rollout.n=2",
    "async_training.require_batches=4",
    "trainer.ppo_mini_batch_size=16",
    "trainer.ppo_epochs=6",
    "trainer.lr=3e-4",
    "trainer.lr_schedule=linear",
)
"""As many samples per train step as the RL run has, of four times as many prompts: nothing is compared within
a group. A teacher's judgement of a state stays right while the policy moves, so samples are used several
times."""
SCORED = ("eval.every_versions=0", "eval.samples_per_prompt=4")
"""The standard error of a reward is then 0.01."""


def make_missing(directory: Path, seed: int) -> None:
    runs, teacher = directory / "runs", directory / f"teacher-{seed}"
    common = (f"run.seed={seed}", f"model.cache_dir={directory / 'models'}", "logging.samples_every_steps=0")
    if not is_whole(runs / f"rl-{seed}", RL_STEPS):
        train("partial-rollout", f"rl-{seed}", (*common, "eval.every_versions=4"), runs)
    if not teacher.exists():
        words = ["export", f"rl-{seed}", "--runs-dir", str(runs), "--out", str(teacher)]
        subprocess.run([sys.executable, "-m", "asyncrl_cli", *words], check=True, stdout=subprocess.DEVNULL)
    if not is_whole(runs / f"student-{seed}", STUDENT_STEPS):
        sets = (*common, *SCORED, *STUDENT, f"teacher.path={teacher}")
        train("on-policy-pipeline", f"student-{seed}", sets, runs)
    if not is_whole(runs / f"scored-{seed}", 1):  # its eval of version 0 is the teacher's
        same = ("task.adapter=worked", "model.dtype=float32", "eval.prompts=512")  # as of builtin:tiny
        sets = (*common, *SCORED, *same, f"model.path={teacher}", "run.train_steps=1")
        train("on-policy-pipeline", f"scored-{seed}", sets, runs)


def is_whole(run: Path, steps: int) -> bool:
    return (run / "metrics.jsonl").exists() and len(read_metrics(run / "metrics.jsonl")) == steps


def evals_of(run: Path) -> list[tuple[int, float]]:
    """(version, held-out reward)"""
    lines = map(json.loads, (run / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["version"], line["reward_mean"]) for line in lines if line["event"] == "eval"]


def rows(directory: Path, seeds: Sequence[int]) -> Iterator[str]:
    window_steps = load("partial-rollout").profile.async_training.trigger_parameter_sync_step
    heads = ["seed", "warm start", f"RL, {EARLY_VERSION * window_steps * STEP_SAMPLES:,} samples"]
    heads += [f"teacher: RL, {RL_STEPS * STEP_SAMPLES:,}", f"student, {STUDENT_STEPS * STEP_SAMPLES:,}"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    found = []
    for seed in seeds:
        rl, scored, student = (
            evals_of(directory / "runs" / f"{what}-{seed}") for what in ("rl", "scored", "student")
        )
        early = dict(rl)[EARLY_VERSION]
        found.append((student[0][1], early, scored[0][1], student[-1][1]))
        yield row(str(seed), found[-1])
    yield row("mean", [statistics.fmean(column) for column in zip(*found, strict=True)])


def row(name: str, figures: Sequence[float]) -> str:
    return f"| {name} | {' | '.join(f'{figure:.3f}' for figure in figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    directory = options.directory.absolute()
    if options.what == "run":
        for seed in options.seeds:
            make_missing(directory, seed)
    print("\n".join(rows(directory, options.seeds)))


if __name__ == "__main__":
    main()

"""TRL's GRPOTrainer beside asyncrl on one machine's CPUs: the same model, task, reward, group size, batch and tokens.

    pip install 'trl>=1.16'
    python -m benchmarks.vs_trl --directory DIR [--steps 40] [--repeat 3] [--profile partial-rollout]... [--goal 0.9]

Sides take turns; each repeat runs all of them. TRL generates with transformers' `generate`, in one process with all threads and in
two processes with one thread each (`accelerate launch --cpu`), its best here. Both train `--steps` optimizer steps of 16 groups of
8 responses of the default task, from the same warm-started model, with the default profile's learning rate, clip widths and
temperature, and without a reference model. Columns, medians of the repeats (least-most):

    samples/s   trajectories trained per second, from the end of the first two steps to the end of the last
    goal, s     seconds of training until the mean reward of five steps in a row reaches --goal; "-" if it never does
    reward      mean of the last ten steps
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.models.resolve import resolve_model
from asyncrl_cli.observe.lines import read_metrics
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.scoring import build_scorer
from asyncrl_cli.tasks.task import Task, load_task

PROFILES = ("partial-rollout", "stale-samples", "colocate")
TRL = {"trl": 1, "trl, 2 processes": 2}
"""Processes of each way to run TRL."""
SKIPPED = 2
"""Steps before the clock of samples/s: imports of the first, compilation, empty pipelines."""
LIMIT_S = 3600.0

Step = tuple[float, float]
"""Seconds since training began, at the step's end; mean reward."""


class Figures(NamedTuple):
    samples_per_s: float
    goal_s: float | None
    reward: float


def sets_of(options: argparse.Namespace) -> list[str]:
    sets = [f"run.train_steps={options.steps}", f"run.seed={options.seed}", f"model.cache_dir={options.directory / 'models'}"]
    return [*sets, "eval.prompts=0", "checkpoint.every_steps=0"]


def profile_of(name: str, options: argparse.Namespace) -> Profile:
    return load(name, sets_of(options), environ={}).profile


def asyncrl_side(name: str, repeat: int, options: argparse.Namespace) -> list[Step]:
    runs, run = options.directory / "runs", f"{name}-{repeat}"
    asked = [
        sys.executable,
        "-m",
        "asyncrl_cli",
        "train",
        "--profile",
        name,
        "--name",
        run,
        "--runs-dir",
        str(runs),
        "--ui",
        "none",
    ]
    subprocess.run([*asked, *(part for text in sets_of(options) for part in ("--set", text))], check=True, timeout=LIMIT_S)
    return [(line["time_s"], line["reward/mean"]) for line in read_metrics(runs / run / "metrics.jsonl")]


def trl_side(processes: int, repeat: int, options: argparse.Namespace) -> list[Step]:
    out = options.directory / f"trl-{processes}-{repeat}.jsonl"
    launch = [sys.executable, "-m", "benchmarks.vs_trl"]
    if processes > 1:
        launch = [
            "accelerate",
            "launch",
            "--cpu",
            "--num_processes",
            str(processes),
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
        ]
        launch += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "-m", "benchmarks.vs_trl"]
    asked = [
        "--directory",
        str(options.directory),
        "--steps",
        str(options.steps),
        "--seed",
        str(options.seed),
        "--trl-side",
        str(out),
    ]
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    subprocess.run(
        [*launch, *asked, "--trl-side", str(out)], check=True, timeout=LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": threads}
    )
    return [(line["time_s"], line["reward"]) for line in map(json.loads, out.read_text(encoding="utf-8").splitlines())]


def train_with_trl(options: argparse.Namespace) -> None:
    """In a process of its own: one run of GRPOTrainer, whose steps go to `options.trl_side` as JSON lines."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    profile = profile_of("colocate", options)
    task = load_task(profile)
    model, trainer, rollout = resolve_model(profile, task), profile.trainer, profile.rollout
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = trainer.ppo_mini_batch_size * rollout.n // processes
    config = GRPOConfig(
        output_dir=str(options.directory / "trl"),
        use_cpu=True,
        bf16=False,
        max_steps=options.steps,
        per_device_train_batch_size=batch // options.accumulation,
        gradient_accumulation_steps=options.accumulation,
        num_generations=rollout.n,
        max_completion_length=rollout.max_response_tokens,
        temperature=rollout.temperature,
        learning_rate=trainer.lr,
        lr_scheduler_type="constant",
        weight_decay=trainer.weight_decay,
        adam_beta2=trainer.betas[1],
        max_grad_norm=trainer.grad_clip,
        beta=0.0,
        epsilon=profile.algorithm.clip_ratio_low,
        epsilon_high=profile.algorithm.clip_ratio_high,
        loss_type="dapo",  # a mean over the batch's tokens: our token-mean
        gradient_checkpointing=False,
        seed=options.seed,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    steps = []

    class Clock(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
            if logs and "reward" in logs:
                steps.append({"time_s": time.monotonic() - began_s, "reward": logs["reward"]})

    rows = Dataset.from_list([{"prompt": item["prompt"], "uid": item["uid"]} for item in task.train])
    grpo = GRPOTrainer(str(model), reward_funcs=reward_of(task), args=config, train_dataset=rows, callbacks=[Clock()])
    began_s = time.monotonic()
    grpo.train()
    if grpo.accelerator.is_main_process:
        options.trl_side.write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")


def reward_of(task: Task) -> Callable[..., list[float]]:
    """The task's own reward, as TRL calls one."""
    scorer, items = build_scorer(task.reward), {item["uid"]: item for item in task.train}

    def reward(completions: Sequence[str], uid: Sequence[str], **kwargs: Any) -> list[float]:
        return [float(scorer(items[one], text)) for text, one in zip(completions, uid, strict=True)]

    return reward


def figures(steps: Sequence[Step], samples: int, goal: float) -> Figures:
    """`samples`: trajectories per step."""
    times, rewards = zip(*steps, strict=True)
    means = [(times[end - 1], statistics.fmean(rewards[end - 5 : end])) for end in range(5, len(rewards) + 1)]
    return Figures(
        samples_per_s=samples * (len(steps) - SKIPPED) / (times[-1] - times[SKIPPED - 1]),
        goal_s=next((time_s for time_s, mean in means if mean >= goal), None),
        reward=statistics.fmean(rewards[-10:]),
    )


def spread(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    return f"{statistics.median(known):{form}} ({min(known):{form}}-{max(known):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--profile", action="append", default=[])
    parser.add_argument("--accumulation", type=int, default=1, help="TRL's gradient accumulation: microbatches per step")
    parser.add_argument("--trl-side", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.directory = options.directory.absolute()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.trl_side:
        return train_with_trl(options)
    profile = profile_of("colocate", options)
    samples = profile.trainer.ppo_mini_batch_size * profile.rollout.n
    resolve_model(profile, load_task(profile))  # no side's clock has the warm start
    seen: dict[str, list[Figures]] = {}
    for repeat in range(options.repeat):
        for name in options.profile or PROFILES:
            seen.setdefault(name, []).append(figures(asyncrl_side(name, repeat, options), samples, options.goal))
            print(f"{name} {repeat}: {seen[name][-1]}", file=sys.stderr, flush=True)
        for name, processes in TRL.items():
            seen.setdefault(name, []).append(figures(trl_side(processes, repeat, options), samples, options.goal))
            print(f"{name} {repeat}: {seen[name][-1]}", file=sys.stderr, flush=True)
    best = max(statistics.median(f.samples_per_s for f in seen[name]) for name in TRL)
    print(f"{'':<20} {'samples/s':>20} {'x TRL':>6} {'goal, s':>20} {'reward':>20}")
    for name, found in seen.items():
        speed = statistics.median(f.samples_per_s for f in found)
        columns = [spread([f.samples_per_s for f in found], ".0f"), f"{speed / best:.2f}"]
        columns += [spread([f.goal_s for f in found], ".0f"), spread([f.reward for f in found], ".3f")]
        print(f"{name:<20} {columns[0]:>20} {columns[1]:>6} {columns[2]:>20} {columns[3]:>20}")


if __name__ == "__main__":
    main()

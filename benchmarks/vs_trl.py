"""Compares TRL's GRPOTrainer with asyncrl on one machine's CPUs: the same model, task, reward, group size,
batch and tokens.

    pip install 'trl>=1.16'
    python -m benchmarks.vs_trl --directory DIR [--steps 40] [--repeat 3] [--goal 0.9]
                                [--profile NAME|FILE]... [--set KEY=VALUE]... [--side SIDE]...

With a pretrained model, the learning rate is given to both:

    python -m benchmarks.vs_trl --directory DIR --profile templates/pretrained/profile.toml \\
                                --set trainer.lr=2e-5 --goal 0.3

Sides take turns; each repeat runs all of them: those of asyncrl are profiles, those of TRL ways to run it
(`TRL`): in one process with all threads or in two with one thread each (`accelerate launch --cpu`), in
float32 or with bfloat16 autocast, generating with transformers' `generate` or with its continuous
batching. Each trains `--steps` optimizer steps of the first profile's batch, from the same model, with
its learning rate, clip widths and temperature, and without a reference model. A prompt comes once, so a
step's reward is that of prompts that were not trained on. Columns are medians of the repeats
(least-most):

    samples/s   trajectories trained per second, from the end of the first two steps to the end of the last
    CPU s/1000  CPU seconds of all processes of a side per 1,000 trajectories, after the first two steps;
                other work on the machine hardly changes it
    goal, s     seconds of training until the mean reward of five steps in a row reaches --goal; "-" if it
                never does
    reward      mean of the last ten steps
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from benchmarks.training import LIMIT_S, train

from asyncrl_cli.models.model_directory import resolve_model
from asyncrl_cli.observe.recorded import read_metrics
from asyncrl_cli.plan.job_plan import for_device
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.reward_functions import build_reward
from asyncrl_cli.tasks.task import Task, load_task

PROFILES = ("partial-rollout", "stale-samples", "colocate")
TRL: dict[str, dict[str, bool]] = {
    "trl": {},
    "trl-bf16": {"bf16": True},
    "trl-batching": {"use_transformers_continuous_batching": True},
    "trl-bf16-batching": {"bf16": True, "use_transformers_continuous_batching": True},
}
"""Settings of each way to run TRL. In two processes: with "-2" after the name."""
TRL_SIDES = {name + suffix: count for name in TRL for suffix, count in (("", 1), ("-2", 2))}
"""Their processes."""
SKIPPED = 2
"""Steps before the clock of samples/s: imports of the first, compilation, empty pipelines."""

Step = tuple[float, float]
"""Seconds since training began, at the step's end; mean reward."""


class Figures(NamedTuple):
    samples_per_s: float
    cpu_s_per_1000: float
    goal_s: float | None
    reward: float


def sets_of(options: argparse.Namespace) -> list[str]:
    sets = [
        f"run.train_steps={options.steps}",
        f"run.seed={options.seed}",
        f"model.cache_dir={options.directory / 'models'}",
        "algorithm.filter_groups=false",  # TRL trains every group
    ]
    return [*sets, "eval.prompts=0", "checkpoint.every_steps=0", *options.set]


def profile_of(name: str, options: argparse.Namespace) -> Profile:
    return for_device(load(name, sets_of(options), environ={}), "cpu").profile


class CpuClock:
    """In a with block: the CPU seconds of this process's descendants when `path` was first seen with so many
    lines, by number."""

    def __init__(self, path: Path) -> None:
        self.at_lines: dict[int, float] = {}
        self._path, self._ended = path, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuClock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            lines = self._path.read_text(encoding="utf-8").count("\n") if self._path.exists() else 0
            if lines not in self.at_lines:
                self.at_lines[lines] = sum(map(_cpu_s, psutil.Process().children(recursive=True)))

    def s_per_step(self) -> float:
        """From the first two steps to the last but one: after the last, processes end."""
        first, *_, last, _ = sorted(lines for lines in self.at_lines if lines >= SKIPPED)
        return (self.at_lines[last] - self.at_lines[first]) / (last - first)


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def asyncrl_side(name: str, repeat: int, options: argparse.Namespace) -> tuple[list[Step], float]:
    run = options.directory / "runs" / f"{Path(name).stem}-{repeat}"
    with CpuClock(run / "metrics.jsonl") as clock:
        train(name, run.name, sets_of(options), run.parent)
    return [
        (line["time_s"], line["reward/mean"]) for line in read_metrics(run / "metrics.jsonl")
    ], clock.s_per_step()


def trl_side(name: str, repeat: int, options: argparse.Namespace) -> tuple[list[Step], float]:
    out, processes = options.directory / f"{name}-{repeat}.jsonl", TRL_SIDES[name]
    out.unlink(missing_ok=True)
    launch = [sys.executable]
    if processes > 1:
        launch += [
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_processes",
            str(processes),
            "--num_machines",
            "1",
        ]
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"]
    asked = {
        "--directory": options.directory,
        "--steps": options.steps,
        "--seed": options.seed,
        "--trl-side": out,
    }
    asked |= {"--accumulation": options.accumulation, "--profile": options.profile[0], "--side": name}
    words = ["-m", "benchmarks.vs_trl", *(str(word) for pair in asked.items() for word in pair)]
    words += [word for setting in options.set for word in ("--set", setting)]
    # As our own processes have it: threads that spin for one another are many times slower beside any other
    # work.
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        "OMP_WAIT_POLICY": "passive",
    }
    with CpuClock(out) as clock:
        subprocess.run([*launch, *words], check=True, timeout=LIMIT_S, env=os.environ | environment)
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return [(line["time_s"], line["reward"]) for line in lines], clock.s_per_step()


def train_with_trl(options: argparse.Namespace) -> None:
    """In a process of its own: one run of GRPOTrainer, whose steps go to `options.trl_side` as JSON lines."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    profile = profile_of(options.profile[0], options)
    task = load_task(profile)
    model, trainer, rollout = resolve_model(profile, task), profile.trainer, profile.rollout
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = trainer.ppo_mini_batch_size * rollout.n // processes
    config = GRPOConfig(
        output_dir=str(options.directory / "trl"),
        use_cpu=True,
        **{"bf16": False} | TRL[options.side[0].removesuffix("-2")],
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
        model_init_kwargs={"dtype": "float32"},
        seed=options.seed,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )

    class Clock(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
        ) -> None:
            if state.is_world_process_zero and logs and "reward" in logs:
                with options.trl_side.open("a", encoding="utf-8") as file:
                    file.write(
                        json.dumps({"time_s": time.monotonic() - began_s, "reward": logs["reward"]}) + "\n"
                    )

    rows = Dataset.from_list([{"prompt": item["prompt"], "uid": item["uid"]} for item in task.train])
    grpo = GRPOTrainer(
        str(model), reward_funcs=reward_of(task), args=config, train_dataset=rows, callbacks=[Clock()]
    )
    began_s = time.monotonic()
    grpo.train()


def reward_of(task: Task) -> Callable[..., list[float]]:
    """The task's own reward, as TRL calls one."""
    scorer, items = build_reward(task.reward), {item["uid"]: item for item in task.train}

    def reward(completions: Sequence[Any], uid: Sequence[str], **kwargs: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [float(scorer(items[one], text)) for text, one in zip(texts, uid, strict=True)]

    return reward


def figures(steps: Sequence[Step], cpu_s_per_step: float, samples: int, goal: float) -> Figures:
    """`samples`: trajectories per step."""
    times, rewards = zip(*steps, strict=True)
    means = [(times[end - 1], statistics.fmean(rewards[end - 5 : end])) for end in range(5, len(rewards) + 1)]
    return Figures(
        samples_per_s=samples * (len(steps) - SKIPPED) / (times[-1] - times[SKIPPED - 1]),
        cpu_s_per_1000=1000 * cpu_s_per_step / samples,
        goal_s=next((time_s for time_s, mean in means if mean >= goal), None),
        reward=statistics.fmean(rewards[-10:]),
    )


def spread(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    return f"{statistics.median(known):{form}} ({min(known):{form}}-{max(known):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--profile", action="append", help="default: " + ", ".join(PROFILES))
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, for all sides")
    parser.add_argument("--side", action="append", help="a profile or one of TRL's; default: all sides")
    parser.add_argument(
        "--accumulation", type=int, default=1, help="TRL's gradient accumulation: microbatches per step"
    )
    parser.add_argument("--trl-side", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.directory = options.directory.absolute()
    options.profile = options.profile or list(PROFILES)
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.trl_side:
        return train_with_trl(options)
    profile = profile_of(options.profile[0], options)
    samples = profile.trainer.ppo_mini_batch_size * profile.rollout.n
    resolve_model(profile, load_task(profile))  # no side's clock has the warm start
    sides = {name: partial(asyncrl_side, name) for name in options.profile}
    sides |= {name: partial(trl_side, name) for name in TRL_SIDES}
    if unknown := set(options.side or ()) - sides.keys():
        parser.error(f"--side {', '.join(sorted(unknown))}: there are {', '.join(sides)}")
    seen: dict[str, list[Figures]] = {}
    for repeat in range(options.repeat):
        for name in options.side or sides:
            seen.setdefault(name, []).append(figures(*sides[name](repeat, options), samples, options.goal))
            print(f"{name} {repeat}: {seen[name][-1]}", file=sys.stderr, flush=True)
    best = max(
        (statistics.median(f.samples_per_s for f in seen[name]) for name in TRL_SIDES if name in seen),
        default=math.nan,
    )
    print(f"{'':<20} {'samples/s':>20} {'x TRL':>6} {'CPU s/1000':>20} {'goal, s':>20} {'reward':>20}")
    for name, found in seen.items():
        speed = statistics.median(f.samples_per_s for f in found)
        columns = [spread([f.samples_per_s for f in found], ".3g"), f"{speed / best:.2f}"]
        columns += [spread([f.cpu_s_per_1000 for f in found], ".1f")]
        columns += [spread([f.goal_s for f in found], ".0f"), spread([f.reward for f in found], ".3f")]
        widths = zip(columns, (20, 6, 20, 20, 20), strict=True)
        print(f"{Path(name).stem:<20}", *(f"{column:>{width}}" for column, width in widths))


if __name__ == "__main__":
    main()

"""Compares placing responses one by one with placing whole groups on one worker: real runs in pairs, with two
rollout workers.

    python -m benchmarks.placement --directory DIR [--engines transformers,vllm] [--prompts default,mixed]
                                   [--pairs 3] [--steps 24]
    python -m benchmarks.placement --directory DIR --deaths      a worker of each run is killed in mid-run

`default` is the default task, sorting in writing. `mixed` is made here: half of its prompts are a list of
three numbers, the other half a list of six after 150 tokens of other lists. So prompts differ in length by a
factor of 30, responses by about 10. All runs use the same builtin:tiny model, which has learnt both.

The runs of a pair have the same seed and alternate in order. Figures exclude warm-up and run-out, as in
`asyncrl bench`. Seconds mean little on a machine that others use; the other columns are counts:

    slots      share of slots in use
    batch      tokens per decode step of a worker
    workers    on how many workers a group began
    prefill    prompt tokens that vLLM computed per group, without cached ones
    discarded  tokens sampled and never trained, in the whole run
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PLACEMENTS = ("response", "group")
SETS = (
    "rollout.workers=2",
    "rollout.slots=8",
    "trainer.ppo_mini_batch_size=8",
    "eval.every_versions=0",
    "eval.prompts=16",
    "task.train_prompts=1000",
    "checkpoint.every_steps=1000",
)
TASKS = {
    "default": ('task.adapter="worked"',),
    "mixed": (
        'task.reward="benchmarks.placement:is_sorted"',
        "rollout.max_prompt_tokens=192",
        "rollout.max_response_tokens=128",
    ),
}
ENGINES = {
    "transformers": (),
    # by default 128 on a CPU
    "vllm": ("rollout.interrupt=recompute-kv", "rollout.engine_args.block_size=32"),
}
DEATH = ("rollout.max_restarts=1", "rollout.max_response_tokens=256")
DIES_AT_STEP = 6
RUN_LIMIT_S = 600.0
DIGITS = "0123456789ab"
NUM_PROMPTS = 1100
WARM_START_STEPS = 160
COLUMNS = ("s_per_step", "slots", "idle", "batch", "workers", "prefill", "staleness", "discarded")

Row = Mapping[str, float]


def is_sorted(item: Mapping[str, Any], response: str) -> float:
    """The reward of `mixed`: 1 if the last list of the response is right."""
    return float(response.rpartition(",")[2] == item["answer"])


class Mixed:
    """The prompts of `mixed`, and how the model learns to answer them (`models.tiny.Course`): a list after
    every swap."""

    name = "mixed"
    eval = ()

    def __init__(self) -> None:
        self.train = [
            self._item(random.Random(number), is_long=number % 2 == 1) for number in range(NUM_PROMPTS)
        ]

    def demonstration(self, item: Mapping[str, Any], rng: random.Random) -> str:
        return ",".join(self._lists(item))

    def flawed_demonstration(self, item: Mapping[str, Any], rng: random.Random) -> str:
        lists = self._lists(item)
        return ",".join(lists[: rng.randint(1, len(lists))])

    @staticmethod
    def _item(rng: random.Random, *, is_long: bool) -> Mapping[str, Any]:
        other = "".join(f"<{rng.choice(DIGITS)}{rng.choice(DIGITS)}" for _ in range(50 if is_long else 0))
        numbers = rng.choices(DIGITS, k=6 if is_long else 3)
        return {"prompt": f"{other}<{''.join(numbers)}=", "answer": "".join(sorted(numbers))}

    @staticmethod
    def _lists(item: Mapping[str, Any]) -> list[str]:
        numbers, lists = list(item["prompt"].rpartition("<")[2].rstrip("=")), []
        while places := [i for i in range(len(numbers) - 1) if numbers[i] > numbers[i + 1]]:
            numbers[places[0] : places[0] + 2] = numbers[places[0] + 1], numbers[places[0]]
            lists.append("".join(numbers))
        return lists or ["".join(numbers)]


class Both:
    """What the model learns: the default task's lessons and those of `mixed`, half of each."""

    name = "both"

    def __init__(self, default: Any) -> None:
        mixed = Mixed()
        self.train = [{**item, "of": task} for task in (default, mixed) for item in task.train[:NUM_PROMPTS]]
        self.eval = default.eval

    def demonstration(self, item: Mapping[str, Any], rng: random.Random) -> str:
        return str(item["of"].demonstration(item, rng))

    def flawed_demonstration(self, item: Mapping[str, Any], rng: random.Random) -> str:
        return str(item["of"].flawed_demonstration(item, rng))


class Laboratory:
    """A directory with the model, the prompts of `mixed`, the runs and a file with the figures of each."""

    def __init__(self, directory: Path, steps: int) -> None:
        self._directory = directory
        self._runs = directory / "runs"
        self._prompts = directory / "mixed.jsonl"
        self._steps = steps
        self._runs.mkdir(parents=True, exist_ok=True)
        self._prompts.write_text("".join(json.dumps(item) + "\n" for item in Mixed().train), encoding="utf-8")
        self._model = self._built_model()

    def _built_model(self) -> Path:
        from asyncrl_cli.builtin.tiny_models import built_tiny
        from asyncrl_cli.profile.loaded import load
        from asyncrl_cli.tasks.task import load_task

        sets = [*SETS, f"model.cache_dir={self._directory}", f"model.warm_start_steps={WARM_START_STEPS}"]
        profile = load("partial-rollout", sets).profile
        return built_tiny(profile, Both(load_task(profile)), self._directory)

    def row(self, engine: str, prompts: str, placement: str, seed: int, *, dies: bool) -> Row:
        """A run's figures, from its file if it has been made. If it `dies`, one of its workers is killed on
        the way."""
        name = f"{engine}-{prompts}-{placement}{'-death' if dies else ''}-{seed}"
        file = self._directory / f"{name}.json"
        if not file.exists():
            source = (f'task.source="jsonl:{self._prompts}"',) if prompts == "mixed" else ()
            own = (
                f'model.path="{self._model}"',
                f"run.train_steps={self._steps}",
                f"run.seed={seed}",
                f"rollout.engine={engine}",
            )
            sets = (*SETS, *(DEATH if dies else ()), *source, *TASKS[prompts], *ENGINES[engine], *own)
            run = self._train(name, (*sets, f"rollout.placement={placement}"), dies=dies)
            file.write_text(json.dumps(figures(run)), encoding="utf-8")
        row = dict(json.loads(file.read_text(encoding="utf-8")))
        show(name, row)
        return row

    def _train(self, name: str, sets: Sequence[str], *, dies: bool) -> Path:
        run = self._runs / name
        shutil.rmtree(run, ignore_errors=True)  # one that was broken off
        words = ("train", "--profile", "partial-rollout", "--name", name, "--runs-dir", str(self._runs))
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "asyncrl_cli",
                *words,
                *(word for setting in sets for word in ("--set", setting)),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            if dies:
                kill_a_worker(process, run)
            _, err = process.communicate(timeout=RUN_LIMIT_S)
        finally:
            process.kill()
        if process.returncode != 0:
            raise SystemExit(err[-2000:])
        return run


def kill_a_worker(process: subprocess.Popen[str], run: Path) -> None:
    from tests.run.commands import command_line, descendants, wait_for_steps

    wait_for_steps(process, run, DIES_AT_STEP)
    while process.poll() is None:
        workers = [pid for pid in descendants(process.pid) if b"ray::RolloutHost" in command_line(pid)]
        if workers:
            os.kill(min(workers), signal.SIGKILL)
            return
        time.sleep(0.01)


def figures(run: Path) -> Row:
    from asyncrl_cli.bench.figures import stretch_of
    from asyncrl_cli.observe.recorded import read_metrics

    lines = read_metrics(run / "metrics.jsonl")
    stretch = stretch_of(lines)
    seconds = [float(line["timing/step_s"]) for line in stretch.lines]

    def mean(key: str) -> float:
        told = [
            (line[key], step_s) for line, step_s in zip(stretch.lines, seconds, strict=True) if key in line
        ]
        return sum(figure * step_s for figure, step_s in told) / sum(step_s for _, step_s in told)

    computed = sum(
        line.get("rollouter/prompt_tokens", 0) - line.get("rollouter/cached_prompt_tokens", 0)
        for line in stretch.lines
    )
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    began = [len(event["workers"]) for event in events if event["event"] == "running"]
    return {
        "s_per_step": sum(seconds) / len(seconds),
        "slots": mean("rollouter/slot_utilization"),
        "idle": mean("rollouter/idle_ratio"),
        "batch": mean("rollouter/decode_batch_mean"),
        "workers": sum(began) / len(began),
        "prefill": computed / stretch.groups,
        "staleness": mean("staleness/mean"),
        "discarded": float(lines[-1]["waste/tokens_discarded"]),
    }


def show(name: str, row: Row) -> None:
    print(f"{name:44} " + " ".join(f"{row[column]:10.3f}" for column in COLUMNS), flush=True)


def compare(laboratory: Laboratory, engine: str, prompts: str, pairs: int, *, dies: bool) -> None:
    rows: dict[str, list[Row]] = {placement: [] for placement in PLACEMENTS}
    for pair in range(pairs):
        for placement in PLACEMENTS if pair % 2 == 0 else PLACEMENTS[::-1]:
            rows[placement].append(laboratory.row(engine, prompts, placement, pair, dies=dies))
    for placement, own in rows.items():
        show(
            f"{engine} {prompts} {placement}: median",
            {key: statistics.median(row[key] for row in own) for key in COLUMNS},
        )
    ratios = [
        group["s_per_step"] / response["s_per_step"] for response, group in zip(*rows.values(), strict=True)
    ]
    print(f"seconds, group / response, by pair: {', '.join(f'{ratio:.2f}' for ratio in ratios)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, required=True, help="for runs, prompts and model; existing runs are kept"
    )
    parser.add_argument("--engines", default="transformers,vllm")
    parser.add_argument("--prompts", default="default,mixed")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=24, help="train steps per run, of which 8 are warm-up and run-out"
    )
    parser.add_argument("--deaths", action="store_true", help="kill a worker of each run")
    options = parser.parse_args()
    laboratory = Laboratory(options.directory.absolute(), options.steps)
    print(f"{'':44} " + " ".join(f"{column:>10}" for column in COLUMNS))
    for engine in options.engines.split(","):
        for prompts in options.prompts.split(","):
            compare(laboratory, engine, prompts, options.pairs, dies=options.deaths)


if __name__ == "__main__":
    main()

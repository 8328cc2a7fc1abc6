"""Responses placed one by one against whole groups on one worker: real runs in pairs, each with two rollout workers.

    python -m benchmarks.placement --directory DIR [--engines transformers,vllm] [--prompts default,mixed] [--pairs 3] [--steps 24]
    python -m benchmarks.placement --directory DIR --deaths      a worker of each run is killed in the middle of it

`default` is the default task: sorting. In `mixed`, which is made here for the same model, every second prompt is a short list, and
every other a long one after about 500 tokens of worked examples: the lengths of prompts, and of responses to them, differ much.

The runs of a pair have the same seed, and take turns at being first. Figures are of the stretch without warm-up and run-out, as in
`asyncrl bench`. On a machine that others use, too, seconds say little; the other columns are counted:

    slots      share of slots in use                       batch     tokens per decode step of a worker
    workers    on how many workers a group began           prefill   prompt tokens that vLLM computed per group, without cached ones
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
    "rollout.slots=32",
    "eval.every_versions=0",
    "eval.prompts=16",
    "task.train_prompts=1000",
    "checkpoint.every_steps=1000",
)
SORTING = ('task.adapter="worked"',)
MIXED = (
    'task.reward="benchmarks.placement:is_sorted"',
    "rollout.max_prompt_tokens=640",
    "trainer.max_tokens_per_microbatch=16384",
)
DEATH = ("rollout.max_restarts=1", "rollout.max_response_tokens=256")
DIES_AT_STEP = 6
RUN_LIMIT_S = 600.0
DIGITS = "0123456789ab"
EXAMPLES_CHARACTERS = 500
COLUMNS = ("s_per_step", "slots", "idle", "batch", "workers", "prefill", "staleness", "discarded")

Row = Mapping[str, float]


def is_sorted(item: Mapping[str, Any], response: str) -> float:
    """The reward of `mixed`: 1 if the last list of the response is right."""
    return float(response.rpartition(",")[2] == item["answer"])


def write_mixed(path: Path, num_prompts: int) -> None:
    rng, lines = random.Random(0), []
    for number in range(num_prompts):
        is_long = number % 2 == 1
        numbers = [rng.choice(DIGITS) for _ in range(6 if is_long else 2)]
        examples = ""
        while is_long and len(examples) < EXAMPLES_CHARACTERS:
            shown = [rng.choice(DIGITS) for _ in range(2)]
            examples += f"<{''.join(shown)}={''.join(sorted(shown))},"
        lines.append({"prompt": f"{examples}<{''.join(numbers)}=", "answer": "".join(sorted(numbers))})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


class Laboratory:
    """A directory with the runs, the prompts of `mixed`, and the model, which the first run builds."""

    def __init__(self, directory: Path, steps: int) -> None:
        self.directory = directory
        self._steps = steps
        self._runs = directory / "runs"
        self._model = directory / "model"
        self._prompts = directory / "mixed.jsonl"

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_mixed(self._prompts, 1100)
        if not self._model.is_dir():
            self._train("first", ("run.train_steps=1",))
            self._finish(self._start("export", str(self._runs / "first"), "--out", str(self._model)))

    def row(self, name: str, prompts: str, sets: Sequence[str], *, dies: bool) -> Row:
        """A run's figures, from its file if it has been made. If it `dies`, one of its workers is killed on the way."""
        file = self.directory / f"{name}.json"
        if not file.exists():
            task = (f'task.source="jsonl:{self._prompts}"', *MIXED) if prompts == "mixed" else SORTING
            own = (f'model.path="{self._model}"', f"run.train_steps={self._steps}", *(DEATH if dies else ()), *task, *sets)
            file.write_text(json.dumps(figures(self._train(name, own, dies=dies))), encoding="utf-8")
        return dict(json.loads(file.read_text(encoding="utf-8")))

    def _train(self, name: str, sets: Sequence[str], *, dies: bool = False) -> Path:
        run = self._runs / name
        shutil.rmtree(run, ignore_errors=True)  # one that was broken off
        process = self._start("train", "--profile", "partial-rollout", "--name", name, sets=(*SETS, *sets))
        if dies:
            kill_a_worker(process, run)
        self._finish(process)
        return run

    def _start(self, *words: str, sets: Sequence[str] = ()) -> subprocess.Popen[str]:
        settings = [word for setting in sets for word in ("--set", setting)]
        return subprocess.Popen(
            [sys.executable, "-m", "asyncrl_cli", *words, "--runs-dir", str(self._runs), *settings],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _finish(self, process: subprocess.Popen[str]) -> None:
        try:
            _, err = process.communicate(timeout=RUN_LIMIT_S)
        finally:
            process.kill()
        if process.returncode != 0:
            raise SystemExit(err[-2000:])


def kill_a_worker(process: subprocess.Popen[str], run: Path) -> None:
    from tests.run.commands import command_line, descendants, wait_for_steps

    wait_for_steps(process, run, DIES_AT_STEP)
    while process.poll() is None:
        workers = [pid for pid in descendants(process.pid) if b"ray::RolloutActor" in command_line(pid)]
        if workers:
            os.kill(min(workers), signal.SIGKILL)
            return
        time.sleep(0.01)


def figures(run: Path) -> Row:
    from asyncrl_cli.bench.measure import stretch_of
    from asyncrl_cli.observe.lines import read_metrics

    lines = read_metrics(run / "metrics.jsonl")
    stretch = stretch_of(lines)
    seconds = [float(line["timing/step_s"]) for line in stretch.lines]

    def mean(key: str) -> float:
        told = [(line[key], step_s) for line, step_s in zip(stretch.lines, seconds, strict=True) if key in line]
        return sum(figure * step_s for figure, step_s in told) / sum(step_s for _, step_s in told)

    computed = sum(line.get("rollouter/prompt_tokens", 0) - line.get("rollouter/cached_prompt_tokens", 0) for line in stretch.lines)
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
            sets = [f"rollout.engine={engine}", f"run.seed={pair}", f"rollout.placement={placement}"]
            if engine == "vllm":
                sets.append("rollout.interrupt=recompute-kv")
            name = f"{engine}-{prompts}-{placement}{'-death' if dies else ''}-{pair}"
            rows[placement].append(laboratory.row(name, prompts, sets, dies=dies))
            show(name, rows[placement][-1])
    for placement, own in rows.items():
        show(f"{engine} {prompts} {placement}: median", {key: statistics.median(row[key] for row in own) for key in COLUMNS})
    ratios = [group["s_per_step"] / response["s_per_step"] for response, group in zip(*rows.values(), strict=True)]
    print(f"seconds, group / response, by pair: {', '.join(f'{ratio:.2f}' for ratio in ratios)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="of runs, prompts and model; what is there is not repeated")
    parser.add_argument("--engines", default="transformers,vllm")
    parser.add_argument("--prompts", default="default,mixed")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="train steps per run, of which 8 are warm-up and run-out")
    parser.add_argument("--deaths", action="store_true", help="kill a worker of each run")
    options = parser.parse_args()
    laboratory = Laboratory(options.directory.absolute(), options.steps)
    laboratory.prepare()
    print(f"{'':44} " + " ".join(f"{column:>10}" for column in COLUMNS))
    for engine in options.engines.split(","):
        for prompts in options.prompts.split(","):
            compare(laboratory, engine, prompts, options.pairs, dies=options.deaths)


if __name__ == "__main__":
    main()

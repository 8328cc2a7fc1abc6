"""What a pretrained chat model learns on this machine: real runs of `asyncrl init pretrained`.

    python -m benchmarks.pretrained run --directory DIR [--only WORD ...] [--steps 40] [--seconds 36000]
    python -m benchmarks.pretrained show --directory DIR [--draw docs/pictures/pretrained.svg]

`run` makes the runs that are missing in DIR/rows.jsonl, one at a time, each in a process of its own, and adds
a line after each, so it may be stopped and called again. A run that was cut off begins anew. It goes seed by
seed, the most important runs first; `--only` keeps those whose name has all of these words, such as
`arithmetic-full-partial-transformers-0`. `show` prints the table for docs/learning.md, and `--draw` draws
held-out reward against minutes, a panel per task.

A run trains all weights or LoRA adapters, with `partial-rollout` or `colocate`, both on the same two cores,
and samples with the engine transformers or vLLM. Rewards are those of 64 held-out prompts; minutes count from
the first rollout to the last eval, evals included. What the machine does meanwhile counts, too: `s/step` is a
median.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.profile.toml_files import shipped_templates

TASKS = {"arithmetic": "profile", "gym": "gym", "instructions": "instructions"}
"""Task -> its profile in the template."""
TRAINED = {"full": (), "lora": ("lora.rank=16",)}
MODES = {
    "partial": (),
    "colocate": (
        "placement.colocate=true",
        "async_training.staleness_threshold=0",
        "async_training.partial_rollout=false",
    ),
}
ENGINES = {"transformers": (), "vllm": ("rollout.engine=vllm",)}
SEEDS = (0, 1, 2)
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
HEADS = ("task", "trained", "mode", "engine", "runs", "held-out before", "after", "minutes", "s/step")


class Experiment(NamedTuple):
    task: str
    trained: str
    mode: str
    engine: str
    seed: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self))

    @property
    def sets(self) -> tuple[str, ...]:
        return (f"run.seed={self.seed}", *TRAINED[self.trained], *MODES[self.mode], *ENGINES[self.engine])


def experiments() -> Iterator[Experiment]:
    """Each seed: all tasks in the template's own way, then what changes one thing, then the rest."""
    own = ("full", "partial", "transformers")
    ways = [(how, mode, engine) for how in TRAINED for mode in MODES for engine in ENGINES]
    ways.sort(key=lambda way: sum(mine != other for mine, other in zip(way, own, strict=True)))
    for seed in SEEDS:
        yield from (Experiment(task, *way, seed) for way in ways[:4] for task in TASKS)
    for seed in SEEDS:
        yield from (Experiment(task, *way, seed) for way in ways[4:] for task in TASKS)


def rows_in(directory: Path) -> list[dict[str, Any]]:
    file = directory / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_missing(directory: Path, words: list[str], sets: list[str], seconds: float) -> None:
    end_s = time.monotonic() + seconds
    directory.mkdir(parents=True, exist_ok=True)
    for experiment in experiments():
        done = {row["name"] for row in rows_in(directory)}
        wanted = all(word in experiment.name for word in words)
        if experiment.name in done or not wanted or time.monotonic() > end_s:
            continue
        print(f"--- {experiment.name}", flush=True)
        row = row_of(experiment, directory, sets)
        with (directory / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        show(directory)


def row_of(experiment: Experiment, directory: Path, sets: list[str]) -> dict[str, Any]:
    """Train, and read what was recorded. A run that fails gives a row with its error."""
    shutil.rmtree(directory / "runs" / experiment.name, ignore_errors=True)
    profile = shipped_templates()["pretrained"] / f"{TASKS[experiment.task]}.toml"
    command = [sys.executable, "-m", "asyncrl_cli", "train", "--profile", str(profile), "--ui", "plain"]
    command += ["--runs-dir", str(directory / "runs"), "--name", experiment.name]
    # checkpoints of 1.6 GB would be most of what a run writes
    for setting in ("checkpoint.every_steps=0", *experiment.sets, *sets):
        command += ["--set", setting]
    began_s = time.monotonic()
    code = subprocess.run(command, env={**os.environ, **VLLM_SETTINGS}, check=False).returncode
    facts = {
        **experiment._asdict(),
        "name": experiment.name,
        "sets": sets,
        "wall_s": time.monotonic() - began_s,
    }
    if code:
        return facts | {"error": f"exit code {code}"}
    run = Recorded(directory / "runs" / experiment.name)
    shutil.rmtree(run.files.checkpoints)
    evals = [event for event in run.events("eval") if event.get("reward_mean") is not None]
    steps = list(run.metrics())
    return facts | {
        "evals": [[event["version"], event["time_s"], event["reward_mean"]] for event in evals],
        "step_s": statistics.median(step["timing/step_s"] for step in steps),
        "train_s": statistics.median(step["timing/train_s"] for step in steps),
        "response_tokens": [step["response_tokens/mean"] for step in steps],
        "rewards": [step["reward/mean"] for step in steps],
    }


def show(directory: Path) -> None:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows_in(directory):
        groups[row["task"], row["trained"], row["mode"], row["engine"]].append(row)
    print(f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", sep="\n")
    for key, rows in sorted(groups.items()):
        whole = [row for row in rows if "error" not in row]
        failed = f" ({len(rows) - len(whole)} failed)" if len(whole) < len(rows) else ""
        cells = [*key, f"{len(whole)}{failed}"]
        if whole:
            before, after = ([row["evals"][place][2] for row in whole] for place in (0, -1))
            minutes = [row["evals"][-1][1] / 60 for row in whole]
            cells += [
                spread(before),
                spread(after),
                spread(minutes, 1),
                spread([r["step_s"] for r in whole], 1),
            ]
        print(f"| {' | '.join(cells)} |")


def draw(directory: Path, path: Path) -> None:
    """A panel per task, a colour per way to train it. Thick: the mean over seeds."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = [row for row in rows_in(directory) if "error" not in row]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    ways = list(dict.fromkeys((row["trained"], row["mode"], row["engine"]) for row in rows))
    figure = Figure(figsize=(3.6 * len(tasks) + 1.8, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for panel, task in zip(panels, tasks, strict=True):
        panel.set(title=task, xlabel="minutes")
        panel.grid(alpha=0.3)
        for number, way in enumerate(ways):
            runs = [
                row
                for row in rows
                if (row["task"], row["trained"], row["mode"], row["engine"]) == (task, *way)
            ]
            curves = [[(time_s / 60, reward) for _, time_s, reward in row["evals"]] for row in runs]
            colour = f"C{number}"
            for curve in curves if len(curves) > 1 else ():
                panel.plot(*zip(*curve, strict=True), color=colour, alpha=0.3, linewidth=0.8)
            if curves:
                means = [
                    [statistics.fmean(part) for part in zip(*points, strict=True)]
                    for points in zip(*curves, strict=False)
                ]
                panel.plot(
                    *zip(*means, strict=True), color=colour, linewidth=2.0, marker=".", label=" ".join(way)
                )
    panels[0].set_ylabel("held-out reward")
    labelled = {
        label: line
        for panel in panels
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labelled.values(), labelled.keys(), loc="outside lower center", ncols=len(tasks) + 1, frameon=False
    )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pretrained"}):
        figure.savefig(path, metadata={"Date": None})


def spread(values: list[float], digits: int = 3) -> str:
    """The mean, and least to most of several."""
    mean, ends = statistics.fmean(values), f"{min(values):.{digits}f} to {max(values):.{digits}f}"
    return f"{mean:.{digits}f}" + (f" ({ends})" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--seconds", type=float, default=36000)
    parser.add_argument("--draw", type=Path)
    given = parser.parse_args()
    if given.what == "run":
        sets = [f"run.train_steps={given.steps}", *given.sets]
        run_missing(given.directory, given.only, sets, given.seconds)
    show(given.directory)
    if given.draw:
        draw(given.directory, given.draw)


if __name__ == "__main__":
    main()

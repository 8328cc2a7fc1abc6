"""The effect of stale data on learning, with and without corrections: real runs of the default task, for
docs/learning.md.

    python -m benchmarks.learning run --directory DIR [--only WORD] [--seconds 3600]
    python -m benchmarks.learning draw --directory DIR --picture docs/pictures/learning.svg

`run` makes the runs that are missing in DIR/rows.jsonl, one at a time, and adds a line after each, so it may
be stopped and called again. It goes seed by seed, the most important runs first. `draw` makes the picture and
prints the tables in Markdown.

All runs have a weight sync after each train step of two optimizer steps, and partial rollout if eta is above
0. A mini-batch has a quarter of the profile's trajectories at nearly its learning rate, so that staleness
hurts within few steps. The staleness is measured: it depends on how far generation is ahead. The reward is
that of held-out prompts, sampled with the newest weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.training import shared_session, train_here

from asyncrl_cli.base.errors import Interrupted
from asyncrl_cli.observe.recorded import read_metrics
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import Profile

Row = Mapping[str, Any]
STEPS, GROUPS, RESPONSES = 45, 8, 8
SAMPLES = GROUPS * RESPONSES
"""Trajectories per train step, half of them per optimizer step."""
COMMON = (
    f"run.train_steps={STEPS}",
    "trainer.lr=4e-4",
    f"trainer.ppo_mini_batch_size={GROUPS // 2}",
    "async_training.require_batches=2",
    f"rollout.n={RESPONSES}",
    "eval.every_versions=15",
    "eval.prompts=128",
    "checkpoint.every_steps=0",
    "logging.samples_every_steps=0",
)
_RECOMPUTE = "algorithm.old_logprobs=recompute"
UNCORRECTED = "no correction"
CORRECTIONS = {
    "naive PPO": (),
    UNCORRECTED: (_RECOMPUTE, "algorithm.rollout_is=none"),
    "token TIS": (_RECOMPUTE, "algorithm.rollout_is_threshold=2.0"),
    "decoupled PPO": (_RECOMPUTE,),
    "sequence mask": (
        _RECOMPUTE,
        "algorithm.rollout_is=sequence",
        'algorithm.rollout_is_threshold="0.5_2.0"',
    ),
}
"""naive PPO: the ratio to the sampler is clipped. no correction: the ratio to the window's first weights, and
stale tokens count as if these had sampled them. token TIS: weighed by w, cut at 2. decoupled PPO: by w
(AReaL). sequence mask: by the product of the sequence's w, and 0 outside of 0.5 to 2."""
PARTS = {
    "GAE": ("algorithm.adv_estimator=gae", "critic.lr=1e-3"),
    "KL in the loss": ("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.02"),
    "KL in the reward": ("algorithm.use_kl_in_reward=true", "algorithm.kl_coef=0.005"),
    "LoRA, rank 8": ("lora.rank=8", "trainer.lr=4e-3"),
}
"""Further parts of the algorithm, on-policy: what they reach beside `naive PPO` at eta 0."""

ON_POLICY = "eta = 0"
COLOURS = {
    ON_POLICY: "#9aa0a6",
    "naive PPO": "#c62828",
    UNCORRECTED: "#e08a3c",
    "token TIS": "#2f7ebc",
    "decoupled PPO": "#2a9060",
    "sequence mask": "#8e5bb5",
}


class Experiment(NamedTuple):
    what: str
    eta: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.what}-{self.eta}-{self.seed}".lower().replace(" ", "-").replace(",", "")

    @property
    def sets(self) -> tuple[str, ...]:
        is_ahead = ("async_training.partial_rollout=true",) if self.eta else ()
        schedule = (f"run.seed={self.seed}", f"async_training.staleness_threshold={self.eta}", *is_ahead)
        return (*COMMON, *schedule, *(CORRECTIONS | PARTS)[self.what])


def experiments() -> Iterator[Experiment]:
    """On-policy every correction is 1, so one of them stands for all."""
    ends, usual = (
        ("naive PPO", "decoupled PPO", "token TIS"),
        [what for what in CORRECTIONS if what != UNCORRECTED],
    )
    yield Experiment("naive PPO", 0, 0)
    yield from (Experiment(what, eta, 0) for eta in (16, 4) for what in CORRECTIONS)
    yield from (Experiment(what, 0, 0) for what in PARTS)
    for seed in (1, 2):
        yield from (Experiment(what, 4, seed) for what in ends)
        yield Experiment("naive PPO", 0, seed)
        yield from (Experiment(what, 16, seed) for what in ends)
    yield from (Experiment(what, eta, 0) for eta in (8, 1) for what in usual)
    others = [what for what in CORRECTIONS if what not in ends]
    yield from (Experiment(what, eta, seed) for eta in (4, 16) for seed in (1, 2) for what in others)
    yield from (Experiment(what, eta, seed) for seed in (1, 2) for eta in (8, 1) for what in usual)


def row_of(experiment: Experiment, directory: Path) -> Row:
    lines = read_metrics(directory / "metrics.jsonl")
    events = map(json.loads, (directory / "events.jsonl").read_text(encoding="utf-8").splitlines())

    def column(key: str) -> list[float | None]:
        return [line.get(key) for line in lines]

    return experiment._asdict() | {
        "evals": [(event["version"], event["reward_mean"]) for event in events if event["event"] == "eval"],
        "time_s": column("time_s"),
        "reward": column("reward/mean"),
        "staleness": column("staleness/mean"),
        "kl": column("correction/kl"),
        "effective_ratio": column("correction/effective_ratio"),
        "tokens": column("response_tokens/mean"),
    }


def rows_in(directory: Path) -> list[Row]:
    path = directory / "rows.jsonl"
    return list(map(json.loads, path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def profile_of(experiment: Experiment, directory: Path) -> Profile:
    sets = (*experiment.sets, f"model.cache_dir={directory / 'models'}")
    return load("on-policy-pipeline", list(sets), environ={}).profile


def make_missing(directory: Path, only: str, seconds: float) -> None:
    """Runs that fail are told, left out, and made again at the next call. All are in one Ray session."""
    until_s, made = (
        time.monotonic() + seconds,
        {Experiment(row["what"], row["eta"], row["seed"]) for row in rows_in(directory)},
    )
    for experiment in experiments():
        if experiment in made or only not in experiment.name:
            continue
        if time.monotonic() > until_s:
            return
        runs, began_s = directory / "runs", time.monotonic()
        result = train_here(profile_of(experiment, directory), experiment.name, runs)
        if result.error is not None:
            print(f"{experiment.name}: {result.error}", file=sys.stderr, flush=True)
            if isinstance(result.error, Interrupted):
                return
            continue
        row = row_of(experiment, result.run_dir)
        with (directory / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{experiment.name}: {time.monotonic() - began_s:.0f} s, evals {row['evals']}",
            file=sys.stderr,
            flush=True,
        )
        shutil.rmtree(runs / experiment.name, ignore_errors=True)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A column per eta above 0: held-out reward against samples, and against time. Thick: the mean over
    seeds; grey: eta 0."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    etas = sorted({row["eta"] for row in rows} - {0})
    figure = Figure(figsize=(3.4 * len(etas), 5.6), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(2, len(etas), sharey=True, squeeze=False)
    for column, eta in enumerate(etas):
        panels[0, column].set_title(f"eta = {eta}")
        for name, colour in COLOURS.items():
            found = of(rows, name, eta) if name != ON_POLICY else of(rows, "naive PPO", 0)
            for axis, against in zip(panels[:, column], (samples_of, times_of), strict=True):
                _draw_line(axis, found, against, name, colour)
    for row, label in zip(panels, ("samples trained", "seconds"), strict=True):
        row[0].set_ylabel("held-out reward")
        for panel in row:
            panel.set_xlabel(label)
            panel.grid(alpha=0.3)
    handles = {
        label: line
        for panel in panels[0]
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(COLOURS), frameon=False
    )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning"}):
        figure.savefig(path, metadata={"Date": None})


def _draw_line(
    axis: Any, found: Sequence[Row], against: Callable[[Row], list[float]], name: str, colour: str
) -> None:
    curves = [(against(row), [reward for _, reward in row["evals"]]) for row in found]
    if not curves:
        return
    if len(curves) > 1:
        for x, y in curves:
            axis.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
    x, y = (
        [statistics.fmean(values) for values in zip(*of_all, strict=True)]
        for of_all in zip(*curves, strict=True)
    )
    axis.plot(x, y, color=colour, linewidth=2.0, label=name)


def of(rows: Sequence[Row], what: str, eta: int) -> list[Row]:
    return [row for row in rows if (row["what"], row["eta"]) == (what, eta)]


def samples_of(row: Row) -> list[float]:
    return [version * SAMPLES for version, _ in row["evals"]]


def times_of(row: Row) -> list[float]:
    """When each scored version had been trained."""
    return [row["time_s"][version - 1] if version else 0.0 for version, _ in row["evals"]]


def tables(rows: Sequence[Row]) -> Iterator[str]:
    etas = sorted({row["eta"] for row in rows})
    yield from _table("correction", [f"eta {eta}" for eta in etas])
    for what in CORRECTIONS:
        yield _line(what, [_spread([row["evals"][-1][1] for row in of(rows, what, eta)]) for eta in etas])
    yield ""
    yield from _table(
        "second half: versions old / KL / effective sample size", [f"eta {eta}" for eta in etas]
    )
    for what in CORRECTIONS:
        yield _line(what, [_late(of(rows, what, eta)) for eta in etas])
    yield ""
    yield from _table("on-policy", ["from", "to", "response tokens from", "to", "seconds"])
    for what in ("naive PPO", *PARTS):
        those = of(rows, what, 0)
        firsts, lasts = ([row["evals"][end][1] for row in those] for end in (0, -1))
        lengths = (
            [statistics.fmean(row["tokens"][part]) for row in those]
            for part in (slice(0, 3), slice(-3, None))
        )
        times = _spread([row["time_s"][-1] for row in those], ".0f")
        yield _line(
            what, [_spread(firsts), _spread(lasts), *(_spread(values, ".0f") for values in lengths), times]
        )


def _table(first: str, columns: Sequence[str]) -> list[str]:
    return [_line(first, columns), "|---" * (len(columns) + 1) + "|"]


def _line(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _late(rows: Sequence[Row]) -> str:
    """Means over the second half of these runs' steps; of what they have."""
    found = []
    for key, form in (("staleness", ".1f"), ("kl", ".3f"), ("effective_ratio", ".2f")):
        values = [value for row in rows for value in row[key][STEPS // 2 :] if value is not None]
        found.append(f"{statistics.fmean(values):{form}}" if values else "-")
    return " / ".join(found) if rows else "-"


def _spread(values: Sequence[float], form: str = ".3f") -> str:
    """The mean; of several the least, the most and how many."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{form}}"
    return (
        mean
        if len(values) == 1
        else (f"{mean} ({min(values):{form}} to {max(values):{form}}; {len(values)})")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "draw"])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--only", default="", help="only runs with this in their name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this time")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    directory = options.directory.absolute()
    if options.what == "run":
        directory.mkdir(parents=True, exist_ok=True)
        with shared_session(profile_of(next(experiments()), directory)):
            return make_missing(directory, options.only, options.seconds)
    rows = rows_in(directory)
    if options.picture:
        draw(rows, options.picture)
    print("\n".join(tables(rows)))


if __name__ == "__main__":
    main()

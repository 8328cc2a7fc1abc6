"""The value of a trajectory's slot while it waits for a tool: compares rollout.hold_slots true and false.

    python -m benchmarks.hold_slots --simulate
    python -m benchmarks.hold_slots --directory DIR [--tool-s 0.5] [--steps 16] [--pairs 2]

The first command simulates the loop on `laptop-tiny` with episodes like those of builtin:guess, for tools
that take 0.1 to 10 s. The second trains on builtin:guess itself, in pairs of real runs with the same seed
that alternate in order; its environment sleeps before every hint, lognormal around `--tool-s`. Columns, means
over the steps after the first two:

    step_s   seconds per train step        slots    share of slots with a running sequence
    waiting  trajectories waiting for a tool, as a share of the slots (besides `slots` if slots are not held)
    stale    mean staleness of trained tokens, in versions
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.training import train

from asyncrl_cli.observe.recorded import read_metrics
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.simulate.workload import Drawn, Lengths, Turns
from asyncrl_cli.simulate.workload_files import load_workload, profile_for
from asyncrl_cli.simulate.world import simulate

PROFILES = ("stale-samples", "partial-rollout")
TOOLS_S = (0.1, 1.0, 10.0)
SIGMA = 1.0
"""Of the logarithm of a tool's seconds."""
WINDOWS = 12
SIZES = (
    "rollout.slots=32",
    "rollout.n=8",
    "async_training.staleness_threshold=1",
    "async_training.trigger_parameter_sync_step=2",
)
GUESSING = (
    "task.source=builtin:guess",
    "task.environment=slow-guess",
    "model.warm_start_steps=250",
    "model.warm_start_label_noise=0.7",
    "rollout.max_prompt_tokens=16",
    "rollout.max_response_tokens=6",
    "env.max_turns=9",
    "env.max_context_tokens=128",
)
KEYS = {
    "step_s": "timing/step_s",
    "slots": "rollouter/slot_utilization",
    "waiting": "rollouter/tool_waiting_ratio",
    "stale": "staleness/mean",
}
ENVIRONMENT = """
import asyncio, os, random
from asyncrl_cli.builtin.builtin_tasks import Guess

class SlowGuess(Guess):
    async def step(self, answer):
        await asyncio.sleep(float(os.environ["SLOW_GUESS_S"]) * random.lognormvariate(0.0, {sigma}))
        return await super().step(answer)
"""


def simulated(profile: str, tool_s: float, *, hold: bool) -> Sequence[Line]:
    """A step's guesses are four tokens long, and three or four are made."""
    workload = load_workload("laptop-tiny")
    turns = Turns(
        number=Drawn(median=3.6, sigma=0.4),
        tool_s=Drawn(median=tool_s, sigma=SIGMA),
        result_tokens=Drawn(median=4.0),
    )
    guess = workload.model_copy(
        update={"turns": turns, "lengths": Lengths(distribution="list", response_tokens=(3, 4, 4, 5))}
    )
    sets = [
        *SIZES,
        f"rollout.hold_slots={str(hold).lower()}",
        "env.tool_timeout_s=600",
        "env.max_context_tokens=400",
    ]
    return simulate(profile_for(guess, profile, sets, groups=WINDOWS * 32, environ={}).profile, guess).lines


def trained(
    directory: Path, profile: str, tool_s: float, steps: int, seed: int, *, hold: bool
) -> Sequence[Line]:
    name = f"{profile}-{tool_s:g}-{'held' if hold else 'lent'}-{seed}"
    sets = [
        *SIZES,
        *GUESSING,
        f"rollout.hold_slots={str(hold).lower()}",
        f"run.train_steps={steps}",
        f"run.seed={seed}",
    ]
    sets += [f"model.cache_dir={directory / 'models'}", "eval.prompts=0", "checkpoint.every_steps=0"]
    paths = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    run = train(profile, name, sets, directory / "runs", PYTHONPATH=paths, SLOW_GUESS_S=str(tool_s))
    return read_metrics(run / "metrics.jsonl")


def install(directory: Path) -> None:
    """Make the slow environment a package of `directory`, as any other package would offer one."""
    told = directory / "slow_guess-1.0.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    (directory / "slow_guess.py").write_text(ENVIRONMENT.format(sigma=SIGMA))
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-guess\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[asyncrl.environments]\nslow-guess = slow_guess:SlowGuess\n")


def row(what: str, lines: Sequence[Line]) -> str:
    """Means over the steps after the first window."""
    kept = lines[2:]
    means = {name: sum(line.get(key, 0.0) for line in kept) / len(kept) for name, key in KEYS.items()}
    return f"{what:<44}" + "".join(f"{name} {mean:8.3f}   " for name, mean in means.items())


def rows(options: argparse.Namespace) -> Iterator[str]:
    if options.simulate:
        for profile in PROFILES:
            for tool_s in TOOLS_S:
                for hold in (True, False):
                    what = f"SIMULATED {profile} tools {tool_s:g} s {'held' if hold else 'lent'}"
                    yield row(what, simulated(profile, tool_s, hold=hold))
        return
    install(options.directory)
    for seed in range(options.pairs):
        for hold in (True, False) if seed % 2 else (False, True):
            lines = trained(
                options.directory, "partial-rollout", options.tool_s, options.steps, seed, hold=hold
            )
            yield row(
                f"partial-rollout tools {options.tool_s:g} s {'held' if hold else 'lent'}, seed {seed}", lines
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--simulate", action="store_true")
    where.add_argument("--directory", type=Path)
    parser.add_argument("--tool-s", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=2)
    for line in rows(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""Runs many seeds of the deterministic simulation, counts what happened, and prints a command to replay each
seed that failed.

    python -m benchmarks.fault_seeds [--seeds 10000] [--first 0] [--processes 2] [--turns] [--scorer]
                                     [--deterministic]

With `--turns` every scenario has several turns; with `--scorer` every scenario that is not colocated has
scorers. With `--deterministic` every scenario is a deterministic run (`tests.loop.proof.logical`), and is
run twice: in another world the second time, which has to train the same. Without it, one of DETERMINISTIC_IN
scenarios is, once. Run it in the project's root, because it uses the proof in the tests. Exits with 1 if any
seed failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from functools import partial

from tests.loop.proof.drawing import draw
from tests.loop.proof.logical import draw_logical, pair, run_logical
from tests.loop.proof.scenarios import run

_CHUNK_SEEDS = 25
DETERMINISTIC_IN = 7
"""As often as each of the six other modes."""


def run_seeds(
    seeds: range, deterministic: bool = False, **drawn: bool
) -> tuple[Counter[str], Counter[str], Counter[str], dict[int, str]]:
    """Scenarios by mode, events, faults, and what broke by seed."""
    modes, events, faults, broken = Counter[str](), Counter[str](), Counter[str](), dict[int, str]()
    for seed in seeds:
        if deterministic or (not any(drawn.values()) and seed % DETERMINISTIC_IN == 0):
            outcomes, wrong = [], ""
            if deterministic:
                *outcomes, wrong = pair(seed)
            else:
                outcomes = [run_logical(draw_logical(seed))]
                wrong = str(outcomes[0].broken or "")
            for one in outcomes:
                modes[f"deterministic {one.scenario.mode}"] += 1
                events += one.counts + Counter({"virtual seconds": round(one.virtual_s)})
                faults += one.faults
            if wrong:
                broken[seed] = wrong
            continue
        outcome = run(draw(seed, **drawn))
        modes[" + ".join((outcome.scenario.mode, *sorted(outcome.scenario.scorers)))] += 1
        events += outcome.counts + Counter({"virtual seconds": round(outcome.virtual_s)})
        faults += outcome.faults
        if outcome.broken is not None:
            broken[seed] = f"{type(outcome.broken).__name__}: {outcome.broken}"
    return modes, events, faults, broken


def table(title: str, counts: Counter[str]) -> str:
    lines = [f"  {name:<32}{count:>12,}" for name, count in sorted(counts.items())]
    return "\n".join([f"{title:<34}{counts.total():>12,}", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--scorer", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    last, began_s = options.first + options.seeds, time.monotonic()
    chunks = [
        range(start, min(start + _CHUNK_SEEDS, last)) for start in range(options.first, last, _CHUNK_SEEDS)
    ]
    modes, events, faults, broken = Counter[str](), Counter[str](), Counter[str](), dict[int, str]()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.imap_unordered(
            partial(
                run_seeds,
                deterministic=options.deterministic,
                with_turns=options.turns,
                with_scorer=options.scorer,
            ),
            chunks,
        )
        for done, (more_modes, more_events, more_faults, more_broken) in enumerate(results, 1):
            modes, events, faults, broken = (
                modes + more_modes,
                events + more_events,
                faults + more_faults,
                broken | more_broken,
            )
            print(
                f"\r{done} of {len(chunks)} chunks, {len(broken)} failing seeds",
                end="",
                file=sys.stderr,
                flush=True,
            )
    elapsed_s = time.monotonic() - began_s
    print(file=sys.stderr)
    virtual_s = events.pop("virtual seconds", 0)
    print(
        f"seeds {options.first} to {last - 1}: {elapsed_s:.0f} s, {options.processes} processes, "
        f"{virtual_s:,} virtual seconds\n"
    )
    print(
        "\n\n".join(
            [table("scenarios", modes), table("events", events), table("faults that happened", faults)]
        )
    )
    print(f"\nfailing seeds: {len(broken)}")
    for seed, message in sorted(broken.items()):
        flags = " --turns" * options.turns + " --scorer" * options.scorer
        is_mixed = not (options.turns or options.scorer) and seed % DETERMINISTIC_IN == 0
        module = "logical" if options.deterministic or is_mixed else "scenarios"
        print(f"  {message}\n    python -m tests.loop.proof.{module} {seed}{flags}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

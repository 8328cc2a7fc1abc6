"""Real runs with `run.deterministic = true`: are all versions of the weights the same, and what does it cost?

    python -m benchmarks.deterministic --directory DIR [--steps 24] [--profile NAME ...]

Each profile runs three times: as it is, deterministic, and deterministic beside a busy process and with one
of its two rollout workers killed in the middle. Then `on-policy-pipeline` and `stream-off-policy` with K = 1
are held against `colocate`. CPU seconds are of all processes of a run, as seen every 0.3 s, with start and
end; tokens are those trained. Exits with 1 if any two runs differ that should be equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.run.commands import lines
from tests.run.fingerprints import DETERMINISTIC, RANKS, SETS_OF, busy_core, train

PROFILES = (*SETS_OF,)


def trained_tokens(run: Path) -> int:
    return sum(event["tokens"] for event in lines(run / "events.jsonl") if event["event"] == "trained")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--profile", action="append", choices=PROFILES)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    sets = (*DETERMINISTIC, f"run.train_steps={options.steps}", "rollout.max_restarts=1")
    found, differ = dict[str, dict[int, str]](), list[str]()
    print("| profile | run | versions | trained tokens | CPU s | weights |\n|---|---|---|---|---|---|")

    def row(profile: str, run: str, *more: str, kill_after: int | None = None) -> dict[int, str]:
        name = f"{profile}-{run.replace(' ', '-')}"
        own = (*sets, *SETS_OF.get(profile, ()), *more)
        prints, cpu_s = train(options.directory, profile, name, *own, kill_after=kill_after)
        tokens = trained_tokens(options.directory / "runs" / name)
        same = ""
        if run != "ordinary" and (first := found.setdefault(profile, prints)) is not prints:
            same = "equal" if prints == first else "DIFFERENT"
            differ.extend([name] if prints != first else [])
        print(f"| {profile} | {run} | {len(prints)} | {tokens:,} | {cpu_s:.0f} | {same} |", flush=True)
        return prints

    for profile in options.profile or PROFILES:
        row(profile, "ordinary", "run.deterministic=false")
        row(profile, "deterministic")
        with busy_core():
            row(profile, "busy and killed", kill_after=options.steps // 2)
    k_is_1 = ("async_training.trigger_parameter_sync_step=1", *RANKS)
    stream = row("stream-off-policy", "deterministic", *k_is_1) if "colocate" in found else {}
    for profile, prints in {**found, "stream-off-policy": stream}.items():
        if profile in ("on-policy-pipeline", "stream-off-policy") and "colocate" in found:
            is_equal = prints == found["colocate"]
            differ.extend([] if is_equal else [profile])
            print(f"{profile} and colocate: {'equal' if is_equal else 'DIFFERENT'}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

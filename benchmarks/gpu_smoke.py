"""Checks of all that a GPU executes, one after the other, each in a process of its own and within a time
limit.

    python benchmarks/gpu_smoke.py [--device cuda | cpu] [--check NAME...] [--limit-s 180] [--json [FILE]]

    attention  the chosen attention and packing; packed rows have the logprobs and gradients of padded ones
    prefixes   what rows share is computed once: logprobs and gradients are those of whole rows; the speed of
               both
    modes      activation checkpointing x (offload, recompute, LoRA, critic): losses are those of a CPU
    resume     a snapshot is written and loaded by another trainer: the same state, and the same next step
    memory     the allocator's peak in a train step, against the estimate of `asyncrl plan`, at three sizes
    engine     the transformers engine: a version loaded in flight, the version of each token, logprobs
               against the trainer's
    loop       the real loop, trainer and engine in one process: colocate against partial rollout
    bench      tokens/s by microbatch and by chunk of the logits, and the share of the card's peak

    probes     with vLLM: a version loaded in flight, logprobs of the probes against the trainer's
    ipc, nccl  the same, with the weights sent from GPU memory to GPU memory (nccl: two GPUs)
    sleep      with vLLM: memory freed asleep, the same response after waking up, levels 1 and 2
    experts    with vLLM: the experts of each token are replayed; logprobs with and without them
    colocate   with vLLM and Ray: `asyncrl train --profile colocate`, with the object store and with ipc

Prints one JSON line per check as soon as it has ended: {"check", "end", "seconds", "card", "detail",
"figures"}. `end` is passed, failed or skipped (`detail` says why). `--json` also writes the table of
docs/gpu.md. Exits with 0 if all checks that were run passed, 1 if one failed, 2 if none was run. `--device
cpu` runs small models, to see that the checks themselves work.

Needs torch and transformers alone; benchmarks/gpu_wheels.py collects what a machine without a network lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from gpu_smoke_process import Outcome, outcome_of


class Check(NamedTuple):
    """Where `check_<name>` is, and the packages that it needs beside torch and transformers."""

    module: str
    needs: tuple[str, ...] = ()


CHECKS = {
    "attention": Check("gpu_smoke_trainer"),
    "prefixes": Check("gpu_smoke_trainer"),
    "modes": Check("gpu_smoke_trainer"),
    "resume": Check("gpu_smoke_trainer"),
    "memory": Check("gpu_smoke_measures"),
    "engine": Check("gpu_smoke_engine"),
    "loop": Check("gpu_smoke_loop"),
    "bench": Check("gpu_smoke_measures"),
    "probes": Check("gpu_smoke_vllm", ("vllm",)),
    "ipc": Check("gpu_smoke_vllm", ("vllm",)),
    "nccl": Check("gpu_smoke_vllm", ("vllm",)),
    "sleep": Check("gpu_smoke_vllm", ("vllm",)),
    "experts": Check("gpu_smoke_vllm", ("vllm",)),
    "colocate": Check("gpu_smoke_vllm", ("vllm", "ray", "pydantic_settings")),
}
DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu.md"
LIMIT_S = 180.0
BEGIN, END = "<!-- checks: written by benchmarks/gpu_smoke.py --json -->", "<!-- end of checks -->"
HEAD = ("check", "result", "card, torch, transformers", "s", "figures")
NOT_YET = "not yet run"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--check", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of one check; vLLM starts in minutes")
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=DOCUMENT,
        metavar="FILE",
        help="write the table, by default to docs/gpu.md",
    )
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as directory:
        for name in options.check:
            outcomes.append(_outcome(name, options.device, Path(directory), options.limit_s))
            print(json.dumps(outcomes[-1]), flush=True)
    if options.json:
        write_table(options.json, outcomes)
    ends = {outcome["end"] for outcome in outcomes}
    return 1 if "failed" in ends else 0 if "passed" in ends else 2


def _outcome(name: str, device: str, directory: Path, limit_s: float) -> Outcome:
    check = CHECKS[name]
    if missing := [package for package in check.needs if find_spec(package) is None]:
        why = f"{' and '.join(missing)} not installed"
        return {"check": name, "end": "skipped", "seconds": 0.0, "card": device, "detail": why, "figures": {}}
    return outcome_of(name, check.module, device, directory, limit_s)


def write_table(path: Path, outcomes: list[Outcome]) -> None:
    """Replace these checks' rows in the table of `path`. Others keep theirs; checks that nobody has run yet
    have a row, too."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    old = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    ran = {outcome["check"]: _row(outcome) for outcome in outcomes if outcome["end"] != "skipped"}
    rows = [ran.get(name) or old.get(name) or f"| {name} | {NOT_YET} | | | |" for name in CHECKS]
    head = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    path.write_text("\n".join([f"{before}{BEGIN}", *head, *rows, f"{END}{after}"]), encoding="utf-8")


def _row(outcome: Outcome) -> str:
    figures = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in outcome["figures"].items()
    )
    result = "passed" if outcome["end"] == "passed" else f"**failed**: {outcome['detail']}".replace("|", "/")
    return f"| {outcome['check']} | {result} | {outcome['card']} | {outcome['seconds']} | {figures} |"


if __name__ == "__main__":
    sys.exit(main())

"""`asyncrl trace`: writes a run's trace file for Perfetto."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.cli.console import (
    RUNS_DIR,
    JsonOption,
    RunArgument,
    RunsDirOption,
    print_json,
    print_text,
    say,
    warn,
)

EXAMPLES = """
  asyncrl trace my-run                      writes runs/my-run/trace.json
  asyncrl trace my-run --steps 35:45        part of a long run
  asyncrl trace my-run --out trace.json.gz

Open the file at https://ui.perfetto.dev (it stays in your browser) or chrome://tracing.
docs/trace.md lists questions that it answers. Slots show their sequences if the run
has [bold]logging.trace_sequences = true[/]."""
STEPS = re.compile(r"(?P<first>\d{0,15})(?P<colon>:)?(?P<last>\d{0,15})")


def trace(
    run: RunArgument,
    steps: Annotated[
        str,
        typer.Option(
            "--steps",
            metavar="A:B",
            help="Only these train steps. A: and :B leave one end open; A is one step.",
        ),
    ] = ":",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File to write (.gz: compressed). Default: trace.json in the run's directory.",
        ),
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Write a trace for Perfetto or chrome://tracing: who did what when, and how each group became a
    version."""
    from asyncrl_cli.observe.recorded import Recorded
    from asyncrl_cli.report.trace import write_trace

    first, last = parse_steps(steps)
    recorded = Recorded.find(run, runs_dir)
    path = out or recorded.files.path / "trace.json"
    counted = write_trace(recorded, path, first, last)
    warn(*recorded.damage.notes)
    if as_json:
        print_json({"trace": str(path), "num_bytes": path.stat().st_size, "entries": dict(counted)})
    groups, trained = counted["group"], counted["step"]
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    say(f"{groups:,} groups, {trained:,} train steps, {size}; open it at https://ui.perfetto.dev")
    if not as_json:
        print_text(str(path))


def parse_steps(text: str) -> tuple[int, int | None]:
    """`A:B`, `A:`, `:B`, `A` or `:` as (first step, last step or None). Raises ConfigError for anything
    else."""
    found = STEPS.fullmatch(text)
    if not text or found is None:
        raise ConfigError(
            f"--steps '{text:.40}' is not a range of train steps", hint="--steps 35:45, 35: or :45"
        )
    first = int(found["first"] or 1)
    last = (int(found["last"]) if found["last"] else None) if found["colon"] else first
    if last is not None and last < first:
        raise ConfigError(f"--steps {text} ends before it begins", hint=f"--steps {last}:{first}")
    return first, last

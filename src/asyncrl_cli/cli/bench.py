"""`asyncrl bench`: compares profiles on the same work and the same resources."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.cli.console import print_json, print_prose, say, stderr, stdout, warn
from asyncrl_cli.cli.options import (
    AddressOption,
    JsonOption,
    number_option,
    profile_names,
    profile_option,
    set_option,
    text_option,
    workload_names,
)

if TYPE_CHECKING:
    from asyncrl_cli.bench.results import Comparison

EXAMPLES = """
  asyncrl bench                  partial-rollout against colocate
  asyncrl bench -p my.toml       your profile against its own colocated twin
  asyncrl bench -p stale-samples -p partial-rollout --repeat 3
  asyncrl bench --simulate verl-7b-math-128 -p stream-off-policy
  asyncrl bench --compare partial-rollout -p my.toml --json > results.json

Real runs take minutes each. All start from the same model and see the same
prompts. [bold]--simulate[/] runs the same loop on a virtual clock with the times of a
workload, and labels its results SIMULATED."""


def bench(
    baseline: Annotated[
        str | None,
        text_option(
            "--compare",
            "BASELINE",
            "The profile to compare the others with. Default: a colocated twin of the first --profile "
            "FILE, or colocate.",
            profile_names,
        ),
    ] = None,
    keep_k: Annotated[
        bool,
        typer.Option(
            "--keep-k",
            help="The colocated twin syncs after every train step (K = 1), instead of with your profile's K.",
        ),
    ] = False,
    profiles: Annotated[
        list[str] | None, profile_option("A profile to compare; may be repeated. Default: partial-rollout.")
    ] = None,
    simulate: Annotated[
        str | None,
        text_option(
            "--simulate",
            "WORKLOAD",
            "Train nothing, use a virtual clock. laptop-tiny, verl-7b-math-128, another shipped workload (a "
            "wrong name lists all), or a workload's TOML file.",
            workload_names,
        ),
    ] = None,
    repeat: Annotated[
        int, number_option("--repeat", "Runs of each profile, with the seeds SEED, SEED + 1, ...", most=1000)
    ] = 1,
    groups: Annotated[
        int | None,
        number_option("--groups", "Groups that each run trains. Default: 384, or the workload's windows."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        set_option(
            "Override a key in all profiles, including the baseline. To change only one, give a file."
        ),
    ] = None,
    seed: Annotated[int, number_option("--seed", "Seed of the first repeat.", least=0)] = 0,
    out: Annotated[
        Path | None,
        text_option(
            "--out", "DIR", "Directory for results.json, report.md and report.html. Default: bench/TIME."
        ),
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare profiles on the same work and resources: time, idleness, staleness, and how close each is to
    its bound."""
    from asyncrl_cli.bench.bars import Bars
    from asyncrl_cli.bench.comparison import compare
    from asyncrl_cli.bench.contest import contest_of
    from asyncrl_cli.bench.output import output_directory
    from asyncrl_cli.simulate.workload_files import load_workload

    workload = None if simulate is None else load_workload(simulate)
    with output_directory(out) as directory:
        contest = contest_of(
            baseline,
            profiles or ["partial-rollout"],
            directory=directory,
            keep_k=keep_k,
            sets=sets or (),
            seeds=range(seed, seed + repeat),
            groups=groups,
            workload=workload,
            address=address,
        )
        warn(*contest.warnings)
        with Bars(stderr()) as bars:
            bars.say(f"SIMULATED {workload.name}" if workload else "real runs")
            comparison = compare(contest, directory, bars)
        _show(comparison, directory, as_json=as_json)
        if comparison.error is not None:
            raise comparison.error


def _show(comparison: Comparison, directory: Path, *, as_json: bool) -> None:
    """Write and print the results, then make the page: a run that cannot be read must not lose the
    results."""
    from asyncrl_cli.bench.output import heading_of, short_notes, table_of, write_results
    from asyncrl_cli.report.write import write_report

    written = write_results(comparison, directory)
    if as_json:
        print_json(comparison.to_json())
    else:
        stdout().print(heading_of(comparison), style="italic", markup=False, soft_wrap=True)
        stdout().print(table_of(comparison), crop=False)
        for name in comparison.missing:
            print_prose(f"not finished: {name}")
        for lines in (tuple(short_notes(comparison)), comparison.remarks):
            if lines:
                print_prose("\n" + "\n".join(lines))
    try:
        page, notes = write_report([str(directory)], None, directory, lambda text: None)
        written.append(page)
        warn(*notes)
    except (AsyncrlError, OSError) as error:
        warn(f"there is no report.html: {error}")
    for path in written:
        say(f"wrote {path}")

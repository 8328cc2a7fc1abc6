"""`asyncrl samples`: shows what a run's policies wrote, and which version sampled which token."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from asyncrl_cli.cli.console import (
    RUNS_DIR,
    JsonOption,
    RunArgument,
    RunsDirOption,
    number_option,
    print_json,
    say,
    stdout,
    warn,
)

EXAMPLES = """
  asyncrl samples my-run                    from the newest dumped step
  asyncrl samples my-run --step 40 --sort staleness
  asyncrl samples my-run --group 5f84c0bd   a group, by the beginning of its key
  asyncrl samples my-run --json | jq '.[].reward'

The colour of a token shows the age of its version. (v7) precedes tokens of version 7;
(load v8) marks where version 8 was loaded within a response. [bold]logging.samples_*[/]
set how many trajectories a run keeps."""


def samples(
    run: RunArgument,
    step: Annotated[
        int | None, number_option("--step", "A train step. Default: the newest dumped step.")
    ] = None,
    group: Annotated[
        str, typer.Option("--group", metavar="G", help="Only groups whose key begins with G, of any step.")
    ] = "",
    sort: Annotated[
        Literal["staleness", "reward", "length", "span"] | None,
        typer.Option("--sort", help="Sort by this, largest first. Default: as dumped, group by group."),
    ] = None,
    most: Annotated[int, number_option("--most", "Show at most N trajectories.", also="-n")] = 8,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show sampled trajectories: prompt, response with versions, reward, advantage, probabilities."""
    from asyncrl_cli.observe.recorded import Recorded
    from asyncrl_cli.report.samples_text import shown
    from asyncrl_cli.report.trajectories import choose

    recorded = Recorded.find(run, runs_dir)
    try:
        chosen = choose(recorded, step, group, sort, most)
    finally:
        warn(*recorded.damage.notes)
    if as_json:
        print_json([{**one.line, "figures": one.figures()} for one in chosen])
        return
    console = stdout()
    for one in chosen:
        console.print(shown(one))
    steps = recorded.sampled_steps
    say(
        f"{len(chosen)} of step {chosen[0].step}; samples are kept of {len(steps)} steps, from {steps[0]} to "
        f"{steps[-1]}"
    )

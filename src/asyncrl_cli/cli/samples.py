"""`asyncrl samples`: what a run's policies wrote, and which version wrote which token."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from asyncrl_cli.cli.console import RUNS_DIR, JsonOption, RunArgument, RunsDirOption, number_option, print_json, say, stdout

EXAMPLES = """
  asyncrl samples my-run                    of the newest step that was dumped
  asyncrl samples my-run --step 40 --sort staleness
  asyncrl samples my-run --group 5f84c0bd   a group by the beginning of its key
  asyncrl samples my-run --json | jq '.[].reward'

Every token has the colour of its version's age, and (v7) stands before the tokens of
version 7, (load v8) where version 8 was loaded within an answer. [bold]logging.samples_*[/]
say how many trajectories a run keeps."""


def samples(
    run: RunArgument,
    step: Annotated[int | None, number_option("--step", "A train step; by default the newest dumped.")] = None,
    group: Annotated[str, typer.Option("--group", metavar="G", help="Only groups whose key begins so; of any step.")] = "",
    sort: Annotated[
        Literal["staleness", "reward", "length", "span"] | None,
        typer.Option("--sort", help="The largest first; by default as they were dumped, group by group."),
    ] = None,
    most: Annotated[int, typer.Option("--most", "-n", metavar="N", min=1, help="How many to show.")] = 8,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show sampled trajectories: prompt, response by version, reward, advantage, probabilities."""
    from asyncrl_cli.observe.recorded import Recorded
    from asyncrl_cli.report.samples_text import shown
    from asyncrl_cli.report.trajectories import choose

    recorded = Recorded.find(run, runs_dir)
    chosen = choose(recorded, step, group, sort, most)
    if as_json:
        print_json([{**one.line, "figures": one.figures()} for one in chosen])
        return
    console = stdout()
    for one in chosen:
        console.print(shown(one))
    steps = recorded.sampled_steps
    say(f"{len(chosen)} of step {chosen[0].step}; dumped are {len(steps)} steps, from {steps[0]} to {steps[-1]}")

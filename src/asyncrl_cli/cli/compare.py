"""`asyncrl compare`: shows recorded runs side by side in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from rich.text import Text

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.cli.console import (
    MOST,
    RUNS_DIR,
    JsonOption,
    RunsDirOption,
    number_option,
    print_json,
    print_prose,
    print_table,
    run_argument,
    warn,
)

if TYPE_CHECKING:
    from asyncrl_cli.observe.side_by_side import SideBySide

EXAMPLES = """
  asyncrl compare first second
  asyncrl compare runs/a runs/b runs/c --reward 0.6
  asyncrl compare first second --json | jq .differences"""


def compare(
    runs: Annotated[list[str], run_argument("RUN RUN...", "Names or directories of two or more runs.")],
    runs_dir: RunsDirOption = RUNS_DIR,
    reward: Annotated[
        float | None,
        number_option(
            "--reward",
            "Show the time to this reward. Default: the highest that all runs reached.",
            least=-MOST,
            metavar="R",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side: configuration differences, reward at equal samples and time, idleness,
    staleness, speed.

    `asyncrl bench` makes runs that can be compared fairly; this command compares any runs."""
    from asyncrl_cli.observe.recorded import Recorded
    from asyncrl_cli.observe.side_by_side import side_by_side

    if len(runs) < 2:
        raise ConfigError(
            "a comparison needs two runs or more", hint=f"`asyncrl status {runs[0]}` shows one run"
        )
    recorded = [Recorded.find(run, runs_dir) for run in runs]
    made = side_by_side(recorded, reward)
    warn(*(note for run in recorded for note in run.damage.notes), *_doubts(made))
    if as_json:
        print_json(made.to_json())
    else:
        _print(made)


def _doubts(made: SideBySide) -> list[str]:
    work = [key for key in made.differences if key.startswith(("task.", "env."))]
    doubts = (
        [f"the runs' tasks differ ({', '.join(work)}): their rewards may not be comparable"] if work else []
    )
    return doubts + (
        [] if made.samples else ["a run has no train step with a reward yet: rewards are not compared"]
    )


def _print(made: SideBySide) -> None:
    if made.differences:
        rows = [(key, [_shown(value) for value in values]) for key, values in made.differences.items()]
        _print_table("configuration", made.names, rows)
    else:
        print_prose("their configurations are the same")
    print_prose("")
    _print_table("figures", made.names, [(figure.label, figure.texts) for figure in made.figures])
    print_prose(
        "\nrewards: mean over the last tenth of the samples that all runs have trained; last eval: with its "
        "95% interval "
        "over prompts; idleness, staleness, speed: the whole run"
    )


def _print_table(title: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    of_runs = (Column(name, justify="right", overflow="fold") for name in names)
    columns = Column(title, style="dim bold", overflow="fold"), *of_runs
    print_table(columns, ((label, *map(Text, cells)) for label, cells in rows))


def _shown(value: object) -> str:
    from asyncrl_cli.profile.toml_files import toml_value

    return "-" if value is None else toml_value(value)

"""Commands that read recorded runs: `asyncrl report`, `compare`, `samples`, `trace` and `export`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Column

from asyncrl_cli.base.errors import ConfigError, counted
from asyncrl_cli.cli.console import print_json, print_table, print_text, say, stdout, warn
from asyncrl_cli.cli.options import (
    MOST,
    RUNS_DIR,
    JsonOption,
    RunArgument,
    RunsDirOption,
    number_option,
    run_argument,
    text_option,
)
from asyncrl_cli.observe.format import size

REPORT_EXAMPLES = """
  asyncrl report first                          the report of run "first"; stdout is the file's path
  asyncrl report first second --out two.html    side by side, configuration differences first
  asyncrl report bench/20261123-094500 --open   a bench: its table, its bound and its runs"""
COMPARE_EXAMPLES = """
  asyncrl compare first second --open
  asyncrl compare runs/a runs/b runs/c --reward 0.6
  asyncrl compare first second --json | jq .differences"""
SAMPLES_EXAMPLES = """
  asyncrl samples my-run                    from the newest dumped step
  asyncrl samples my-run --step 40 --sort staleness
  asyncrl samples my-run --group 5f84c0bd   a group, by the beginning of its key
  asyncrl samples my-run --field logprobs   tokens coloured by a field
  asyncrl samples my-run --json | jq '.[].reward'

[bold]reward names_answer[/] is 1 where the reference answer stands in the response
(docs/rewards.md). The colour of a token shows the age of its version. (v7) precedes tokens of version 7;
(load v8) marks where version 8 was loaded within a response. [bold]logging.samples_*[/]
set how many trajectories a run keeps."""
TRACE_EXAMPLES = """
  asyncrl trace my-run                      writes runs/my-run/trace.json
  asyncrl trace my-run --steps 35:45        part of a long run
  asyncrl trace my-run --out trace.json.gz

Open the file at https://ui.perfetto.dev (it stays in your browser) or chrome://tracing.
docs/trace.md lists questions that it answers. Slots show their sequences if the run
has [bold]logging.trace_sequences = true[/]."""
EXPORT_EXAMPLES = """
  asyncrl export first                                    the newest whole checkpoint of run "first"
  asyncrl export first --version 12 --out my-model        the weights of version 12, as used for rollouts
  vllm serve $(asyncrl export first)                      stdout is only the directory's path"""
MAIN_FIGURES = (
    "state",
    "train steps",
    "time",
    "reward at",
    "last eval",
    "against",
    "trainer idle",
    "rollouter idle",
)
"""How the labels begin of the rows that `compare` prints."""
STEPS = re.compile(r"(?P<first>\d{0,15})(?P<colon>:)?(?P<last>\d{0,15})")

ReportOption = Annotated[
    Path | None,
    text_option(
        "--out", "FILE", "The file to write. Default: report.html, for one run in the run's directory."
    ),
]
OpenOption = Annotated[bool, typer.Option("--open", help="Open the report in the browser.")]


def report(
    runs: Annotated[
        list[str], run_argument("RUN...", "Names or directories of runs, or the directory of a bench.")
    ],
    out: ReportOption = None,
    open_it: OpenOption = False,
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Write a report of one or more runs as one HTML file: a verdict in words, and charts of everything
    measured."""
    _write(runs, out, runs_dir, open_it)


def compare(
    runs: Annotated[list[str], run_argument("RUN RUN...", "Names or directories of two or more runs.")],
    out: ReportOption = None,
    reward: Annotated[
        float | None,
        number_option(
            "--reward",
            "Show the time to this reward. Default: the highest that all runs reached.",
            least=-MOST,
            metavar="R",
        ),
    ] = None,
    open_it: OpenOption = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Print the main figures of runs, and write a report of them side by side: configuration differences,
    reward at equal samples and time, idleness, staleness, speed. With --json: print all these figures.

    `asyncrl bench` makes runs that can be compared fairly; this command compares any runs."""
    from asyncrl_cli.observe.recorded import Recorded
    from asyncrl_cli.report.side_by_side import compare

    if len(runs) < 2:
        hint = f"`asyncrl status {runs[0]}` shows one run"
        raise ConfigError("a comparison needs two runs or more", hint=hint)
    recorded = [Recorded.find(run, runs_dir) for run in runs]
    comparison = compare(recorded, reward)
    if not as_json:
        names = [Column(name, justify="right") for name in comparison.names]
        shown = [figure for figure in comparison.figures if figure.label.startswith(MAIN_FIGURES)]
        print_table(["", *names], [(figure.label, *figure.texts) for figure in shown])
        return _write(runs, out, runs_dir, open_it, reward)
    warn(*(note for run in recorded for note in run.damage.notes), *comparison.doubts)
    print_json(comparison.to_json())


def _write(
    runs: list[str],
    out: Path | None,
    runs_dir: Path,
    open_it: bool,
    target: float | None = None,
) -> None:
    from asyncrl_cli.observe.screen import ProgressLine
    from asyncrl_cli.report.write import write_report

    with ProgressLine("auto") as progress:
        path, notes = write_report(runs, out, runs_dir, progress, target)
    warn(*notes)
    say(f"{size(path.stat().st_size)}; the file needs no network")
    print_text(str(path.absolute()))
    if open_it:
        typer.launch(path.resolve().as_uri())


def samples(
    run: RunArgument,
    step: Annotated[
        int | None, number_option("--step", "A train step. Default: the newest dumped step.")
    ] = None,
    group: Annotated[
        str, text_option("--group", "G", "Only groups whose key begins with G, of any step.")
    ] = "",
    sort: Annotated[
        Literal["staleness", "reward", "length", "span"] | None,
        typer.Option("--sort", help="Sort by this, largest first. Default: as dumped, group by group."),
    ] = None,
    field: Annotated[
        str,
        text_option("--field", "NAME", "Colour the sampled tokens by this field. Default: by version."),
    ] = "",
    most: Annotated[int, number_option("--most", "Show at most N trajectories.", also="-n")] = 8,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show sampled trajectories: prompt, response with versions, reward, advantage, probabilities."""
    from asyncrl_cli.observe.recorded import Recorded
    from asyncrl_cli.report.dumps import Scale, choose, shown

    recorded = Recorded.find(run, runs_dir)
    try:
        chosen = choose(recorded, step, group, sort, most)
    finally:
        warn(*recorded.damage.notes)
    scale = Scale(field, chosen) if field not in ("", "versions") else None
    if as_json:
        print_json([{**one.line, "figures": one.figures()} for one in chosen])
        return
    console = stdout()
    if scale is not None:
        console.print(scale.legend)
    for one in chosen:
        console.print(shown(one, scale))
    steps = [str(step) for step in recorded.sampled_steps]
    # the first ones and the last
    kept = ", ".join(steps if len(steps) < 6 else [*steps[:4], "...", steps[-1]])
    kept = f"samples were kept for {counted(len(steps), 'step')}: {kept}"
    say(f"{len(chosen)} of step {chosen[0].step}; {kept}")
    coloured = [name for name, one in chosen[0].fields.items() if one["shown"] == "colour"]
    if scale is None and coloured:
        say(f"--field {' or --field '.join(coloured)} colours the tokens by it")


def trace(
    run: RunArgument,
    steps: Annotated[
        str,
        text_option("--steps", "A:B", "Only these train steps. A: and :B leave one end open; A is one step."),
    ] = ":",
    out: Annotated[
        Path | None,
        text_option(
            "--out", "FILE", "File to write (.gz: compressed). Default: trace.json in the run's directory."
        ),
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Write a trace for Perfetto or chrome://tracing: who did what when, and how each group became a
    version."""
    from asyncrl_cli.observe.recorded import Recorded
    from asyncrl_cli.report.write import write_trace

    first, last = parse_steps(steps)
    recorded = Recorded.find(run, runs_dir)
    path = (out or recorded.files.path / "trace.json").absolute()
    counted = write_trace(recorded, path, first, last)
    warn(*recorded.damage.notes)
    if as_json:
        print_json({"trace": str(path), "num_bytes": path.stat().st_size, "entries": dict(counted)})
    groups, trained = counted["group"], counted["step"]
    num_bytes = size(path.stat().st_size)
    say(f"{groups:,} groups, {trained:,} train steps, {num_bytes}; open it at https://ui.perfetto.dev")
    if not as_json:
        print_text(str(path))


def parse_steps(text: str) -> tuple[int, int | None]:
    """`A:B`, `A:`, `:B`, `A` or `:` as (first step, last step or None). Raises ConfigError for anything
    else."""
    found = STEPS.fullmatch(text)
    if not text or found is None:
        what = f"--steps '{text:.40}' is not a range of train steps"
        raise ConfigError(what, hint="--steps 35:45, 35: or :45")
    first = int(found["first"] or 1)
    last = (int(found["last"]) if found["last"] else None) if found["colon"] else first
    if last is not None and last < first:
        raise ConfigError(f"--steps {text} ends before it begins", hint=f"--steps {last}:{first}")
    return first, last


def export(
    source: Annotated[
        str,
        run_argument(
            "RUN|CHECKPOINT", "A run's name or directory, RUN/step-000040, or a checkpoint's directory."
        ),
    ],
    version: Annotated[
        int | None,
        number_option("--version", "A published version: one that was kept, or a checkpoint's.", least=0),
    ] = None,
    out: Annotated[
        Path | None,
        text_option("--out", "DIR", "Directory to write, new or empty. Default: in the run's directory."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--dtype", help="Data type of the weights. Default: as the run publishes them."),
    ] = None,
    max_shard_size_gb: Annotated[
        float,
        number_option("--max-shard-size-gb", "Largest weight file, in 10^9 bytes.", least=1e-6, metavar="GB"),
    ] = 5.0,
    model: Annotated[
        Path | None,
        text_option("--model", "DIR", "Directory with config.json and tokenizer, if the run's is gone."),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="LoRA: write only the adapters, for peft, instead of merging them."),
    ] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Write a run's weights as a Hugging Face model directory."""
    from asyncrl_cli.export.exported import export as export_weights
    from asyncrl_cli.observe.screen import ProgressLine

    with ProgressLine("auto") as progress:
        progress("looking for the weights")
        exported = export_weights(
            source,
            runs_dir=runs_dir,
            version=version,
            out=out,
            dtype=dtype,
            model=model,
            adapter=adapter,
            max_file_bytes=int(max_shard_size_gb * 10**9),
            progress=progress,
        )
    passed_over = exported.source.passed_over
    warn(*(f"{wrong}; using an older checkpoint instead" for wrong in passed_over), *exported.source.notes)
    files = f"{size(exported.num_bytes)} in {counted(len(exported.files), 'file')}"
    say(f"exported {exported.source}: {exported.parameters:,} parameters, {exported.dtype}, {files}")
    if as_json:
        print_json(exported.to_json())
    else:
        print_text(str(exported.path))

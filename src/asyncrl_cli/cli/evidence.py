"""Commands that prove what a run has done, and train it again: `asyncrl audit` and `replay`."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich.table import Column

from asyncrl_cli.base.errors import AsyncrlError, RefusedError
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.cli.console import print_json, print_table, print_text, run_to_its_end, say, warn
from asyncrl_cli.cli.options import (
    RUNS_DIR,
    JsonOption,
    NameOption,
    RunArgument,
    RunsDirOption,
    SetOption,
    UiOption,
    run_argument,
)

AUDIT_EXAMPLES = """
  asyncrl audit my-run                      a table of claims; exit code 1 if one fails
  asyncrl audit my-run --all                logprobs of all kept trajectories, not of 64
  asyncrl audit my-run --json | jq '.claims[] | select(.verdict != "holds")'

A run keeps what all claims take with [bold]--set logging.samples=all --set
weights.keep_versions=all[/]. docs/exactness.md says what each claim proves."""

REPLAY_EXAMPLES = """
  asyncrl replay my-run                                  the same weights, bit for bit
  asyncrl replay my-run --set algorithm.loss_mode=gspo --name as-gspo
  asyncrl compare my-run as-gspo                         both learning curves
  asyncrl replay my-run/step-000040 --set trainer.lr=1e-6 --no-eval

The run has to have been trained with [bold]--set logging.samples=all[/]."""


def audit(
    run: RunArgument,
    check_all: Annotated[
        bool, typer.Option("--all", help="Compute the logprobs of all kept trajectories again.")
    ] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Prove from a run's files what asyncrl promises: each group trained once, no token too old, logprobs
    of the stamped versions, advantages, metrics, seals.

    `cases` says how often a claim was checked: once for each group, line, trajectory or file, for example."""
    from asyncrl_cli.audit.proofs import audit_run
    from asyncrl_cli.checkpoint.lookup import find_run, is_locked
    from asyncrl_cli.observe.screen import ProgressLine

    path = find_run(run, runs_dir)
    if is_locked(path):
        why = f"run '{path.name}' is running, and its files change"
        raise RefusedError(why, hint=f"asyncrl stop {as_typed(path)}")
    with ProgressLine("auto") as progress:
        claims, written = audit_run(path, check_all=check_all, progress=progress)
    if as_json:
        print_json({"run": path.name, "claims": [claim.to_json() for claim in claims]})
    else:
        columns = [Column(name, justify="right") for name in ("cases", "largest deviation", "limit")]
        rows = [(one.name, one.verdict, f"{one.cases:,}", *one.figures()) for one in claims]
        print_table(["claim", "verdict", *columns], rows)
    for claim in claims:
        if claim.num_wrong:
            more = claim.num_wrong - len(claim.wrong)
            warn(f"{claim.name} fails: {'; '.join(claim.wrong)}{f' (and {more} more)' if more else ''}")
        elif claim.unchecked:
            how_far = "not all" if claim.cases else "not"
            say(f"{claim.name}: {how_far} checked: {claim.unchecked}")
    verdicts = Counter(claim.verdict for claim in claims)
    found = [f"{verdicts['holds']} claims hold"] + [f"{verdicts['fails']} fail"] * bool(verdicts["fails"])
    found += [f"{verdicts['not checked']} not checked"] * bool(verdicts["not checked"])
    say(f"{', '.join(found)}; {written} has them, and reports show them")
    if verdicts["fails"]:
        raise typer.Exit(1)


def replay(
    source: Annotated[
        str, run_argument("RUN|CHECKPOINT", "A run, from its oldest checkpoint, or RUN/step-000040.")
    ],
    sets: SetOption = None,
    name: NameOption = None,
    evals: Annotated[
        bool, typer.Option("--eval/--no-eval", help="Start an engine at the end, to score the last version.")
    ] = True,
    ui: UiOption = "auto",
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Train again from a run's recorded trajectories, without engines: the same weights bit for bit or, with
    --set, what another loss, correction or learning rate makes of the same data.

    It cannot show what another policy would have sampled: the data stays as it was."""
    from asyncrl_cli.checkpoint.run_directory import check_free, clear_lost
    from asyncrl_cli.job.driver_replay import Replay
    from asyncrl_cli.job.driver_run import Run
    from asyncrl_cli.observe.recorded import Recorded
    from asyncrl_cli.observe.screen import ProgressLine

    made = Replay(source, runs_dir, sets or (), name or "")
    clear_lost(made.run_dir, replay_of=made.of)
    check_free(runs_dir, made.run_dir.name)
    warn(*made.loaded.warnings)
    say(f"training again {made.steps}")
    is_scored = evals and bool(made.loaded.profile.eval.prompts)
    with ProgressLine(ui) as progress:
        made.run(progress, is_scored=is_scored)
    if made.failure:
        hint = "bits are equal on the same kind of machine, with the same torch and as many threads"
        raise AsyncrlError(made.failure, hint=hint)
    how = "bit for bit"
    if made.trains_differently:
        how = f"as is to be expected with another {', '.join(made.changes)}"
    say(f"{made.equality}, {how}")
    found, exit_code = made.to_json(), 0
    if is_scored:
        try:
            run_to_its_end(Run.resume(str(made.run_dir), runs_dir=runs_dir, ui=ui), as_json=False)
        except typer.Exit as ended:
            exit_code = ended.exit_code
        scores = [event["reward_mean"] for event in Recorded(made.run_dir).events("eval")]
        found["eval/reward_mean"] = scores[-1] if scores else None
    if as_json:
        print_json({"run": made.run_dir.name, **found})
    else:
        print_text(made.run_dir.name)
    if exit_code:
        raise typer.Exit(exit_code)

"""What the rows of a comparison's table mean: in short below the table on the screen, at length in report.md.

A note stands only where its rows do: a simulated run has no evals, and not every comparison has a bound.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl_cli.bench.results import Comparison

SIMULATED_STRETCH = (
    "Measured are the same groups in every run, to a train step: after the warm-up (the longest window of all profiles) and "
    "before the run-out, in which nothing is generated ahead any more. Wall time, staleness max, "
    "max span and tokens discarded are of the whole run."
)
REAL_STRETCH = (
    "Measured are the same groups in every run, to a train step: after the warm-up (the longest window of all profiles, or until "
    "every run has scored version 0) and before the run-out, in which nothing is generated ahead any more and the final version "
    "is scored. Evals in between are subtracted. Wall time, staleness max, max span, tokens "
    "discarded and final reward are of the whole run."
)
WINDOW = (
    "`s per {window} groups` is the time of as many groups as a window of the baseline ({baseline}) has, whatever the profile's "
    "own W; a group is all responses to one prompt. Its parts, in the same unit, are the trainer's time: `wait_data` is waiting "
    "for groups, `gather` collecting the new weights, `other` checkpoints and the rest."
)
BOUND = (
    "`% of the bound` is ideal over measured time. Ideal is the larger of (tokens / generation alone) and (tokens / training "
    "alone) where the sides have resources of their own, and the sum of both where they take turns on all of them. `limited by` "
    "names the larger one. Generation's tokens are those sampled for the trained groups, at most those sampled while they were "
    "measured (groups made ahead are not made again); training's are those trained."
)
AT_ONCE = (
    "`both phases at once`: what each side does while the other works too, where they share a machine's cores and memory. The "
    "bound does not know of that; `% of both at once` does: what is missing there is what the job itself loses."
)
IDLE = (
    "Idle: trainer starved, blocked or syncing; rollout workers with no running sequence, or paused; of measured steps without an "
    "eval beside them. Slots used: running sequences over slots, what a long tail really costs."
)


def short_notes(comparison: Comparison) -> Iterator[str]:
    """One line each, below the table."""
    window, baseline = comparison.window_groups, comparison.baseline
    yield f"s per {window} groups: as many as a window of {baseline} has; a group is all responses to one prompt"
    yield "wall time, maxima, tokens discarded and reward are of the whole run; all else is without warm-up and run-out"
    yield "wait_data: the trainer waits for groups; gather: it collects new weights"
    if _has_bound(comparison):
        yield "limited by: the phase that would take longer if nothing were in its way; that is the bound, and the ideal its time"


def long_notes(comparison: Comparison) -> Iterator[str]:
    """Sentences for report.md."""
    window, baseline = comparison.window_groups, comparison.baseline
    yield SIMULATED_STRETCH if comparison.simulated else REAL_STRETCH
    yield WINDOW.format(window=window, baseline=baseline)
    yield (
        "`speedup` is the ratio of groups per second to the baseline's run of the same seed, and its median over the repeats; "
        "`per token` that of trained tokens per second."
    )
    if _has_bound(comparison):
        yield BOUND
    if any("at_once_ratio" in result.figures for result in comparison.results):
        yield AT_ONCE
    yield IDLE


def _has_bound(comparison: Comparison) -> bool:
    return any(result.bound for result in comparison.results)

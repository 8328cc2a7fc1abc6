"""A workload's measured rows against what the simulation says of them: in total and by part, seconds per window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.layers import flatten
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import SimulatedRun, simulate

WINDOW = "window"
"""The part that is the whole."""
MEASURED_WINDOWS = 6
PUBLISHED = "published"
"""With this word begins the source of a row that somebody else measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """`part`: `window` (all of it) or a name of `timing/*_s`. `ratio` is predicted over measured; `source` is the row's."""

    profile: str
    part: str
    measured_s: float
    predicted_s: float
    calibrated: bool
    source: str = ""

    @property
    def known(self) -> str:
        return how_known(self.source)

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s if self.measured_s else float("inf")


def residuals(workload: Workload, *, windows: int = MEASURED_WINDOWS, seed: int = 0) -> list[Residual]:
    """Simulates every reference for `windows` windows beyond the first and the last. Raises what a failed run failed with."""
    return [residual for reference in workload.references for residual in _of_row(workload, reference, windows, seed)]


def how_known(source: str) -> str:
    """What a row's figures are: somebody published them, or they were measured here."""
    return PUBLISHED if source.startswith(PUBLISHED) else "measured"


def row_name(reference: Reference) -> str:
    """`partial-rollout`, or `colocate placement.gpus=64` for a row with keys of its own."""
    return " ".join([reference.profile, *reference_sets(reference)])


def reference_sets(reference: Reference) -> list[str]:
    """The row's own keys in the form of `--set`."""
    return [f"{key}={_text(value)}" for key, value in flatten(reference.set, f"reference {reference.profile}").items()]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _of_row(workload: Workload, reference: Reference, windows: int, seed: int) -> Iterator[Residual]:
    profile = profile_for(workload, reference.profile, reference_sets(reference), groups=1, environ={}).profile
    run = simulate(profile, workload, seed=seed, groups=(windows + 2) * Schedule.of(profile).window_groups)
    if run.error is not None:
        raise run.error
    predicted = window_parts(run)
    measured = {WINDOW: reference.window_time_s} | {part: float(seconds) for part, seconds in reference.parts_s.items()}
    for part, seconds in measured.items():
        if part not in predicted:
            known = ", ".join(predicted)
            raise ConfigError(f"workload {workload.name}: references.parts_s has no part {part}", hint=f"parts: {known}")
        yield Residual(
            profile=row_name(reference),
            part=part,
            measured_s=seconds,
            predicted_s=predicted[part],
            calibrated=reference.calibrated,
            source=reference.source,
        )


def window_parts(run: SimulatedRun) -> dict[str, float]:
    """Mean seconds per window of every part, without the run's first and last window (they begin empty and end in a last load)."""
    lines = steady_lines(run.lines)
    windows = len({line["window"] for line in lines})
    names = [key.removeprefix("timing/").removesuffix("_s") for key in lines[0] if key.startswith("timing/")]
    parts = {name: sum(line.get(f"timing/{name}_s", 0.0) for line in lines) / windows for name in names}
    return {WINDOW: parts.pop("step"), **parts, "rest": parts.get("gather", 0.0) + parts.get("other", 0.0)}


def steady_lines(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All but those of the first and the last window, where there are more than two."""
    windows = sorted({line["window"] for line in lines})
    kept = windows[1:-1] if len(windows) > 2 else windows
    return [line for line in lines if kept[0] <= line["window"] <= kept[-1]]

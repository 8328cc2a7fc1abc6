"""A workload's measured rows against what the simulation says of them: in total and by part, seconds per window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.observe.lines import spent_s
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.keys import flatten
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import SimulatedRun, simulate

WINDOW = "window"
"""The part that is the whole."""
MEASURED_WINDOWS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """`part`: `window` (all of it) or a name of `timing/*_s`. `source` and `evidence` are the row's."""

    profile: str
    part: str
    measured_s: float
    predicted_s: float
    calibrated: bool
    source: str = ""
    evidence: str = "measured"

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s if self.measured_s else float("inf")


def residuals(workload: Workload, *, windows: int = MEASURED_WINDOWS) -> list[Residual]:
    """Simulates every reference for `windows` windows beyond the first and the last. Raises what a failed run failed with."""
    return [residual for reference in workload.references for residual in _of_row(workload, reference, windows)]


def reference_sets(reference: Reference) -> list[str]:
    """The row's own keys in the form of `--set`."""
    values = flatten(reference.set, f"reference {reference.profile}")
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def _of_row(workload: Workload, reference: Reference, windows: int) -> Iterator[Residual]:
    sets = reference_sets(reference)
    profile = profile_for(workload, reference.profile, sets, groups=1, environ={}).profile
    run = simulate(profile, workload, groups=(windows + 2) * Schedule.of(profile).window_groups)
    if run.error is not None:
        raise run.error
    predicted = window_parts(run)
    for part, measured_s in {WINDOW: reference.window_time_s, **reference.parts_s}.items():
        if part not in predicted:
            known = ", ".join(predicted)
            raise ConfigError(f"workload {workload.name}: references.parts_s has no part {part}", hint=f"parts: {known}")
        yield Residual(
            profile=" ".join([reference.profile, *sets]),
            part=part,
            measured_s=float(measured_s),
            predicted_s=predicted[part],
            calibrated=reference.calibrated,
            source=reference.source,
            evidence=reference.evidence,
        )


def window_parts(run: SimulatedRun) -> dict[str, float]:
    """Mean seconds per window of every part, without the run's first and last window (they begin empty and end in a last load)."""
    windows = sorted({line["window"] for line in run.lines})
    kept = windows[1:-1] if len(windows) > 2 else windows
    lines = [line for line in run.lines if kept[0] <= line["window"] <= kept[-1]]
    names = [key.removeprefix("timing/").removesuffix("_s") for key in lines[0] if key.startswith("timing/")]
    parts = {name: sum(spent_s(line, name) for line in lines) / len(kept) for name in names}
    return {WINDOW: parts.pop("step"), **parts, "rest": parts.get("gather", 0.0) + parts.get("other", 0.0)}

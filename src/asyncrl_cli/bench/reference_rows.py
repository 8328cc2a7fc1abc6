"""Which runs of a comparison answer a workload's reference rows: what it simulates anyway is not simulated again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.references import MEASURED_WINDOWS, WINDOW, Residual, reference_sets, residuals, row_name
from asyncrl_cli.simulate.workload import Reference, Workload
from asyncrl_cli.simulate.workload_files import profile_for

REFERENCE_SEED = 0
"""What `residuals` simulates with."""
Run = tuple[Profile, int, int]
"""Profile, seed and groups of a run of the comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRow:
    """One reference. `workload` has no other; `job` is the place of the comparison's run that answers it, or None.

    `responses` go with how long it takes to simulate.
    """

    workload: Workload
    reference: Reference
    responses: int
    job: int | None

    def residuals(self, parts_s: Mapping[str, float]) -> list[Residual]:
        """From `window_parts` of the run that answers it."""
        measured = {WINDOW: self.reference.window_time_s, **self.reference.parts_s}
        if not measured.keys() <= parts_s.keys():
            return residuals(self.workload)  # which says what is wrong with the row
        return [
            Residual(
                profile=row_name(self.reference),
                part=part,
                measured_s=float(seconds),
                predicted_s=parts_s[part],
                calibrated=self.reference.calibrated,
                source=self.reference.source,
            )
            for part, seconds in measured.items()
        ]


def rows_of(workload: Workload, runs: Sequence[Run]) -> list[ReferenceRow]:
    """In the order of the workload's references."""
    return [_row(workload, reference, runs) for reference in workload.references]


def _row(workload: Workload, reference: Reference, runs: Sequence[Run]) -> ReferenceRow:
    profile = profile_for(workload, reference.profile, reference_sets(reference), groups=1, environ={}).profile
    groups = (MEASURED_WINDOWS + 2) * Schedule.of(profile).window_groups
    return ReferenceRow(
        workload=workload.model_copy(update={"references": [reference]}),
        reference=reference,
        responses=groups * profile.rollout.n,
        job=next((index for index, run in enumerate(runs) if _answers(run, profile, groups)), None),
    )


def _answers(run: Run, profile: Profile, groups: int) -> bool:
    """The same profile with the same keys and prompts, and no shorter: further windows make the mean only steadier."""
    made, seed, made_groups = run
    own = {"run"}  # length and seed, which are compared, and limits in wall time
    return seed == REFERENCE_SEED and made_groups >= groups and made.model_dump(exclude=own) == profile.model_dump(exclude=own)

"""What the measurements of each phase alone come to: tokens per second, and how far to believe them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncrl_cli.bench.phase_generation import Generated
from asyncrl_cli.bench.phase_training import Trained
from asyncrl_cli.observe.bound import Capacities

if TYPE_CHECKING:
    from asyncrl_cli.bench.phases import Side


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """Tokens per second of each phase alone, by all of its workers together: medians, each repeat, and what it had.

    Rollout tokens are sampled response tokens; trainer tokens are those of `TrainReport.tokens`: sampled ones, too.
    `cpu_share` is the smallest share of its wall time that a process of a phase computed (its busiest thread): far below 1 on
    CPUs means that others used the machine. `slots_used` is the mean share of slots that were full while generation was measured.
    """

    rollout_tokens_per_s: float
    trainer_tokens_per_s: float
    rollout_repeats: tuple[float, ...]
    trainer_repeats: tuple[float, ...]
    colocated: bool
    rollout_workers: int
    rollout_threads: int
    slots: int
    trainer_workers: int
    trainer_threads: int
    slots_used: float
    cpu_share: float
    seconds_measured: float
    rollout_beside_tokens_per_s: float | None = None
    trainer_beside_tokens_per_s: float | None = None
    """Of each phase while the other one works, too."""

    def capacities(self) -> Capacities:
        return Capacities(
            rollout_tokens_per_s=self.rollout_tokens_per_s,
            trainer_tokens_per_s=self.trainer_tokens_per_s,
            colocated=self.colocated,
            rollout_beside_tokens_per_s=self.rollout_beside_tokens_per_s,
            trainer_beside_tokens_per_s=self.trainer_beside_tokens_per_s,
        )


@dataclass(slots=True, kw_only=True)
class Repeats:
    """One side's measurements so far, repeat by repeat and process by process."""

    generated: list[list[Generated]] = field(default_factory=list)
    trained: list[list[Trained]] = field(default_factory=list)
    generated_beside: list[list[Generated]] = field(default_factory=list)
    trained_beside: list[list[Trained]] = field(default_factory=list)


def phase_figures(side: Side, colocated: bool, measured: Repeats) -> PhaseFigures:
    generated = [one for repeat in measured.generated for one in repeat]
    trained = [one for repeat in measured.trained for one in repeat]
    rollout_repeats, trainer_repeats = _generation_rates(measured.generated), _training_rates(measured.trained)
    return PhaseFigures(
        rollout_tokens_per_s=statistics.median(rollout_repeats),
        trainer_tokens_per_s=statistics.median(trainer_repeats),
        rollout_repeats=rollout_repeats,
        trainer_repeats=trainer_repeats,
        colocated=colocated,
        rollout_workers=side.rollout_workers,
        rollout_threads=side.rollout.threads,
        slots=side.rollout.slots,
        trainer_workers=side.trainer.workers,
        trainer_threads=side.trainer.threads,
        slots_used=statistics.fmean(one.running_mean for one in generated) / side.rollout.slots,
        cpu_share=min(*(one.cpu_s / one.seconds for one in generated), *(one.cpu_s / one.seconds for one in trained)),
        seconds_measured=_seconds(measured.generated) + _seconds(measured.trained),
        rollout_beside_tokens_per_s=_median_or_none(_generation_rates(measured.generated_beside)),
        trainer_beside_tokens_per_s=_median_or_none(_training_rates(measured.trained_beside)),
    )


def _generation_rates(repeats: Sequence[Sequence[Generated]]) -> tuple[float, ...]:
    return tuple(sum(one.tokens_per_s for one in repeat) for repeat in repeats)


def _training_rates(repeats: Sequence[Sequence[Trained]]) -> tuple[float, ...]:
    """Each rank reports the tokens of all, and a step ends with the slowest."""
    return tuple(repeat[0].tokens / max(one.seconds for one in repeat) for repeat in repeats)


def _median_or_none(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _seconds(repeats: Sequence[Sequence[Generated | Trained]]) -> float:
    return sum(max(one.seconds for one in repeat) for repeat in repeats)

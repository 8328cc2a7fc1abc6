"""The bound of a run: the time that its work would take without any waits. `% of the bound` is ideal time
over measured time, both per window.

    apart       ideal = max(generation, training)
    colocated   ideal = generation + training

Simulated runs know what work costs. Generation and training are the seconds that each phase would take alone,
in full batches, for the very groups that are measured. The ideal leaves out weight syncs, the long tail of a
batch, rewards and waits, because a schedule can reduce these. No schedule passes this bound.

Real runs know what they spent. Generation and training are the seconds for which the rollout workers (on
average) and the trainer computed, as their own state clocks integrated it. So the ideal is the time of this
very run if the side that computed longer had never waited: not for groups, for weights or for the other
side's turn. It is no limit of the machine: a worker that decodes the last sequence of a batch is as busy as a
full one, and a side is busy for longer if the other one, or another program, slows it. A schedule that fills
the slots better is faster and has a lower ideal. Close to 100% says that no waits are left, and nothing about
the speed: compare seconds between profiles.
"""

from __future__ import annotations

from asyncrl_cli.bench.figures import Stretch
from asyncrl_cli.observe.line_figures import Totals, sampled_tokens, spent_s
from asyncrl_cli.simulate.costs import Capacities

RATE = "rollouter/tokens_per_s"


def bound_of_costs(stretch: Stretch, windows: float, capacities: Capacities) -> dict[str, float]:
    """The bound of a simulated run, and the rates that it rests on, per window."""
    generation_s = tokens_made(stretch) / capacities.rollout_tokens_per_s
    training_s = stretch.tokens / capacities.trainer_tokens_per_s
    return _bound(generation_s, training_s, stretch, windows, capacities.colocated) | {
        "rollout_tokens_per_s": capacities.rollout_tokens_per_s,
        "trainer_tokens_per_s": capacities.trainer_tokens_per_s,
    }


def bound_of_states(stretch: Stretch, windows: float, *, is_colocated: bool) -> dict[str, float]:
    """The bound of a real run. Empty if it did not measure for how long each side was idle."""
    # An eval keeps workers busy: steps beside one say nothing about generation.
    alone = Totals(line for line in stretch.lines if spent_s(line, "eval") == 0.0)
    rollout_idle, trainer_idle = alone.mean("rollouter/idle_ratio"), alone.mean("trainer/idle_ratio")
    if rollout_idle is None or trainer_idle is None:
        return {}
    generation_s, training_s = (1 - rollout_idle) * stretch.seconds, (1 - trainer_idle) * stretch.seconds
    return _bound(generation_s, training_s, stretch, windows, is_colocated)


def _bound(
    generation_s: float, training_s: float, stretch: Stretch, windows: float, is_colocated: bool
) -> dict[str, float]:
    """Of the seconds that the work of the whole stretch takes."""
    ideal_s = generation_s + training_s if is_colocated else max(generation_s, training_s)
    times = {"generation_s": generation_s, "training_s": training_s, "ideal_s": ideal_s}
    return {name: seconds / windows for name, seconds in times.items()} | {
        "bound_ratio": ideal_s / stretch.seconds
    }


def tokens_made(stretch: Stretch) -> float:
    """Tokens that generation made: those sampled for the trained groups, but at most those that workers
    sampled in the stretch. The stretch may begin with more groups ahead than it ends with, and those were
    generated before it."""
    trained = sum(map(sampled_tokens, stretch.lines))
    steps_s = sum(spent_s(line, "step") for line in stretch.lines)  # evals too: the rate counts their tokens
    rate = Totals(stretch.lines).mean(RATE)
    return trained if rate is None else min(trained, rate * steps_s)

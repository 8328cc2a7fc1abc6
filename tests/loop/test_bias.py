"""Whether the meter of selection bias sees what was left out."""

from __future__ import annotations

import random
from fractions import Fraction
from statistics import fmean
from typing import Any, ClassVar

import pytest

from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, PartRequest, TrajectoryMeta
from asyncrl_cli.loop.bias import BiasMeter
from asyncrl_cli.measure.values import shown
from asyncrl_cli.observe.metrics import StepMetrics
from tests.loop.proof.faults import KeepingWorker
from tests.loop.worlds import Ran, run_world, settings

LONG = {"response_tokens": lambda rng: min(int(5 * rng.paretovariate(0.9)), 500)}


class Seeing(KeepingWorker):
    """Keeps the requests of all workers."""

    requests: ClassVar[list[PartRequest]] = []

    def submit(self, request: PartRequest) -> None:
        self.requests.append(request)
        super().submit(request)


def lines_of(ran: Ran) -> list[dict[str, Any]]:
    """The run's lines, and its totals as the last one."""
    metrics = StepMetrics(trigger_parameter_sync_step=1, started_s=0.0)
    return [*(metrics.update(step) for step in ran.recorder.steps), metrics.totals()]


def whole_windows(**changes: Any) -> Ran:
    """32 windows of 16 groups with long tails."""
    sizes = {"window_steps": 1, "step_groups": 16, "train_steps": 32, "n": 4, "checkpoint_every_steps": 0}
    chosen = settings("partial-rollout", eta=Fraction(1), max_staleness=1, **sizes, **changes)
    ran = run_world(chosen, workers=2, slots=64, times=LONG)
    assert ran.error is None
    return ran


@pytest.mark.slow
def test_under_wait_nothing_is_left_out_so_there_is_no_bias():
    for line in lines_of(whole_windows())[:-1]:
        assert line["bias/length"] == line["bias/difficulty"] == 0
        assert line["bias/run/length_error"] < 1e-6
        assert not [
            name for name in line if name.startswith("bias/") and name.endswith(("/dropped", "/aborted"))
        ]
        assert line["bias/tokens/admitted"] == line["bias/tokens/trained"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop", "requeue"])
def test_under_drop_and_requeue_with_long_tails_trained_responses_are_clearly_too_short(monkeypatch, policy):
    monkeypatch.setattr("tests.loop.worlds.KeepingWorker", Seeing)
    monkeypatch.setattr(Seeing, "requests", [])
    ran = whole_windows(on_stale=policy, max_requeues=5)
    *lines, totals = lines_of(ran)
    assert lines[-1]["bias/run/length"] < -5 * lines[-1]["bias/run/length_error"] < 0
    assert lines[-1]["bias/run/length"] == totals["bias/length"]
    assert sum("bias/tokens/aborted" in line for line in lines) > 10

    # The lengths that all responses of ended groups would have had: in tokens the meter sees less.
    trained = {group.key for batch in ran.trainer.batches for group in batch.groups}
    ended = trained | {event.key for name in ("dropped", "requeued") for event in ran.recorder.named(name)}
    whole: dict[AttemptKey, list[int]] = {}
    for request in Seeing.requests:
        drawn = random.Random(request.seed)
        lengths = [LONG["response_tokens"](drawn) for _ in range(request.indices[-1] + 1)]
        whole.setdefault(request.key.attempt, []).extend(lengths[index] for index in request.indices)
    everything = [length for key in ended for length in whole[key]]
    chosen = [length for key in trained for length in whole[key]]
    seen = totals["bias/tokens/trained"] - totals["bias/tokens/admitted"]
    assert totals["bias/tokens/trained"] == pytest.approx(fmean(chosen))
    assert fmean(chosen) - fmean(everything) < seen < 0, "tokens so far are a lower bound"


def group(uid: str, *lengths: int, reward: float = 0.0) -> GroupResult:
    metas = tuple(
        TrajectoryMeta(
            prompt_tokens=1,
            response_tokens=length,
            reward=reward,
            finish_reason="stop",
            version_tokens=((0, length),),
        )
        for length in lengths
    )
    return GroupResult(key=AttemptKey(uid, 0, 0), trajectories=metas, failures=(), failed_tokens=0)


def test_a_prompts_difficulty_is_the_mean_reward_of_its_first_group():
    meter = BiasMeter(n=2)
    for reward in (0.25, 1.0):  # the second time the policy has learned
        meter.judged(one := group("a", 5, 7, reward=reward))
        meter.trained(one)
    values = shown(meter.values)
    assert values["bias/difficulty/trained"] == values["bias/difficulty/admitted"] == 0.25
    assert values["bias/reward/trained"] == 0.625
    assert values["bias/tokens/trained"] == 6
    assert "bias/difficulty" not in values, "all are equally difficult"

"""The audit's advantages are by formulas of its own: on random rewards both they and the trainer's agree."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl_cli.audit import accounts, run_files
from asyncrl_cli.audit.run_files import Sample, SampledGroup
from asyncrl_cli.audit.samples import _estimated
from asyncrl_cli.audit.weights import logprob_claims
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.step_plan import advantages_of

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "none")


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_audit_and_the_trainer_agree_on_advantages(estimator, normalizes):
    random = np.random.default_rng(0)
    groups = [random.normal(size=size) for size in (2, 5, 8)]
    groups += [np.full(4, 0.3), np.array([0.0, 1.0]), (random.random(8) > 0.5).astype(float)]
    algorithm = AlgorithmSection(adv_estimator=estimator, normalize_advantages=normalizes)
    expected = advantages_of([row.tolist() for row in groups], algorithm)
    for own, row in zip(_estimated(groups, estimator, algorithm.model_dump()), expected, strict=True):
        np.testing.assert_allclose(own, row, atol=1e-12)


@pytest.mark.parametrize(
    ("top_p", "replays", "lacking"), [(0.9, False, "sampling masks"), (1, True, "experts")]
)
def test_logprobs_among_kept_tokens_or_of_recorded_experts_are_not_checked_without_these(
    top_p, replays, lacking, tmp_path
):
    (tmp_path / "versions" / "version-0").mkdir(parents=True)
    rollout = {"top_p": top_p, "top_k": 0, "sampling_mask": True, "temperature": 1.0}
    sections = {"model": {"dtype": "float32"}, "rollout": rollout, "trainer": {"router_replay": replays}}
    sections["async_training"] = {"max_staleness": 1}
    sample = Sample(
        reward=0.0,
        finish_reason="stop",
        advantage=0.0,
        segment_lengths=[2],
        tokens=np.array([1, 2]),
        logprobs=np.array([0.0, -1.0], np.float32),
        versions=np.array([-1, 0]),
        mask=np.array([False, True]),
        kept=None,
    )
    files = SimpleNamespace(
        section=sections.get, path=tmp_path, groups=lambda: [SampledGroup("a@0.0", 1, 0, [sample])]
    )
    (claim,) = logprob_claims(files, 1, check_all=True, progress=lambda *_: None)
    assert claim.verdict == "not checked"
    assert claim.unchecked.startswith(f"1 trajectories: their {lacking} are not")


def test_idle_times_count_a_span_that_begins_before_the_end_of_the_one_before() -> None:
    """The driver learns an executor's clock better by 1.4 ms: 0.18 of 0.78 s are idle in step 2. In step 3
    there was no report."""
    spans = [["busy", 12.3, 13.0637], ["starved", 13.0637, 13.0638], ["starved", 13.0624, 13.2414]]
    files = SimpleNamespace(
        section=lambda name: {},
        named=lambda name: [],
        timeline=[
            {"step": 1, "spans": {"trainer": spans}, "covered": {"trainer": 13.0638}},
            {"step": 2, "spans": {"trainer": [["busy", 13.2414, 13.8453]]}, "covered": {"trainer": 13.8453}},
            {"step": 3, "spans": {"trainer": [["busy", 13.8451, 14.2]]}, "covered": {"trainer": 13.8454}},
        ],
        metrics=[
            {"step": 1, "trainer/idle_ratio": 0.0},
            {"step": 2, "trainer/idle_ratio": 0.2272},
            {"step": 3},
        ],
    )
    claim = accounts._idle(files, "trainer", "trainer")
    assert (claim.cases, claim.wrong) == (2, [])


def test_idle_times_are_of_the_workers_that_a_run_had_before_it_was_resumed_with_fewer() -> None:
    files = SimpleNamespace(
        section=lambda name: {},
        named=lambda name: [],
        timeline=[
            {
                "step": 1,
                "spans": {"rollout-0": [["busy", 0.0, 10.0]], "rollout-1": [["starved", 0.0, 10.0]]},
                "covered": {"rollout-0": 10.0, "rollout-1": 10.0, "param_update-rollout-0": 10.0},
            },
            {"step": 2, "spans": {"rollout-0": [["busy", 10.0, 20.0]]}, "covered": {"rollout-0": 20.0}},
        ],
        metrics=[{"step": 1, "rollouter/idle_ratio": 0.5}, {"step": 2, "rollouter/idle_ratio": 0.0}],
    )
    claim = accounts._idle(files, "rollout", "rollouter")
    assert (claim.cases, claim.wrong) == (2, [])


def test_idle_times_of_a_run_that_was_extended_begin_with_the_resume() -> None:
    """The first attempt ends with an eval, at 14 s, after the checkpoint of step 1 at 10 s. Step 2 is idle
    for 3 of 5 s, 4 of which are before 14 s."""
    before = {"rollout-0": [["busy", 0.0, 8.0], ["starved", 8.0, 14.0]]}
    after = {"rollout-0": [["starved", 10.0, 13.0], ["busy", 13.0, 15.0]]}
    files = SimpleNamespace(
        section=lambda name: {},
        named=lambda name: [{"from_step": 1}],
        timeline=[
            {"step": 1, "spans": before, "covered": {"rollout-0": 14.0}},
            {"step": 2, "spans": after, "covered": {"rollout-0": 15.0}},
        ],
        metrics=[{"step": 1, "rollouter/idle_ratio": 6 / 14}, {"step": 2, "rollouter/idle_ratio": 0.6}],
    )
    claim = accounts._idle(files, "rollout", "rollouter")
    assert (claim.cases, claim.wrong) == (2, [])


def test_a_lent_worker_is_compared_with_the_trainer_of_its_own_attempt() -> None:
    """The first attempt trains until 14 s, and is resumed from its checkpoint at 10 s."""

    def verdict(trains_at_s: float) -> str:
        before = {"trainer": [["busy", 0.0, 14.0]], "rollout-0": [["paused", 0.0, 14.0]]}
        own = [["paused", 10.0, 11.0], ["busy", 11.0, 13.0]]
        after = {"trainer": [["busy", trains_at_s, trains_at_s + 2.0]], "rollout-0": own}
        files = SimpleNamespace(
            section=lambda name: {"lend": True},
            named=lambda name: [{"from_step": 1}],
            timeline=[
                {"step": step, "spans": spans, "covered": dict.fromkeys(spans)}
                for step, spans in ((1, before), (2, after))
            ],
        )
        return accounts._devices(files).verdict

    assert (verdict(13.0), verdict(12.0)) == ("holds", "fails")


@pytest.mark.parametrize(("resumed_from", "verdict"), [(3, "holds"), (2, "fails")])
def test_a_window_may_be_short_where_a_run_had_ended_that_was_extended_later(resumed_from, verdict) -> None:
    windows, versions = (0, 0, 1, 2, 2), (0, 1, 2, 2, 3)
    files = SimpleNamespace(
        section=lambda name: {"trigger_parameter_sync_step": 2},
        last_step=5,
        metrics=[
            {"step": step, "window": window, "version": version}
            for step, (window, version) in enumerate(zip(windows, versions, strict=True), start=1)
        ],
        named=lambda name: [{"from_step": resumed_from}] if name == "resumed" else [],
    )
    claim = accounts._windows(files)
    assert (claim.verdict, len(claim.wrong)) == (verdict, verdict == "fails")


def test_samples_of_any_text_can_be_read(tmp_path) -> None:
    line = {
        "group": "a@0.0",
        "step": 1,
        "window": 0,
        "reward": 1.0,
        "finish_reason": "stop",
        "advantage": 0.0,
    }
    arrays = {"segment_lengths": [2], "tokens": [1, 2], "logprobs": [0.0, -1.0]}
    text = json.dumps(
        line | arrays | {"versions": [-1, 0], "mask": [0, 1], "text": "\u2028\x85"}, ensure_ascii=False
    )
    (tmp_path / "step-000001.jsonl").write_text(f"{text}\n{text}\n", encoding="utf-8")
    (group,) = run_files._from_text(tmp_path / "step-000001.jsonl")
    assert [sample.num_sampled for sample in group.samples] == [1, 1]


def test_the_last_line_of_a_run_that_was_extended_later_counts_its_own_events() -> None:
    """That line came after the last eval, and the second leg goes on from the time of the checkpoint."""
    stages = ("running", "finished", "training", "trained")
    events = [
        {
            "event": stage,
            "group": group,
            "uid": group,
            "epoch": 0,
            "step": step,
            "tokens": 5,
            "time_s": time_s,
        }
        for step, group, began_s in ((1, "a", 1.0), (2, "b", 5.0))
        for time_s, stage in enumerate(stages, start=int(began_s))
    ]
    events.insert(4, {"event": "resumed", "from_step": 1, "time_s": 4.5})
    totals = {f"ledger/{stage}": 0 for stage in accounts.STAGES}
    metrics = [
        {"step": step, "time_s": time_s, "groups_trained": step, "tokens_trained": 5 * step}
        | totals
        | {"ledger/admitted_total": step, "ledger/trained": step}
        for step, time_s in ((1, 6.5), (2, 9.0))
    ]
    sections = {"async_training": {"require_batches": 1}, "trainer": {"ppo_mini_batch_size": 1}, "run": {}}
    files = SimpleNamespace(
        is_done=True,
        metrics=metrics,
        section=sections.get,
        named=lambda *names: [event for event in events if event["event"] in names],
    )
    assert [claim.wrong for claim in accounts._groups(files)] == [[], [], []]

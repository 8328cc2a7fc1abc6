"""The formulas of docs/metrics.md on numbers worked out by hand, and against a second computation with
numpy."""

import json
import random

import numpy as np
import pytest

from asyncrl_cli.contracts.events import EvalSummary
from asyncrl_cli.data.store import Traffic
from asyncrl_cli.loop.executors import ReportBook
from asyncrl_cli.measure.states import Span, State
from asyncrl_cli.observe.metrics import StepMetrics
from asyncrl_cli.observe.run_lines import meaning_of


def metrics(window_steps=1):
    return StepMetrics(trigger_parameter_sync_step=window_steps, started_s=100.0)


@pytest.mark.parametrize("figure", ["idle_ratio", "tokens_per_s", "waiting_groups"])
def test_the_figures_of_a_users_scorer_have_a_meaning_and_built_in_ones_keep_theirs(figure):
    assert "`task.scorers`" in (meaning_of(f"place/{figure}") or "")
    for name in ("ref", *(("trainer", "rollouter") if figure != "waiting_groups" else ())):
        assert "`task.scorers`" not in (meaning_of(f"{name}/{figure}") or "`task.scorers`")


def test_staleness_counts_tokens_for_the_mean_and_trajectories_for_oldest_and_newest(make):
    t, group = make["trajectory"], make["group"]
    # Window 5. Ages by token: 10 tokens of age 2, 30 of age 0; 60 of age 0; 20 of age 1.
    groups = [
        group("a", t(1.0, (3, 10), (5, 30)), t(0.0, (5, 60))),
        group("b", t(0.0, (4, 20)), t(1.0, (4, 0), (5, 5))),
    ]
    line = metrics().update(make["record"](6, 5, groups))
    assert line["staleness/mean"] == pytest.approx((10 * 2 + 20 * 1) / 125)
    assert line["staleness/max"] == 2
    assert line["staleness/oldest_mean"] == pytest.approx((2 + 0 + 1 + 1) / 4)
    assert line["staleness/newest_mean"] == pytest.approx((0 + 0 + 1 + 0) / 4)
    assert line["staleness/histogram"] == [1, 2, 1]
    assert line["staleness/span_histogram"] == [2, 1, 1]


def test_staleness_in_train_steps_counts_from_the_step_that_made_the_version(make):
    t, group = make["trajectory"], make["group"]
    # K = 4. Step 11 of the lines is step 10 from 0; version 2 was made by step 8, version 1 by step 4.
    groups = [group("a", t(1.0, (1, 3), (2, 9)), t(0.0, (2, 12)))]
    line = metrics(window_steps=4).update(make["record"](11, 2, groups, step_in_window=2))
    assert line["staleness/steps_max"] == 6
    assert line["staleness/steps_mean"] == pytest.approx((3 * 6 + 21 * 2) / 24)


def test_reward_mean_and_deviation_run_over_trajectories(make):
    t, group = make["trajectory"], make["group"]
    groups = [group("a", t(1.0, (0, 4)), t(0.0, (0, 8))), group("b", t(0.5, (0, 6)), t(0.25, (0, 2)))]
    line = metrics().update(make["record"](1, 0, groups))
    assert line["reward/mean"] == pytest.approx(np.mean([1, 0, 0.5, 0.25]))
    assert line["reward/std"] == pytest.approx(np.std([1, 0, 0.5, 0.25]))
    assert line["response_tokens/median"] == 5


def test_partial_counts_cover_the_window_and_stale_counts_the_run(make):
    t, group, record = make["trajectory"], make["group"], make["record"]
    whole, partial, stale = t(1.0, (1, 5)), t(0.0, (0, 5), (1, 5)), t(0.0, (0, 5))
    watched = metrics(window_steps=2)
    first = watched.update(record(3, 1, [group("a", whole, partial), group("b", whole, whole)]))
    assert first["fully_async/partial/total_partial_num"] == 1
    assert first["fully_async/partial/partial_ratio"] == pytest.approx(1 / 4)
    second = watched.update(record(4, 1, [group("c", partial, stale), group("d", whole, whole)]))
    assert second["fully_async/partial/total_partial_num"] == 2
    assert second["fully_async/partial/partial_ratio"] == pytest.approx(2 / 8)
    assert second["fully_async/partial/max_partial_span"] == 1
    third = watched.update(record(5, 2, [group("e", t(0.0, (2, 5)), t(1.0, (2, 5)))]))
    assert third["fully_async/partial/total_partial_num"] == 0
    assert third["fully_async/partial/max_partial_span"] == 0


def test_stale_counts_go_by_the_newest_version_of_a_trajectory_and_of_a_group(make):
    """verl: a trajectory's `param_version_end`, and a sample's version when its last trajectory has ended, at
    least one version older than the trainer's."""
    t, group, record = make["trajectory"], make["group"], make["record"]
    whole, partial = t(1.0, (2, 5)), t(0.0, (0, 5), (2, 5))
    stale, long_stale = t(0.0, (1, 5)), t(0.0, (0, 5), (1, 5))
    watched = metrics()
    keys = [f"fully_async/count/stale_{what}_processed" for what in ("samples", "trajectory")]
    first = watched.update(record(3, 2, [group("a", whole, partial), group("b", partial, partial)]))
    assert [first[key] for key in keys] == [0, 0]
    second = watched.update(record(4, 2, [group("c", partial, stale), group("d", long_stale, stale)]))
    assert [second[key] for key in keys] == [1, 3]
    third = watched.update(record(5, 2, [group("e", whole, whole), group("f", stale, stale)]))
    assert [third[key] for key in keys] == [2, 5]


def test_idle_ratios_and_rates_cover_the_time_since_the_previous_line(make):
    report, record = make["report"], make["record"]

    def reports(trainer_s, first, second):
        busy, starved, syncing = trainer_s
        state_s = {State.BUSY: busy, State.STARVED: starved, State.SYNCING: syncing}
        made = [report("trainer", "trainer", state_s, sums={"trained_tokens": 100 * busy})]
        for name, (elapsed, idle, running, tokens) in {"rollout-0": first, "rollout-1": second}.items():
            sums = {"idle_s": idle, "running_sequence_s": running, "sampled_tokens": tokens}
            made.append(report(name, "rollout", {State.BUSY: elapsed}, sums=sums, gauges={"slots": 8}))
        return made

    watched = metrics()
    watched.update(record(1, 0, [], reports((4, 1, 0), (5, 5, 0, 0), (5, 5, 0, 0))))
    line = watched.update(record(2, 1, [], reports((6, 4, 1), (11, 6, 30, 1200), (10, 5, 20, 900))))
    # Trainer: 6 s, of them 3 starved and 1 syncing. Workers: 6 s with 1 idle, 5 s with none.
    assert line["trainer/idle_ratio"] == pytest.approx(4 / 6)
    assert line["trainer/tokens_per_s"] == pytest.approx(200 / 6)
    assert line["rollouter/idle_ratio"] == pytest.approx((1 / 6 + 0 / 5) / 2)
    assert line["rollouter/slot_utilization"] == pytest.approx((30 + 20) / (8 * 6 + 8 * 5))
    assert line["rollouter/tokens_per_s"] == pytest.approx(2100 / 5.5)
    assert "rollouter/eval_s" not in line


def test_a_restarted_executor_counts_from_its_new_start(make):
    report, record = make["report"], make["record"]
    watched = metrics()
    watched.update(record(1, 0, [], [report("trainer", "trainer", {State.BUSY: 90.0, State.STARVED: 10.0})]))
    line = watched.update(
        record(2, 1, [], [report("trainer", "trainer", {State.BUSY: 3.0, State.STARVED: 1.0})])
    )
    assert line["trainer/idle_ratio"] == pytest.approx(1 / 4)


def test_bytes_of_the_data_store_are_added_up_over_processes_and_their_restarts(make):
    """Against plain counters. Each process counts from 0; rollout-1 is replaced after step 3."""
    rng, book, watched = random.Random(5), ReportBook(), metrics()
    processes = {"rollout-0": Traffic(), "rollout-1": Traffic(), "ref": Traffic(), "trainer": Traffic()}
    for step in range(1, 7):
        put, fetched, copied, fetch_s = 0, 0, 0, 0.0
        for name, traffic in processes.items():
            for _ in range(rng.randrange(3)):
                if name != "trainer":
                    put += (amount := rng.randrange(10**6))
                    traffic.add(bytes_put=amount)
                amount, seconds = rng.randrange(10**6), rng.random()
                part = amount // rng.randrange(1, 4)
                fetched, copied, fetch_s = fetched + amount, copied + part, fetch_s + seconds
                traffic.add(bytes_fetched=amount, bytes_copied=part, fetch_s=seconds)
            role = {"ref": "scorer"}.get(name, name.partition("-")[0])
            began_s = 3.0 if step > 3 and name == "rollout-1" else 0.0
            told = make["report"](name, role, {State.BUSY: step - began_s}, sums=dict(traffic.sums))
            book.add(told, float(step), name)
        line = watched.update(make["record"](step, step, [], book.latest.values(), orphans=step // 4))
        found = [line.get(f"data/{name}", 0) for name in ("bytes_put", "bytes_fetched", "orphans")]
        assert found == [put, fetched, step // 4]
        assert line.get("data/fetch_s", 0) == pytest.approx(fetch_s)
        assert line.get("data/copies") == (pytest.approx(copied / fetched) if fetched else None)
        if step == 3:
            processes["rollout-1"] = Traffic()
            book.lost("rollout-1", float(step))
            book.returned("rollout-1", float(step))


def test_overlap_is_shared_busy_time_over_the_smaller_busy_time(make):
    report, record = make["report"], make["record"]
    times = {
        "trainer": [(State.STARVED, 0, 2), (State.BUSY, 2, 6)],
        "rollout-0": [(State.BUSY, 0, 3)],
        "rollout-1": [(State.BUSY, 1, 4), (State.LOADING, 4, 6)],
    }
    reports = [report(name, name.partition("-")[0], {State.BUSY: 1.0}) for name in times]
    spans = {
        name: tuple(Span(state=state, start_s=start, end_s=end) for state, start, end in listed)
        for name, listed in times.items()
    }
    line = metrics().update(record(1, 0, [], reports, spans=spans))
    # Rollout busy 0..4, trainer busy 2..6: shared 2 s of the smaller 4 s.
    assert line["overlap_ratio"] == pytest.approx(0.5)


def test_what_was_not_measured_is_absent(make):
    line = metrics().update(make["record"](1, 0, []))
    absent = """
        reward/mean reward/std staleness/mean staleness/max staleness/histogram
        staleness/span_histogram overlap_ratio trainer/idle_ratio rollouter/idle_ratio
        rollouter/slot_utilization sync/gather_s eval/reward_mean fully_async/partial/partial_ratio
        rollouter/eval_s"""
    assert not set(absent.split()) & line.keys()
    assert None not in line.values()


def test_a_probe_that_was_not_scored_has_no_difference(make):
    sync = dict(version=3, gather_s=0.1, send_s=0.2, load_s=0.3, pause_s=0.4, logprob_abs_diff=None)
    line = metrics().update(make["record"](4, 3, [], sync=sync))
    assert (line["sync/version"], line["sync/gather_s"], line["sync/send_s"]) == (3, 0.1, 0.2)
    assert (line["sync/load_s"], line["sync/pause_s"]) == (0.3, 0.4)
    assert not {"sync/logprob_abs_diff", "sync/loaded_share", "sync/unclear_loads"} & line.keys()


def test_a_sync_says_how_much_of_it_was_loaded_and_how_often_that_is_unclear(make):
    sync = {"version": 3, "gather_s": 0.1, "loaded_share": 0.98, "unclear_loads": 0}
    line = metrics().update(make["record"](4, 3, [], sync=sync))
    assert (line["sync/loaded_share"], line["sync/unclear_loads"]) == (0.98, 0)


def test_the_last_eval_that_ended_is_in_the_line(make):
    evals = tuple(
        EvalSummary(version=v, reward_mean=r, num_prompts=9, response_tokens_median=4, eval_s=1, num_failed=0)
        for v, r in ((0, 0.3), (1, 0.4))
    )
    watched = metrics()
    line = watched.update(make["record"](1, 0, [], evals=evals))
    assert (line["eval/reward_mean"], line["eval/version"]) == (0.4, 1)
    assert "eval/version" not in watched.update(make["record"](2, 1, []))


def test_each_eval_set_has_keys_of_its_own(make):
    figures = {"response_tokens_median": 4, "eval_s": 1, "num_failed": 0, "version": 1, "num_prompts": 9}
    held_out = EvalSummary(reward_mean=0.4, **figures)
    aime = EvalSummary(
        reward_mean=0.1, eval_set="aime", samples_per_prompt=4, best=((2, 0.2), (4, 0.3)), **figures
    )
    line = metrics().update(make["record"](1, 0, [], evals=(held_out, aime)))
    assert line["eval/reward_mean"] == 0.4
    assert (line["eval/aime/reward_mean"], line["eval/aime/version"]) == (0.1, 1)
    assert {key: value for key, value in line.items() if "@" in key} == {
        "eval/aime/reward/mean@4": 0.1,
        "eval/aime/reward/best@2/mean": 0.2,
        "eval/aime/reward/best@4/mean": 0.3,
    }


def test_an_evals_line_has_the_spread_of_its_prompts(make):
    figures = {"response_tokens_median": 4, "eval_s": 1, "num_failed": 1, "version": 1, "num_prompts": 4}
    summary = EvalSummary(reward_mean=0.5, rewards=(0.0, None, 1.0, 0.0, 1.0), **figures)
    line = metrics().update(make["record"](1, 0, [], evals=(summary,)))
    assert line["eval/reward_std"] == pytest.approx(0.57735, abs=1e-5)  # sqrt(1 / 3)
    # Agresti and Coull, 2 of 4: 0.5 -+ 1.96 * sqrt(0.25 / (4 + 1.96 ** 2))
    assert (line["eval/reward_low"], line["eval/reward_high"]) == pytest.approx((0.15, 0.85), abs=5e-4)


def test_every_key_is_there_when_everything_was_measured(make):
    watched = metrics()
    line = watched.update(make["full_record"](50))
    expected = """
        step version time_s groups_trained tokens_trained reward/mean reward/std eval/reward_mean
        eval/truncated_ratio eval/version trainer/idle_ratio rollouter/idle_ratio rollouter/slot_utilization
        overlap_ratio rollouter/tokens_per_s trainer/tokens_per_s rollouter/eval_s waste/tokens_discarded
        fully_async/count/stale_samples_processed fully_async/count/stale_trajectory_processed
        timing/step_s timing/wait_data_s timing/old_logprob_s timing/train_s timing/gather_s
        timing/checkpoint_s timing/eval_s timing/other_s staleness/mean staleness/max staleness/oldest_mean
        staleness/newest_mean staleness/steps_mean staleness/steps_max staleness/histogram
        fully_async/partial/total_partial_num fully_async/partial/partial_ratio
        fully_async/partial/max_partial_span sync/gather_s sync/send_s sync/load_s sync/pause_s
        sync/logprob_abs_diff correction/ratio_mean correction/ratio_max correction/clipped_ratio
        correction/masked_ratio ledger/admitted_total ledger/running ledger/finished ledger/training
        ledger/trained ledger/dropped ledger/requeued data/bytes_put data/bytes_fetched data/fetch_s
        data/copies data/orphans"""
    assert set(expected.split()) <= line.keys()
    assert line["ledger/admitted_total"] == 16 * 50 + 24


def test_time_goes_on_over_a_resume_and_so_do_the_counts(make):
    t, group, record = make["trajectory"], make["group"], make["record"]
    groups = [group("a", t(1.0, (0, 5), (1, 5)), t(0.0, (0, 5)))]
    first = metrics(window_steps=4)
    assert first.update(record(5, 1, groups, ended_s=130.0))["time_s"] == 30.0
    state = json.loads(json.dumps(first.state()))
    second = StepMetrics(trigger_parameter_sync_step=4, started_s=7000.0)
    second.restore(state)
    line = second.update(record(6, 1, groups, ended_s=7012.0))
    assert line["time_s"] == 42.0
    assert line["fully_async/count/stale_trajectory_processed"] == 2
    assert line["fully_async/partial/total_partial_num"] == 2
    assert line["fully_async/partial/partial_ratio"] == pytest.approx(2 / 4)


def test_the_totals_of_a_run_join_steps_by_their_weights(make):
    t, group, record, report = (make[name] for name in ("trajectory", "group", "record", "report"))
    watched = metrics()
    watched.update(
        record(1, 0, [group("a", t(1.0, (0, 10)))], [report("trainer", "trainer", {State.BUSY: 1.0})])
    )
    last = [report("trainer", "trainer", {State.BUSY: 2.0, State.STARVED: 6.0})]
    watched.update(record(2, 1, [group("b", t(0.0, (0, 90)), t(0.0, (1, 50)))], last))
    totals = watched.totals()
    assert totals["trainer/idle_ratio"] == pytest.approx(6 / 8)
    assert totals["staleness/mean"] == pytest.approx(90 / 150)
    assert totals["staleness/max"] == 1
    assert totals["staleness/histogram"] == [2, 1]
    assert totals["timing/step_s"] == pytest.approx(1.4)


def test_a_random_run_agrees_with_numpy(make):
    rng = random.Random(7)
    watched = metrics(window_steps=3)
    stale_groups = partial_in_window = seen_in_window = 0
    for step in range(1, 31):
        window = (step - 1) // 3
        if (step - 1) % 3 == 0:
            partial_in_window = seen_in_window = 0
        groups, tokens, oldest, newest = [], [], [], []
        for index in range(4):
            trajectories = []
            for _ in range(5):
                recent, most = range(max(0, window - 2), window + 1), min(2, window + 1)
                versions = sorted(rng.sample(recent, k=rng.randint(1, most)))
                counted = tuple((version, rng.randint(1, 40)) for version in versions)
                trajectories.append(make["trajectory"](rng.random(), *counted))
                tokens += [version for version, number in counted for _ in range(number)]
                oldest.append(window - versions[0])
                newest.append(window - versions[-1])
                partial_in_window += len(versions) > 1
            seen_in_window += len(trajectories)
            stale_groups += min(newest[-5:]) >= 1
            groups.append(make["group"](f"{step}-{index}", *trajectories))
        line = watched.update(make["record"](step, window, groups, step_in_window=(step - 1) % 3))
        ages = window - np.array(tokens)
        assert line["staleness/mean"] == pytest.approx(ages.mean())
        assert line["staleness/max"] == ages.max()
        assert line["staleness/steps_mean"] == pytest.approx((step - 1 - 3 * np.array(tokens)).mean())
        assert line["staleness/histogram"] == np.bincount(oldest).tolist()
        assert line["fully_async/partial/partial_ratio"] == pytest.approx(partial_in_window / seen_in_window)
        assert line["fully_async/count/stale_samples_processed"] == stale_groups

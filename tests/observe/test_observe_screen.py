"""The screen and the plain lines, drawn from the status of a realistic run."""

import io
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl_cli.contracts.events import Event
from asyncrl_cli.contracts.status import Note, parse_status
from asyncrl_cli.observe import screen as screens
from asyncrl_cli.observe.format import clock, duration, share, sparkline, summary_rows
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.render import render
from asyncrl_cli.observe.run_status import RunStatus
from asyncrl_cli.observe.screen import Plain, Screen, can_show, make_ui, print_status
from asyncrl_cli.observe.sinks import to_json
from asyncrl_cli.observe.terminal import LABEL


@pytest.fixture(scope="module")
def drawn(facts, make):
    """The status as the driver would write it."""
    now_s = [0.0]
    observers = Observers(facts, [], clock=lambda: now_s[0])
    for step in range(1, 119):
        now_s[0] = float(step)
        made = make["full_record"](step)
        observers.step(made)
        observers.tick(make["full_overview"](made))
        if step % 50 == 0:
            fields = {"reward_mean": 0.3 + step / 400, "num_prompts": 512}
            observers.event(Event(time_s=float(step), name="eval", version=step, step=step, fields=fields))
    observers.event(Event(time_s=117.0, name="warning", fields={"message": "a reward took longer than 10 s"}))
    return to_json(observers.live.picture().to_json())


@pytest.fixture
def status(drawn):
    return parse_status(drawn)


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (140, 50), (60, 40), (40, 30), (20, 10)])
def test_the_picture_fits_every_terminal(status, width, height):
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(render(status, width=width, height=height - 1))
    lines = console.export_text().splitlines()
    assert len(lines) <= height - 1
    assert max(len(line) for line in lines) <= width


def test_a_hundred_columns_show_everything(status):
    text = render(status, width=100, height=29).plain
    for shown in (
        *("brave-otter", "step 118/300", "0:01:58", "left", "last 60 steps, 60 s ── states and waits: now"),
        *("slots used  81%", "overlap  92%", "now 114/128", "idle   3%    3,200 tokens/s"),
        *("idle  40%    1,500 tokens/s", "waits for 16 takeable groups", "mean 0.13", "max 1", "bound 1"),
        *("4,800", "2,880", "38%", "max span 1", "v118", "v117", "0.550", "from 0.425", "gather 12 ms"),
        *("pause 22 ms", "2.1e-07", "admitted 1,912", "trained 1,888"),
        *("admission  waits: window (all 24 groups of the window have started, version 119 opens the next)",),
        *("a reward took longer than 10 s", "step-000100"),
    ):
        assert shown in text, shown


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (100, 18)])
@pytest.mark.parametrize("num_rollouts", [1, 2, 40])
def test_the_machines_train_and_rollout_are_the_last_rows_to_be_dropped(status, width, height, num_rollouts):
    feed, rollout, _, trainer = status.executors
    rollouts = [replace(rollout, name=f"rollout-{number}") for number in range(num_rollouts)]
    rewards = [replace(feed, name=f"reward-{number}", role="reward") for number in range(num_rollouts)]
    crowded = replace(status, executors=[feed, *rollouts, *rewards, trainer])
    text = render(crowded, width=width, height=height - 1).plain
    assert "\ntrain        starved" in text
    assert "\nrollout      busy" in text
    assert "\nrollout-0" not in text or "\nreward " in text
    assert "staleness  mean 0.13" in text or height <= 20


@pytest.fixture
def restarting(status):
    """rollout-0 has no process, and its reward process is gone with it."""
    lost = {"state": "failed", "waiting_for": "a restart"}
    feed, rollout, *others = status.executors
    return replace(
        status,
        executors=[
            feed,
            replace(rollout, **lost),
            *others,
            replace(rollout, **lost, name="reward-0", role="reward", gauges={}),
        ],
        versions={"rollout-1": status.versions["rollout-1"]},
        restarting={"rollout-0": "2 of 3"},
        admission=replace(status.admission, closed_by="restart", cause="rollout-0 is being restarted"),
    )


def test_a_worker_that_is_restarted_is_not_shown_as_failed(restarting):
    lines = render(restarting, width=100, height=40).plain.splitlines()
    for name in ("rollout ", "rollout-0"):
        row = next(line for line in lines if line.startswith(name))
        assert row.split()[1:5] == ["restarting", "(2", "of", "3)"]
        assert not {"v-1", "v118", "sequences"} & set(row.split())
    assert next(line for line in lines if line.startswith("reward ")).split()[1] == "restarting"
    assert next(line for line in lines if line.startswith("rollouter")).endswith("restarting (2 of 3)")
    assert any("admission  waits: restart (rollout-0 is being restarted)" in line for line in lines)
    assert not any("failed" in line for line in lines)
    assert "left" not in lines[1].split()  # nobody knows when it ends


def test_how_far_a_governor_lets_generation_run_is_beside_the_budget(status):
    governed = replace(status, admission=replace(status.admission, governor="eta 0.42 of 2"))
    assert "budget 24 · eta 0.42 of 2" in render(governed, width=120, height=40).plain
    assert "eta" not in render(status, width=120, height=40).plain.split("admission")[0]
    # after the end, too, with the whole run's KL
    ended = replace(governed, phase="done", totals={**status.totals, "correction/kl": 0.0123})
    assert "eta 0.42 of 2" in render(ended, width=120, height=40).plain
    assert dict(summary_rows(ended))["governor"] == "eta 0.42 of 2; mean KL 0.0123"
    assert "governor" not in dict(summary_rows(status))


def test_turns_tools_and_failures_have_a_line_where_there_are_any(status):
    assert "turns" not in render(status, width=100, height=29).plain
    env = {"turns_mean": 3.25, "turns_max": 8, "tool_s": 1.5, "forks": 2}
    env |= {"failed/tool-timeout": 3, "failed/reward": 1}
    text = render(replace(status, env=env), width=120, height=40).plain
    line = next(line for line in text.splitlines() if line.startswith("turns"))
    shown = "mean 3.2  max 8  tools 1.5 s  forks 2  3 failed (tool-timeout)  1 failed (reward)"
    assert line.split("  ")[-6:] == shown.split("  ")
    for_what = "search of p1@0.0/3 (4 s so far)"
    waits = replace(status.executors[1], state="waiting for tools", waiting_for=for_what)
    text = render(replace(status, executors=[waits]), width=120, height=40).plain
    assert f"waiting for tools  waits for {for_what}" in text


@pytest.mark.parametrize(
    ("keys", "orphans", "shown"),
    [
        (0, 0, []),
        (1280, 0, ["1,280 keys, 1.5 GB  fetched per step 3.5 MB"]),
        (0, 3, ["0 keys, 1.5 GB  fetched per step 3.5 MB  orphans 3"]),
    ],
)
def test_the_data_store_has_a_line_while_it_holds_or_has_lost_something(status, keys, orphans, shown):
    """Two workers fetch 1.5 MB each in a step, and the trainer 0.5 MB."""
    changed = replace(status, data=replace(status.data, keys=keys, orphans=orphans))
    lines = render(changed, width=100, height=40).plain.splitlines()
    assert [line[LABEL:] for line in lines if line.startswith("data ")] == shown
    row = "3 keys of the data store had no owner" if orphans else None
    assert dict(summary_rows(changed)).get("orphans") == row
    assert "\ndata " not in render(replace(status, data=None), width=100, height=40).plain


def test_dynamic_sampling_has_a_line(status):
    assert "equal rewards" not in render(status, width=100, height=40).plain
    filtering = replace(status, filtered_ratio=0.375, reward={**status.reward, "unfiltered_mean": 0.25})
    assert ("filtered   38% of groups had equal rewards  reward with them 0.250") in render(
        filtering, width=100, height=40
    ).plain


def test_workers_without_weights_have_no_version(facts, make):
    made = make["full_record"](3)
    observers = Observers(facts, [], clock=lambda: 3.0)
    observers.tick(replace(make["full_overview"](made), worker_versions={"rollout-0": -1, "rollout-1": 2}))
    assert observers.live.picture().versions == {"rollout-1": 2}


def test_a_step_that_takes_long_does_not_bring_the_end_nearer(facts, make):
    now_s = [0.0]
    observers = Observers(facts, [], clock=lambda: now_s[0])
    for step in (1, 2):
        now_s[0] = float(step)
        observers.step(make["full_record"](step))
    overview = make["full_overview"](make["full_record"](2))
    for waited_s, left_s in ((0.5, 297.5), (1.0, 297.0), (500.0, 297.0)):  # 298 steps of 1 s
        observers.tick(replace(overview, time_s=2.0 + waited_s))
        assert observers.live.picture().progress.eta_s == pytest.approx(left_s)


@pytest.mark.parametrize(
    ("waiting", "shown"), [(0, "57/64 seqs  kv 37%"), (3, "57/64 seqs  kv 37%  waiting 3")]
)
def test_what_an_engine_tells_of_its_cache_fits_into_a_hundred_columns(status, waiting, shown):
    for executor in status.executors:
        if executor.role == "rollout":
            executor.gauges.update(kv_cache_usage=0.374, engine_waiting=waiting, engine_running=57 - waiting)
    lines = render(status, width=100, height=29).plain.splitlines()
    rows = [line for line in lines if line.startswith("rollout-")]
    assert len(rows) == 2
    assert all(line.endswith(shown) for line in rows)


def test_what_failed_is_said_when_the_stop_begins_and_why_is_left_to_the_command(status):
    stream = io.StringIO()
    plain = Plain(stream)
    failed = replace(status, phase="failed", error="rollout-0 failed: out of memory")
    plain.event({"time_s": 1.0, "event": "failed", "error": "rollout-0 failed: out of memory"})
    plain.status(failed)
    plain.close(failed)
    assert "out of memory" not in stream.getvalue()
    assert "stopping: rollout-0 failed\n" in stream.getvalue()
    assert "brave-otter: failed" in stream.getvalue()
    console = Console(width=100, file=io.StringIO())
    print_status(RunStatus(directory=Path("x"), status=failed, liveness="ended", age_s=3), console)
    assert "error      rollout-0 failed: out of memory" in console.file.getvalue()


def test_the_remark_of_a_dead_run_stands_at_the_top(status):
    text = render(status, width=100, height=29, remark="not running any more").plain
    assert "not running any more" in text.splitlines()[3:5]
    assert "states and waits: as last reported" in text
    assert ": now" not in text


def test_the_screen_draws_the_newest_status_and_leaves_the_totals(status, monkeypatch):
    """And no status by itself: pictures come at their own rate, which is none here."""
    monkeypatch.setattr(screens, "REDRAWS_PER_S", 1e-6)
    monkeypatch.setattr(screens, "CLOSE_TIMEOUT_S", 60.0)
    console = Console(width=100, height=30, file=io.StringIO(), force_terminal=True)
    screen = Screen(console)
    for step in range(99, 119):
        screen.status(replace(status, progress=replace(status.progress, step=step)))
    screen.close(replace(status, phase="done"))
    written = console.file.getvalue()
    assert re.findall(r"step (\d+)/300", written) == ["118"]
    assert "admitted 1,912 = running 17" in written
    assert "0.425 (version 50) -> 0.550 (version 100)" in written


def test_drawing_never_becomes_work_that_a_run_would_notice(status):
    """About 1% of a core at four frames a second; a machine that shares its cores may take five times that.
    Other tests may have left threads."""
    console = Console(width=100, height=30, file=io.StringIO(), force_terminal=True)
    frames, spent_s = 10, []
    for _ in range(10):  # the quickest round: neighbours slow down the others, and do not speed up any
        began_s = time.thread_time()
        for _ in range(frames):
            console.print(render(status, width=100, height=29))
        spent_s.append(time.thread_time() - began_s)
    assert min(spent_s) / frames * 4 < 0.08


def test_the_last_steps_and_their_eval_are_in_the_time_left(facts, make):
    now_s = [0.0]
    observers = Observers(replace(facts, train_steps=3), [], clock=lambda: now_s[0])
    fields = {"reward_mean": 0.3, "num_prompts": 9, "eval_s": 8.0}
    observers.event(Event(time_s=0.0, name="eval", version=0, step=0, fields=fields))
    left_s = []
    for step in (1, 2, 3):
        now_s[0] = float(step)
        observers.step(made := make["full_record"](step))
        observers.tick(make["full_overview"](made))
        left_s.append(observers.live.picture().progress.eta_s)
    observers.tick(replace(make["full_overview"](made), time_s=8.0))
    assert left_s.pop(0) is None  # the first step waited for the eval
    assert [*left_s, observers.live.picture().progress.eta_s] == pytest.approx([9.0, 8.0, 3.0])
    observers.live.phase("done")
    assert observers.live.picture().progress.eta_s is None


def test_the_end_says_which_warnings_there_were(status):
    warnings = [Note(time_s=60.0 * number, text=f"no {number}") for number in range(1, 6)]
    rows = dict(summary_rows(replace(status, warnings=warnings, num_warnings=7)))
    assert rows["warnings"] == "7: 0:03:00 no 3; 0:04:00 no 4; 0:05:00 no 5; 4 more, in events.jsonl"
    assert dict(summary_rows(status))["warnings"] == "1: 0:01:57 a reward took longer than 10 s"


def test_the_end_of_a_run_that_lent_devices_says_what_that_gave(status):
    rows = dict(
        summary_rows(replace(status, totals={"placement/lent_s": 2.14, "placement/lent_tokens": 1546.0}))
    )
    assert rows["lent"] == "the trainer's devices for 2.1 s: 1,546 tokens"
    assert "lent" not in dict(summary_rows(status))


def test_the_end_of_a_replay_leaves_out_what_only_rollout_workers_measure(status):
    progress = replace(status.progress, tokens_trained=None)
    rows = dict(summary_rows(replace(status, totals={"staleness/mean": 0.5}, progress=progress)))
    assert "whole run" not in rows
    assert "tokens" not in rows["trained"]


def test_a_small_share_is_not_nothing(status):
    totals = {**status.totals, "fully_async/partial/partial_ratio": 0.001}
    rows = dict(summary_rows(replace(status, totals=totals)))
    assert "partial <1%, max span" in rows["staleness"]
    assert share(0.0) == "0%"


def test_the_drivers_log_has_a_line_per_step(facts, make, caplog):
    with caplog.at_level("INFO", logger="asyncrl"):
        Observers(facts, [], clock=lambda: 0.0).step(make["full_record"](118))
    (line,) = caplog.messages
    assert line == (
        "step 118  v118  reward 0.425  staleness 0.13/1  trainer idle 40%  rollouter idle 3%  1.0 s"
    )


def test_plain_lines_are_few_and_close_with_the_totals(status):
    now_s, stream = [0.0], io.StringIO()
    plain = Plain(stream, now=lambda: now_s[0])
    for step in range(1, 21):
        plain.status(replace(status, progress=replace(status.progress, step=step, time_s=float(step))))
        now_s[0] += 1.0
    plain.event({"time_s": 21.0, "event": "running"})
    plain.event({"time_s": 21.0, "event": "eval", "version": 20, "reward_mean": 0.61})
    plain.event({"time_s": 22.0, "event": "lost", "worker": "rollout-1", "error": "its warning says it"})
    plain.event({"time_s": 23.0, "event": "restarted", "worker": "rollout-1", "restart_s": 12.3})
    plain.close(replace(status, progress=replace(status.progress, step=20)))
    lines = stream.getvalue().splitlines()
    steps = [line.split("step ")[1].split("/")[0] for line in lines if "  step " in line]
    assert steps == ["1", "6", "11", "16", "20"]
    assert (
        "last 60 steps, 60 s: staleness 0.13/1  slots used 81%  trainer idle 40%  rollouter idle 3%  "
        "tokens/s 3,200"
    ) in lines[1]
    assert "0:00:21  eval of version 20: 0.610" in lines
    assert "0:00:23  rollout-1 was restarted in 12.3 s" in lines
    assert any(line.startswith("ledger     admitted 1,912") for line in lines)


def test_plain_lines_say_what_a_run_that_starts_is_about(status):
    stream = io.StringIO()
    plain = Plain(stream, now=lambda: 0.0)
    for doing in ("loading the task", "warm start  1/300", "warm start  2/300"):
        plain.status(replace(status, phase="starting", doing=doing))
    said = [line.split("): ")[1] for line in stream.getvalue().splitlines() if "starting" in line]
    assert said == ["starting: loading the task", "starting: warm start"]


def test_a_plain_line_says_every_half_minute_what_is_waited_for_if_no_other_line_does(status):
    now_s, stream = [0.0], io.StringIO()
    plain = Plain(stream, now=lambda: now_s[0])
    trainer = replace(
        next(one for one in status.executors if one.role == "trainer"),
        name="trainer-0",
        state="starved",
        waiting_for="3 of 8 groups",
    )
    waiting = replace(
        status,
        executors=[trainer],
        restarting={"rollout-1": "1 of 3", "rollout-2": "no room"},
        eval=replace(status.eval, running="version 0: 12 of 64 trajectories"),
    )
    for second in range(1, 101):
        now_s[0] = float(second)
        plain.status(replace(waiting, progress=replace(status.progress, time_s=float(second))))
        if second == 50:
            plain.event({"time_s": 50.0, "event": "remark", "message": "hello"})
    lines = stream.getvalue().splitlines()
    quiet = [line for line in lines if "still running" in line]
    assert [line.split()[0] for line in quiet] == ["0:00:31", "0:01:20"]
    assert quiet[0].endswith(
        "still running (rollout-1 is down (restart 1 of 3); rollout-2 is down (no room); "
        "eval of version 0: 12 of 64 trajectories; trainer-0 waits for 3 of 8 groups)"
    )
    plain.status(replace(waiting, phase="done"))
    now_s[0] = 200.0
    plain.status(replace(waiting, phase="done"))
    assert stream.getvalue().count("still") == 2


def test_plain_lines_show_the_reward_also_with_the_groups_that_were_filtered(status):
    stream = io.StringIO()
    Plain(stream).status(replace(status, reward={"mean": 0.5, "unfiltered_mean": 0.25}))
    assert "reward 0.500  with filtered groups 0.250  last" in stream.getvalue()


def test_the_last_step_is_shown_with_its_own_figures(facts, make):
    """The trainer is done with the last step long before its line is written, which has the final eval."""
    stream, now_s = io.StringIO(), [0.0]
    observers = Observers(facts, [Plain(stream, now=lambda: now_s[0])], clock=lambda: now_s[0])
    first, last = make["full_record"](1), make["full_record"](2)
    observers.step(first)
    for now_s[0], made in (
        (1.0, first),
        (9.0, replace(last, ended_s=9.0)),
    ):  # step 2 is trained, its eval runs
        observers.tick(make["full_overview"](made))
    observers.step(last)
    observers.close("done")
    shown = re.findall(r"step (\d+)/300 .* reward (\S+)", stream.getvalue())
    assert shown == [("1", "0.264"), ("2", "0.265")]  # (3 (0.2 + 0.002 step) + 5 (0.3 + 0.001 step)) / 8


def test_without_a_terminal_there_are_plain_lines():
    console = Console(file=io.StringIO())
    assert not can_show(console)
    assert isinstance(make_ui("auto", console), Plain)
    assert make_ui("none", console) is None


def test_the_status_of_an_ended_run_closes_with_its_totals(status, tmp_path):
    console = Console(width=100, file=io.StringIO())
    print_status(
        RunStatus(directory=tmp_path, status=replace(status, phase="done"), liveness="ended", age_s=3),
        console,
    )
    assert "whole run  slots used 81%, " in console.file.getvalue()


def test_figures_are_written_for_people():
    shown = [duration(value) for value in (None, 0.0123, 0.0042, 4.24, 95)]
    assert shown == ["-", "12 ms", "4.2 ms", "4.2 s", "0:01:35"]
    assert clock(3723) == "1:02:03"
    assert sparkline([0, 1, 2, 3], 3, low=0, high=3) == "▃▆█"

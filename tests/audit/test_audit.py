"""`asyncrl audit` on simulated runs with made-up arrays: it passes what the loop does, and notices damages to
the files and faults of the code."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer

from asyncrl_cli.audit.proofs import audit_run
from asyncrl_cli.audit.run_files import RunFiles
from asyncrl_cli.checkpoint.lookup import take_lock
from asyncrl_cli.cli.app import run as command
from asyncrl_cli.job.driver_replay import without_servers
from asyncrl_cli.loop.admission import Admission
from asyncrl_cli.loop.groups import Groups
from asyncrl_cli.loop.ledger import Ledger, Stage
from asyncrl_cli.loop.lending import Lending
from asyncrl_cli.observe import step_values
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.resolved import differing
from asyncrl_cli.train import step_plan
from tests.audit import damages as d
from tests.audit.made_run import made_run

DROPS = (
    "async_training.staleness_threshold=3",
    "async_training.max_staleness=3",
    'async_training.on_stale="drop"',
)
LENDS = ("placement.lend=true", "rollout.slots=4")
KEPT_BY_REAL_RUNS = {"checkpoints", "versions", "logprobs"}


def verdicts(run: Path) -> dict[str, str]:
    claims, path = audit_run(run)
    found = {claim.name: claim.verdict for claim in claims}
    assert [one["verdict"] for one in json.loads(path.read_text())["claims"]] == [*found.values()]
    return found


@pytest.mark.parametrize(
    ("profile", "sets"),
    [
        ("colocate", ()),
        ("on-policy-pipeline", ()),
        ("stream-off-policy", ()),
        ("one-step-off", ()),
        ("stale-samples", ()),
        ("partial-rollout", ()),
        ("partial-rollout", DROPS),
        ("partial-rollout", LENDS),
        ("partial-rollout", ("algorithm.adv_estimator=rloo",)),
        ("partial-rollout", ("algorithm.adv_estimator=reinforce_plus_plus_baseline",)),
    ],
)
def test_what_a_run_of_each_mode_has_recorded_holds(profile, sets, tmp_path):
    made_run(tmp_path / "run", profile, sets)
    found = verdicts(tmp_path / "run")
    assert {name for name, verdict in found.items() if verdict == "not checked"} == KEPT_BY_REAL_RUNS
    assert "fails" not in found.values()


def test_the_last_line_counts_the_claims_that_hold_fail_and_were_not_checked(copy, capsys):
    assert command(["audit", str(copy)]) == 0
    assert "14 claims hold, 3 not checked; " in capsys.readouterr().err
    d.truncated(copy)
    assert command(["audit", str(copy)]) == 1
    assert ", 1 fail, 3 not checked; " in capsys.readouterr().err


def test_a_run_that_is_running_is_not_audited(copy, capsys):
    with take_lock(copy):
        assert command(["audit", str(copy)]) == 4
    assert "is running, and its files change" in capsys.readouterr().err


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "run"
    made_run(directory, "partial-rollout", ("async_training.trigger_parameter_sync_step=2",))
    return directory


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run", copy_function=os.link))


DAMAGES: dict[str, list[Callable[[Path], None]]] = {
    "files": [d.truncated, d.a_line_less, d.last_line_less],
    "groups": [d.events(d.without("finished")), d.events(d.never_ends), d.events(d.twice)],
    "trained once": [d.events(d.twice), d.events(d.without("trained"))],
    "ledger": [
        d.metrics("ledger/admitted_total", 1),
        d.metrics("ledger/dropped", 1),
        d.metrics("tokens_trained", -1),
        d.metrics("groups_trained", 2),
    ],
    "windows": [d.metrics("window", 1), d.events(d.skips_a_version)],
    "staleness bound": [d.events(d.older), d.events(d.newer)],
    "loaded first": [d.events(d.loaded_late)],
    "staleness metrics": [d.metrics("staleness/mean", 0.01), d.metrics("staleness/steps_max", 1)],
    "trainer idle": [d.metrics("trainer/idle_ratio", 0.3), d.busy_instead],
    "rollout idle": [d.metrics("rollouter/idle_ratio", 0.3)],
    "samples": [
        d.arrays(d.positive_logprob),
        d.arrays(d.untrained_token),
        d.arrays(d.trained_prompt),
        d.arrays(d.other_prompt),
    ],
    "samples' groups": [d.arrays(d.other_group), d.arrays(d.stamped_wrong)],
    "advantages": [d.arrays(d.no_mean), d.arrays(d.no_deviation)],
    "sample metrics": [d.metrics("reward/mean", 0.01), d.histogram],
}
CASES = [(claim, number) for claim, ways in DAMAGES.items() for number in range(len(ways))]


@pytest.mark.parametrize(("claim", "number"), CASES)
def test_a_damage_is_noticed(claim, number, copy):
    DAMAGES[claim][number](copy)
    assert verdicts(copy)[claim] == "fails"


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_damaged_line_is_named_once_before_what_follows_from_it(copy, name):
    text = (copy / name).read_text().splitlines()
    (copy / name).unlink()  # a link to the file of the other tests
    (copy / name).write_text("\n".join([*text[:1], "{", *text[2:]]) + "\n")
    claims, _ = audit_run(copy)
    files = next(claim for claim in claims if claim.name == "files")
    assert files.wrong[0].startswith(f"{name}, line 2 is damaged")
    assert len(set(files.wrong)) == len(files.wrong) == min(files.num_wrong, 5)


def test_the_load_that_is_reported_first_may_have_begun_last(copy):
    def another_worker_is_faster(content: list[d.Line]) -> list[d.Line]:
        at = next(place for place, line in enumerate(content) if line["event"] == "loaded")
        faster = {**content[at], "worker": "rollout-9", "began_s": content[-1]["time_s"]}
        return [*content[:at], faster, *content[at:]]

    d.events(another_worker_is_faster)(copy)
    assert verdicts(copy)["loaded first"] == "holds"


@pytest.mark.parametrize(("deterministic", "verdict"), [(True, "holds"), (False, "fails")])
def test_only_a_deterministic_run_begins_a_lost_group_again_under_its_key(deterministic, verdict, copy):
    def lost(content: list[d.Line]) -> list[d.Line]:
        at = content.index(d.first_of(content, "finished"))
        running = next(one for one in content if one["event"] == "running")
        again = [
            {**content[at], "event": "requeued", "reason": "arrays lost"},
            {**running, "group": content[at]["group"], "time_s": content[at]["time_s"]},
            content[at],
        ]
        return [*content[: at + 1], *again, *content[at + 1 :]]

    d.events(lost)(copy)
    config = json.loads((copy / "config.resolved.json").read_text())
    config["profile"]["run"]["deterministic"] = deterministic
    d.replaced(copy / "config.resolved.json", json.dumps(config).encode())
    assert verdicts(copy)["groups"] == verdict


def test_a_step_whose_samples_are_missing_is_named(copy):
    assert not next(one.unchecked for one in audit_run(copy)[0] if one.name == "sample metrics")
    (copy / d.STEP).unlink()
    (claim,) = (one for one in audit_run(copy)[0] if one.name == "sample metrics")
    assert claim.verdict == "holds"
    assert claim.unchecked.startswith("samples of step 5 are missing: logging.samples")
    config = json.loads((copy / "config.resolved.json").read_text())
    config["profile"]["logging"]["samples"] = "all"
    d.replaced(copy / "config.resolved.json", json.dumps(config).encode())
    (copy / d.STEP).with_name("step-000007.safetensors").unlink()
    (claim,) = (one for one in audit_run(copy)[0] if one.name == "sample metrics")
    assert claim.unchecked == "samples of 2 steps, from step 5 on, are missing"


def test_the_samples_of_one_step_are_held_at_a_time(copy, monkeypatch):
    read, held, most = RunFiles.groups, [], [0]

    def watched(files):
        for group in read(files):
            held.append((group.step, weakref.ref(group.samples[0].tokens)))
            held[:] = [(step, array) for step, array in held if array() is not None]
            most.append(len({step for step, _ in held}))
            yield group

    monkeypatch.setattr(RunFiles, "groups", watched)
    verdicts(copy)
    assert 0 < max(most) <= 2  # the next one is read before the last one is left


@pytest.mark.parametrize("check_all", [False, True])
def test_logprobs_of_64_trajectories_or_of_all_are_checked_step_by_step(check_all, copy, monkeypatch):
    for version in range(40):
        (copy / "versions" / f"version-{version:06d}").mkdir(parents=True)
    steps = []

    def none_sampled(opened, runs, segment, temperature):
        steps.append(runs[-1][1])
        return np.zeros(len(segment.places_N))

    monkeypatch.setattr("asyncrl_cli.audit.weights._logprobs", none_sampled)
    claims, _ = audit_run(copy, check_all=check_all)
    (claim,) = (one for one in claims if one.name == "logprobs")
    total = sum(len(group.samples) for group in RunFiles(copy).groups())
    assert claim.cases == (total if check_all else 64) < total + check_all
    assert claim.verdict == "fails"
    assert steps[0].name == "version-000000"
    assert steps[-1] == max(steps)


def test_the_command_exits_with_1_if_a_claim_fails_and_the_report_shows_it(copy, capsys):
    d.metrics("staleness/mean", 0.01)(copy)
    assert command(["audit", str(copy), "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    (wrong,) = (one for one in out["claims"] if one["verdict"] == "fails")
    assert wrong["name"] == "staleness metrics"
    assert "step 5: staleness/mean" in wrong["wrong"][0]
    assert command(["report", str(copy)]) == 0
    page = (copy / "report.html").read_text()
    assert "Audit of run" in page
    assert "step 5: staleness/mean" in page


def test_what_was_not_kept_is_not_checked_and_names_the_key_that_keeps_it(copy, capsys):
    shutil.rmtree(copy / "samples")
    assert command(["audit", str(copy)]) == 0
    err = capsys.readouterr().err
    assert 'advantages: not checked: no group was kept whole: logging.samples = "all" keeps' in err
    assert 'logging.samples = "all" and weights.keep_versions = "all" would have kept' in err


def _trains_twice(patch):
    trained = Groups.trained

    def twice(self):
        attempts = list(self.ledger.training.values())
        trained(self)
        self._entered(attempts[0], tokens=1, versions=[])

    patch.setattr(Groups, "trained", twice)


def _loses_what_it_drops(patch):
    entered = Groups._entered

    def quiet(self, attempt, **fields):
        if attempt.stage is not Stage.DROPPED:
            entered(self, attempt, **fields)

    patch.setattr(Groups, "_entered", quiet)


def _breaks_the_bound(patch):
    right = Admission.deadline_from
    patch.setattr(Admission, "deadline_from", lambda self, version: right(self, version) + 2)


def _counts_too_many(patch):
    totals = Ledger.totals
    patch.setattr(Ledger, "totals", lambda self: {**totals(self), "running": len(self.running) + 1})


def _forgets_idle_time(patch):
    patch.setattr(step_values, "TRAINER_IDLE", step_values.TRAINER_IDLE[1:])


def _counts_staleness_from_the_next_version(patch):
    right = step_values.staleness_values

    def wrong(record, size):
        return right(replace(record, window=record.version), size)

    patch.setattr(step_values, "staleness_values", wrong)


def _leaves_the_mean_in_the_advantages(patch):
    patch.setattr(step_plan, "_centred", list)


def test_a_trainer_that_does_not_wait_for_its_devices_is_noticed(tmp_path, monkeypatch):
    recall, late = Lending.recall, []

    async def recall_later(self):
        async def later():
            await asyncio.sleep(0.5)
            await recall(self)

        if self._since_s is not None:
            late.append(asyncio.ensure_future(later()))

    monkeypatch.setattr(Lending, "recall", recall_later)
    made_run(tmp_path / "run", "partial-rollout", LENDS)
    assert verdicts(tmp_path / "run")["lent devices"] == "fails"


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        (_trains_twice, "groups"),
        (_loses_what_it_drops, "groups"),
        (_breaks_the_bound, "staleness bound"),
        (_counts_too_many, "ledger"),
        (_forgets_idle_time, "trainer idle"),
        (_counts_staleness_from_the_next_version, "staleness metrics"),
        (_leaves_the_mean_in_the_advantages, "advantages"),
    ],
    ids=lambda value: getattr(value, "__name__", value).strip("_"),
)
def test_a_fault_of_the_code_is_noticed(fault, claim, tmp_path, monkeypatch):
    fault(monkeypatch)
    made_run(tmp_path / "run", "partial-rollout", DROPS)
    assert verdicts(tmp_path / "run")[claim] == "fails"


def test_a_replay_exits_as_its_last_eval_ends(tmp_path, monkeypatch, capsys):
    class Made:
        steps, failure, equality = "steps 7-12 of 12, from step-000006", "", "1 of 1 versions"
        run_dir, of, changes, trains_differently, equal, different = tmp_path, "", {}, False, [0], []
        loaded = SimpleNamespace(profile=SimpleNamespace(eval=SimpleNamespace(prompts=4)), warnings=())
        run = to_json = lambda self, *progress, **given: {}

    def stopped(run, *, as_json):
        raise typer.Exit(3)

    monkeypatch.setattr("asyncrl_cli.job.driver_replay.Replay", lambda *args: Made())
    monkeypatch.setattr("asyncrl_cli.job.driver_run.Run.resume", lambda *args, **given: None)
    monkeypatch.setattr("asyncrl_cli.observe.recorded.Recorded.events", lambda *args: [])
    monkeypatch.setattr("asyncrl_cli.checkpoint.run_directory.check_free", lambda *args: None)
    monkeypatch.setattr("asyncrl_cli.cli.evidence.run_to_its_end", stopped)
    assert command(["replay", "run", "--json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out)["eval/reward_mean"] is None
    assert "training again steps 7-12 of 12, from step-000006" in said.err


def test_the_eval_of_a_replay_needs_no_server_of_the_run(tmp_path):
    sets = ("rollout.engine=remote", 'rollout.urls=["http://far:8000"]', "rollout.token_file=serve.token")
    far = load("base", [*sets, "weights.transport=directory", f"weights.url=file://{tmp_path}"], environ={})
    here = without_servers(far.profile)
    check(here)
    assert {*differing(far.profile, here)} == {
        *("rollout.engine", "rollout.urls", "rollout.token_file", "weights.transport", "weights.url")
    }
    assert here.rollout.engine == "transformers"
    assert without_servers(here) is here

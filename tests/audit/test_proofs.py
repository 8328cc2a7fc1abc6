"""One real run: its claims about weights and seals hold, damages to them are noticed, and `asyncrl replay`
makes its weights again, or others."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl_cli.audit.proofs import audit_run
from asyncrl_cli.base.errors import AsyncrlError, ConfigError, RefusedError
from asyncrl_cli.cli.app import run as command
from asyncrl_cli.job.driver_replay import Replay
from asyncrl_cli.loop.ledger import Stage
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.run_status import next_command, read_status
from asyncrl_cli.profile.loaded import Loaded
from asyncrl_cli.profile.resolved import read_document
from asyncrl_cli.report.side_by_side import compare
from asyncrl_cli.simulate.calibration import calibrate
from tests.audit import damages as d
from tests.run.commands import SMALL, finish, kill, start, wait_for_steps
from tests.run.fingerprints import VARIED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEEPS = ("logging.samples=all", "weights.keep_versions=all", "checkpoint.keep=20", "run.train_steps=8")
LEARNS = ("model.warm_start_steps=300", "rollout.n=8", "rollout.slots=32")
"""Without some rewards all advantages, and all changes of the weights, would be 0."""
WINDOWS = ("async_training.trigger_parameter_sync_step=2",)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded")
    words = ("--profile", "partial-rollout", "--name", "run", "--ui", "none")
    code, _, err = finish(start(directory, "train", *words, sets=(*SMALL, *KEEPS, *LEARNS, *WINDOWS)))
    assert code == 0, err
    return directory / "runs" / "run"


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run", copy_function=os.link, symlinks=True))


def test_all_claims_hold_of_a_real_run(recorded: Path) -> None:
    claims, _ = audit_run(recorded, check_all=True)
    assert {claim.name: (claim.verdict, claim.wrong) for claim in claims} == {
        claim.name: ("holds", []) for claim in claims
    }
    (logprobs,) = (claim for claim in claims if claim.name == "logprobs")
    assert logprobs.cases == 8 * 4 * 8
    assert logprobs.worst is not None
    assert logprobs.worst < 1e-4


MODEL = "versions/version-000002/model.safetensors"
CHECKPOINT = "checkpoints/step-000004"
DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("checkpoints", d.flipped(f"{CHECKPOINT}/rank-00000.safetensors")),
    ("checkpoints", d.flipped(f"{CHECKPOINT}/loop_state.json", 60)),
    ("checkpoints", d.resealed),
    ("checkpoints", d.a_file_less),
    ("versions", d.flipped(MODEL)),
    ("logprobs", d.arrays(d.stamped_wrong)),
    ("logprobs", d.arrays(d.other_temperature)),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damage_to_weights_or_seals_is_noticed(number: int, copy: Path) -> None:
    claim, damage = DAMAGES[number]
    damage(copy)
    claims, _ = audit_run(copy, check_all=claim == "logprobs")
    assert claim in {one.name for one in claims if one.verdict == "fails"}


def replayed(run: Path, name: str, *sets: str) -> Replay:
    made = Replay(str(run), run.parent, sets, name)
    made.run()
    return made


def test_a_replay_makes_the_same_weights_bit_for_bit(copy: Path) -> None:
    again = replayed(copy, "again", "eval.prompts=4")
    assert (again.equal, again.different) == ([0, 1, 2, 3, 4], [])
    own, others = (list(Recorded(path).metrics()) for path in (again.run_dir, copy))
    for key in ("train/loss", "train/grad_norm", "correction/kl", "reward/mean", "staleness/mean", "version"):
        assert [line[key] for line in own] == [line[key] for line in others]
    seen = read_status("again", copy.parent)
    assert (seen.state, seen.status.ledger["trained"]) == ("stopped", 8 * 4)  # an eval may follow
    made = Replay(str(copy / "checkpoints" / "step-000004"), copy.parent, name="done")
    assert made.steps == "steps 5-8 of 8, from step-000004"
    during = set[str]()
    made.run(lambda text: during.add(next_command(made.run_dir, "killed")), is_scored=False)
    assert f"asyncrl replay {copy.resolve()}/step-4 --name done --runs-dir {copy.parent}" in during
    seen = read_status("done", copy.parent)
    assert seen.state == "done"
    assert seen.replayed.startswith(f"a replay of {copy.resolve()}, of its steps after 4")
    assert [*seen.status.ledger][1:] == [stage.value for stage in Stage]
    for of_a_run in (audit_run, lambda path: Replay(str(path), copy.parent), calibrate):
        with pytest.raises(AsyncrlError, match="is a replay"):
            of_a_run(again.run_dir)


def test_a_replay_of_a_run_that_was_killed_and_resumed_also_trains_critic_and_teacher_with_two_epochs(
    recorded: Path, tmp_path: Path
) -> None:
    """Every kind of state that a train step leaves behind: the critic and its optimizer, the weight of the KL
    in the reward, and twice as many optimizer steps."""
    teacher = shutil.copytree(recorded / "versions" / "version-000004", tmp_path / "teacher")
    sets = (
        *(*SMALL, *KEEPS, *VARIED, "run.train_steps=6", "trainer.ppo_epochs=2"),
        *("algorithm.adv_estimator=gae", "algorithm.use_kl_loss=true"),
        *("algorithm.use_kl_in_reward=true", "algorithm.kl_target=0.01"),
        *(f"teacher.path={teacher}", "algorithm.distill_coef=0.1"),
    )
    words, run = ("--profile", "one-step-off", "--name", "run", "--ui", "none"), tmp_path / "runs" / "run"
    killed = start(tmp_path, "train", *words, sets=sets)
    wait_for_steps(killed, run, 3)
    kill(killed, signal.SIGKILL)
    finish(killed)
    code, _, err = finish(start(tmp_path, "resume", "run", "--ui", "none"))
    assert code == 0, err
    claims, _ = audit_run(run)
    assert not [claim.wrong for claim in claims if claim.verdict == "fails"]
    again = replayed(run, "again")
    assert (again.equal, again.different) == ([0, 1, 2, 3, 4, 5, 6], [])
    own, others = (list(Recorded(path).metrics()) for path in (again.run_dir, run))
    for key in ("reward/kl_coef", "critic/loss", "distill/kl", "ref/kl", "train/loss"):
        assert [line[key] for line in own] == [line[key] for line in others]


def test_other_trajectories_make_other_weights(copy: Path) -> None:
    def other_reward(content: d.Arrays, head: d.Line) -> None:
        for group in head["groups"]:
            for index, trajectory in enumerate(group["result"]["trajectories"]):
                trajectory["reward"] = float(index)

    d.arrays(other_reward)(copy)
    assert replayed(copy, "other").different == [3, 4]  # step 5 is the first of the window after version 2
    ended = read_status("other", copy.parent).status
    assert (ended.phase, ended.error.partition(": ")[2]) == ("failed", "version 3 is the first that has not")
    assert command(["replay", str(copy), "--runs-dir", str(copy.parent), "--no-eval"]) == 1


def test_with_another_loss_it_says_what_that_makes_of_the_same_data(copy: Path) -> None:
    sets = ("algorithm.loss_mode=gspo", "trainer.lr=1e-3")
    other = replayed(copy, "other", *sets)
    assert (other.equal, other.different) == ([0], [1, 2, 3, 4])
    assert [*other.changes] == ["algorithm.loss_mode", "trainer.lr"]
    comparison = compare([Recorded(copy), Recorded(other.run_dir)])
    (doubt,) = comparison.doubts
    assert doubt.startswith("other: a replay, which trains on trajectories that another run sampled")
    assert set(comparison.differences) == {"algorithm.loss_mode", "trainer.lr"}


def test_a_replay_ends_with_one_eval_of_its_weights(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--name", "scored", "--ui", "none", "--json")
    code, out, err = finish(start(copy.parent, "replay", "run", *words, "--runs-dir", "."))
    assert code == 0, err
    found, run = json.loads(out), Recorded(copy.parent / "scored")
    last = [event for event in Recorded(copy).events("eval") if event["version"] == 4]
    assert found["eval/reward_mean"] == pytest.approx(last[-1]["reward_mean"], abs=0.3)
    assert [event["version"] for event in run.events("eval")] == [4]
    assert run.status is not None
    assert run.status.phase == "done"


def test_a_run_that_was_extended_while_its_learning_rate_fell_is_refused(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From before that: its first steps had another schedule."""

    def scheduled(path: Path) -> Loaded:
        loaded, steps = read_document(path), 8 if path.parent.parent.name == "checkpoints" else 16
        trainer = loaded.profile.trainer.model_copy(update={"lr_schedule": "cosine"})
        run = loaded.profile.run.model_copy(update={"train_steps": steps})
        return replace(loaded, profile=loaded.profile.model_copy(update={"trainer": trainer, "run": run}))

    monkeypatch.setattr("asyncrl_cli.job.driver_replay.read_document", scheduled)
    with pytest.raises(RefusedError, match=r"resumed with another run.train_steps after this checkpoint"):
        Replay(str(recorded), recorded.parent)


def test_an_estimator_whose_critic_the_run_did_not_train_is_refused(recorded: Path) -> None:
    with pytest.raises(RefusedError, match="it trained no critic for"):
        Replay(str(recorded), recorded.parent, ("algorithm.adv_estimator=gae",))


@pytest.mark.parametrize("setting", ["rollout.n=4", "task.train_prompts=100", "algorithm.filter_groups=true"])
def test_keys_that_would_have_changed_the_data_are_refused(setting: str, recorded: Path) -> None:
    with pytest.raises(ConfigError, match="would have changed what is trained on"):
        Replay(str(recorded), recorded.parent, (setting,))


@pytest.mark.parametrize(("damage", "step"), [(lambda run: (run / d.STEP).unlink(), 5), (d.a_line_less, 4)])
def test_what_was_not_recorded_is_refused_with_the_key_that_records_it(
    damage: Callable[[Path], None], step: int, copy: Path
) -> None:
    damage(copy)
    with pytest.raises(RefusedError, match=rf"step-00000{step}.safetensors is missing") as refused:
        Replay(str(copy), copy.parent)
    assert "logging.samples" in refused.value.hint

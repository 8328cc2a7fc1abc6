"""Whether a run can go on from a checkpoint, checked before anything is started."""

from __future__ import annotations

from asyncrl_cli.checkpoint.find import Checkpoint
from asyncrl_cli.checkpoint.payloads import read_payloads
from asyncrl_cli.errors import RefusedError
from asyncrl_cli.loop.kept_state import read_state
from asyncrl_cli.loop.settings import LoopSettings
from asyncrl_cli.observe import observers
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.feed import PromptFeed
from asyncrl_cli.tasks.task import Task


def check_resumable(checkpoint: Checkpoint, profile: Profile) -> None:
    """Raises RefusedError unless the loop's state, its observers' and the finished groups are of one run with this profile."""
    state = read_state(checkpoint.loop_state, LoopSettings.of(profile))
    if state["step"] != checkpoint.step:
        raise _refused(checkpoint, f"its loop is at step {state['step']}")
    if len(state["observers"]) != 1:
        raise _refused(checkpoint, f"it has figures of {len(state['observers'])} observers, not of one")
    observers.read_state(state["observers"][0])
    finished = [(entry["result"]["key"], len(entry["result"]["trajectories"])) for entry in state["groups"]["finished"]]
    payloads = [((p.uid, p.epoch, p.attempt), len(p.trajectories)) for p in read_payloads(checkpoint.directory)]
    if payloads != finished:
        raise _refused(checkpoint, "its tokens are not those of its finished groups")


def refuse_other_prompts(checkpoint: Checkpoint, task: Task, seed: int) -> None:
    """A checkpoint names its prompts: RefusedError unless the task still has them, as they were."""
    feed, groups = PromptFeed(task.train, seed=seed), checkpoint.loop_state["groups"]
    feed.restore(groups["feed"])
    for entry in (*groups["running"], *groups["again"], *(finished["try"] for finished in groups["finished"])):
        feed.find(*entry["key"][:2])


def _refused(checkpoint: Checkpoint, why: str) -> RefusedError:
    return RefusedError(f"checkpoint {checkpoint.directory} is refused: {why}", hint="take another checkpoint")

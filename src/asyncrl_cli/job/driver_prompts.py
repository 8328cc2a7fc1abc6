"""The prompts of a run, and what a checkpoint must share with the run that resumes from it. Runs in the
driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.checkpoint.reader import Checkpoint
from asyncrl_cli.contracts.item import Item, fingerprint
from asyncrl_cli.contracts.ports import Json
from asyncrl_cli.contracts.prompt_group import GroupResult, Prompt
from asyncrl_cli.job.driver_curriculum import Curriculum
from asyncrl_cli.loop.checkpointer import read_state
from asyncrl_cli.observe import observers
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import Task

ANOTHER_CHECKPOINT = "take another checkpoint"
SAME_DATA = (
    "resume with the run's original data: task.source's file as it was then, or the same version of "
    "reasoning-gym"
)
SAME_EVALS = (
    "later evals could not be compared with earlier ones: restore the files of task.eval_path and "
    "eval.sets as they were"
)


class PromptFeed:
    """Implements `contracts.ports.Feed` on a task's training items: shuffled per epoch, endless, resumable at
    any point.

    An epoch's order is a function of (seed, epoch) alone, so the state is a position, not a history:
    `{"seed", "epoch", "cursor", "num_items", "fingerprint", "evals"}`, and "curriculum". The uids consumed
    so far are the first `cursor` of that order and all items of every earlier epoch. The loop does not stop
    between epochs: the next prompt is one of the next epoch.

    `eval_sets`: the feed does not give these items. Their fingerprints (`evals`) tell a resumed run whether
    they have changed. `curriculum`: passes over some prompts. `num_overlong`: prompts that were left out for
    their length.
    """

    def __init__(
        self,
        items: Sequence[Item],
        *,
        seed: int,
        eval_sets: Mapping[str, Sequence[Item]] | None = None,
        curriculum: float | None = None,
        num_overlong: int | None = None,
    ) -> None:
        if not items:
            raise ValueError("a feed needs at least one item")
        self._items = tuple(items)
        self._index_of = {item["uid"]: index for index, item in enumerate(self._items)}
        if len(self._index_of) != len(self._items):
            raise ValueError(f"{len(self._items)} items have only {len(self._index_of)} different uids")
        self._fingerprint = fingerprint(self._items)
        self._evals = {name: fingerprint(evals) for name, evals in (eval_sets or {}).items()}
        self._seed = seed
        self._curriculum = None if curriculum is None else Curriculum(curriculum, seed)
        self._num_overlong = num_overlong
        self._enter(epoch=0, cursor=0)

    def next(self) -> Prompt:
        while True:
            if self._cursor == len(self._items):
                self._enter(epoch=self._epoch + 1, cursor=0)
            item = self._items[self._order[self._cursor]]
            self._cursor += 1
            if self._curriculum is None or self._curriculum.lets_come(item["uid"], self._epoch):
                return Prompt(uid=item["uid"], epoch=self._epoch, item=item)

    def ended(self, group: GroupResult) -> None:
        if self._curriculum is not None:
            self._curriculum.ended(group)

    def figures(self) -> dict[str, float]:
        overlong = {} if self._num_overlong is None else {"prompts/overlong": float(self._num_overlong)}
        return overlong | (self._curriculum.figures() if self._curriculum is not None else {})

    def find(self, uid: str, epoch: int) -> Prompt:
        index = self._index_of.get(uid)
        if index is None:
            why = f"prompt {uid}, which is not among the {len(self._items)} of the task"
            raise RefusedError(f"the checkpoint names {why}", hint=SAME_DATA)
        if epoch > self._epoch or (epoch == self._epoch and self._order.index(index) >= self._cursor):
            why = f"prompt {uid} of epoch {epoch}, which the feed never reached"
            raise RefusedError(f"the checkpoint names {why}", hint=SAME_DATA)
        return Prompt(uid=uid, epoch=epoch, item=self._items[index])

    def state(self) -> Json:
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "num_items": len(self._items),
            "fingerprint": self._fingerprint,
            "evals": self._evals,
            **({"curriculum": self._curriculum.state()} if self._curriculum is not None else {}),
        }

    def restore(self, state: Json) -> None:
        """Raises RefusedError if `state` is damaged or belongs to other items or another seed."""
        kinds = {"seed": int, "epoch": int, "cursor": int, "num_items": int, "fingerprint": str}
        for key, kind in kinds.items():
            if type(state.get(key)) is not kind:
                raise _damaged(f"{key} is {state.get(key)!r:.80}")
        if state["fingerprint"] != self._fingerprint:
            raise RefusedError(
                f"the checkpoint was made with other prompts: {state['num_items']} items with fingerprint "
                f"{state['fingerprint'][:8]}, now {len(self._items)} with {self._fingerprint[:8]}",
                hint=SAME_DATA,
            )
        if not isinstance(before := state.get("evals"), Mapping):
            raise _damaged(f"evals is {before!r:.80}")
        now = self._evals
        if changed := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
            names = ", ".join(f"eval.sets.{name:.80}" if name else "the eval prompts" for name in changed)
            what = f"the checkpoint was made with other items for evals: {names} changed"
            raise RefusedError(what, hint=SAME_EVALS)
        if state["seed"] != self._seed:
            raise RefusedError(
                f"the checkpoint's prompts were shuffled with seed {state['seed']}, now {self._seed}",
                hint=f"resume with run.seed = {state['seed']}",
            )
        epoch, cursor = state["epoch"], state["cursor"]
        if epoch < 0 or not 0 <= cursor <= len(self._items):
            raise _damaged(f"epoch {epoch}, cursor {cursor} of {len(self._items)} items")
        if self._curriculum is not None:
            try:
                self._curriculum.restore(state.get("curriculum"))
            except ValueError as error:
                raise _damaged(f"curriculum.{error}") from None
        self._enter(epoch=epoch, cursor=cursor)

    def _enter(self, *, epoch: int, cursor: int) -> None:
        # Sorting by Random.random() and not Random.shuffle: only random() is promised to stay the same in
        # every Python.
        rng = Random(f"prompts {self._seed} {epoch}")
        keys = [rng.random() for _ in self._items]
        self._order = sorted(range(len(self._items)), key=keys.__getitem__)
        self._epoch, self._cursor = epoch, cursor


def _damaged(what: str) -> RefusedError:
    return RefusedError(f"the prompt feed's state is damaged: {what}", hint=ANOTHER_CHECKPOINT)


def check_resumable(checkpoint: Checkpoint, profile: Profile) -> None:
    """Raises RefusedError unless the checkpoint's loop state, observer state and finished groups fit each
    other and `profile`."""
    # both import numpy, which a dry run does not need
    from asyncrl_cli.checkpoint.payloads import read_payloads
    from asyncrl_cli.data.sample_fields import schema_of

    state, why = read_state(checkpoint.loop_state, LoopSettings.of(profile)), ""
    if state["step"] != checkpoint.step:
        why = f"its loop is at step {state['step']}"
    elif len(state["observers"]) != 1:
        why = f"it has figures of {len(state['observers'])} observers, not of one"
    else:
        observers.read_state(state["observers"][0])
        # the arrays must be those of the finished groups, then of running groups' ended parts, and then of
        # their unfinished parts
        payloads = read_payloads(checkpoint.directory, schema_of(profile))
        finished, running = state["groups"]["finished"], state["groups"]["running"]
        whole = [(entry["result"].key, entry["result"].trajectories) for entry in finished]
        for entry in running:
            whole += [(entry["key"], part["result"].trajectories) for part in entry.get("ended", ())]
        unfinished = [(entry["key"], entry["kept"]) for entry in running if entry.get("kept")]
        keys = [key for key, _ in (*whole, *unfinished)]
        fit = [(p.uid, p.epoch, p.attempt) for p in payloads] == keys and all(
            len(p.trajectories) == len(metas) for p, (_, metas) in zip(payloads, whole, strict=False)
        )
        for p, (_, responses) in zip(payloads[len(whole) :], unfinished if fit else (), strict=False):
            lengths = [one.num_tokens for one in p.trajectories]
            fit &= all(i < len(lengths) and lengths[i] == one.tokens for i, one in responses.items())
        why = "" if fit else "its tokens are not those of its groups"
    if why:
        raise RefusedError(f"checkpoint {checkpoint.directory} is refused: {why}", hint=ANOTHER_CHECKPOINT)


def refuse_other_prompts(checkpoint: Checkpoint, task: Task, seed: int) -> None:
    """Raises RefusedError unless the task still has the same items, also for evals, and the prompts that the
    checkpoint names."""
    feed = PromptFeed(task.train, seed=seed, eval_sets={"": task.eval, **task.eval_sets})
    groups = checkpoint.loop_state["groups"]
    feed.restore(groups["feed"])
    finished = [entry["try"] for entry in groups["finished"]]
    for entry in (*groups["running"], *groups["again"], *finished):
        feed.find(*entry["key"][:2])

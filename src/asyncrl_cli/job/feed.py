"""The order of prompts: shuffled per epoch, endless, resumable at any point.

An epoch's order is a function of (seed, epoch) alone, so the state is a position, not a history:
`{"seed", "epoch", "cursor", "num_items", "fingerprint"}`. The uids consumed so far are the first `cursor` of that order
and all items of every earlier epoch. The loop does not stop between epochs: the next prompt is simply one of the next epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from asyncrl_cli.errors import RefusedError
from asyncrl_cli.loop.attempts import Prompt
from asyncrl_cli.tasks.item import Item, fingerprint

SAME_DATA = "resume with the data that the run began with: task.source's file as it was then, or the same version of reasoning-gym"
STATE_KEYS = {"seed": int, "epoch": int, "cursor": int, "num_items": int, "fingerprint": str}


class PromptFeed:
    """Implements `loop.ports.Feed` over a task's training items."""

    def __init__(self, items: Sequence[Item], *, seed: int) -> None:
        if not items:
            raise ValueError("a feed needs at least one item")
        self._items = tuple(items)
        self._index_of = {item["uid"]: index for index, item in enumerate(self._items)}
        if len(self._index_of) != len(self._items):
            raise ValueError(f"{len(self._items)} items have only {len(self._index_of)} different uids")
        self._fingerprint = fingerprint(self._items)
        self._seed = seed
        self._enter(epoch=0, cursor=0)

    def next(self) -> Prompt:
        if self._cursor == len(self._items):
            self._enter(epoch=self._epoch + 1, cursor=0)
        item = self._items[self._order[self._cursor]]
        self._cursor += 1
        return Prompt(uid=item["uid"], epoch=self._epoch, item=item)

    def find(self, uid: str, epoch: int) -> Prompt:
        index = self._index_of.get(uid)
        if index is None:
            raise RefusedError(
                f"the checkpoint names prompt {uid}, which is not among the {len(self._items)} of the task", hint=SAME_DATA
            )
        if epoch > self._epoch or (epoch == self._epoch and self._order.index(index) >= self._cursor):
            raise RefusedError(f"the checkpoint names prompt {uid} of epoch {epoch}, which has not been given yet", hint=SAME_DATA)
        return Prompt(uid=uid, epoch=epoch, item=self._items[index])

    def state(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "num_items": len(self._items),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises RefusedError if `state` is damaged or belongs to other items or another seed."""
        for key, kind in STATE_KEYS.items():
            if type(state.get(key)) is not kind:
                raise RefusedError(f"the prompt feed's state is damaged: {key} is {state.get(key)!r:.80}")
        self._refuse_foreign(state)
        epoch, cursor = state["epoch"], state["cursor"]
        if epoch < 0 or not 0 <= cursor <= len(self._items):
            raise RefusedError(f"the prompt feed's state is damaged: epoch {epoch}, cursor {cursor} of {len(self._items)} items")
        self._enter(epoch=epoch, cursor=cursor)

    def _refuse_foreign(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self._fingerprint:
            raise RefusedError(
                f"the checkpoint was made with other prompts: {state['num_items']} items with fingerprint "
                f"{state['fingerprint'][:8]}, now {len(self._items)} with {self._fingerprint[:8]}",
                hint=SAME_DATA,
            )
        if state["seed"] != self._seed:
            raise RefusedError(
                f"the checkpoint's prompts were shuffled with seed {state['seed']}, now {self._seed}",
                hint=f"resume with run.seed = {state['seed']}",
            )

    def _enter(self, *, epoch: int, cursor: int) -> None:
        # Sorting by Random.random() and not Random.shuffle: only random() is promised to stay the same in every Python.
        rng = Random(f"prompts {self._seed} {epoch}")
        keys = [rng.random() for _ in self._items]
        self._order = sorted(range(len(self._items)), key=keys.__getitem__)
        self._epoch, self._cursor = epoch, cursor

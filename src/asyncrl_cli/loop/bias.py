"""Whether what is trained is a biased selection of what was admitted: longer or shorter, easier or harder.

A group counts once it has ended, with one of these fates:

    trained     its rewarded responses are; failed ones count as dropped
    filtered    left out for equal rewards (`algorithm.filter_groups`): a selection by intention
    aborted     given up while it ran: for its age
    dropped     otherwise: too many responses failed or were mixed, or it waited for too long

`bias/length` compares the lengths of trained responses with those of all responses of ended groups, and
`bias/difficulty` the difficulties of trained groups with those of all: the mean reward of a prompt's group
when it was first seen. Both are `Selection`s whose clusters are groups: responses to one prompt resemble each
other.

How long an aborted response would have become is not known. What it had is: its worker returns the number,
and until the next window opens the group waits for it. (If the worker has died meanwhile, the number is too
small.) So lengths of what was left out are lower bounds, and so is, in tokens, a bias towards short
responses. Of aborted responses, and of failed ones, only the sum is known: each counts as the mean. An
aborted group's difficulty is known if its prompt has had a finished group before.

A resumed run sees all prompts for the first time again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, PartResult, TrajectoryMeta
from asyncrl_cli.loop.ledger import Attempt
from asyncrl_cli.measure.values import Cluster, Ratio, Selection, SelectionError, Value, merge_into

TRAINED, FILTERED, ABORTED, DROPPED = "trained", "filtered", "aborted", "dropped"


class BiasMeter:
    """`values`: what was measured since the last train step; its reader clears it."""

    def __init__(self, n: int) -> None:
        self.values: dict[str, Value] = {}
        self._n = n
        self._first_rewards: dict[str, float] = {}
        self._aborted: dict[AttemptKey, tuple[list[TrajectoryMeta], Counter[str]]] = {}
        """Until the next window: the ended responses, and the tokens of the others so far."""

    def judged(self, group: GroupResult) -> None:
        """The rewards of a group are known."""
        rewards = [meta.reward for meta in group.trajectories]
        self._first_rewards.setdefault(group.key.uid, sum(rewards) / len(rewards))

    def trained(self, group: GroupResult) -> None:
        self._count(TRAINED, group.key, group.trajectories, len(group.failures), group.failed_tokens)

    def left_out(self, attempt: Attempt, *, is_filtered: bool) -> None:
        """An attempt is about to end untrained."""
        ended = [attempt.result] if attempt.result is not None else attempt.ended_parts()
        metas = [meta for one in ended for meta in one.trajectories]
        tokens = sum(one.failed_tokens for one in ended) + sum(one.tokens for one in attempt.partial.values())
        if attempt.unplaced or attempt.running_parts():
            self._aborted[attempt.key] = metas, Counter(tokens=tokens)
        else:
            fate, num_failed = FILTERED if is_filtered else DROPPED, sum(len(one.failures) for one in ended)
            self._count(fate, attempt.key, metas, num_failed, tokens)

    def returned(self, part: PartResult) -> None:
        """A part comes back whose group was given up."""
        if part.key.attempt in self._aborted:
            self._aborted[part.key.attempt][1]["tokens"] += part.failed_tokens + part.response_tokens

    def open_window(self) -> None:
        for key, (metas, rest) in self._aborted.items():
            self._count(ABORTED, key, metas, self._n - len(metas), rest["tokens"])
        self._aborted.clear()

    def _count(
        self, fate: str, key: AttemptKey, metas: Sequence[TrajectoryMeta], num_others: int, other_tokens: int
    ) -> None:
        """`num_others` responses are left out whatever the group's fate is, with `other_tokens` together."""
        lengths, is_trained = [meta.response_tokens for meta in metas], fate == TRAINED
        num, tokens, squares = len(lengths), sum(lengths), sum(length * length for length in lengths)
        if not num_others:  # a discarded conversation is no response
            other_tokens = 0
        all_squares = squares + other_tokens**2 / max(num_others, 1)
        chosen = (num, tokens) if is_trained else (0, 0)
        self._add("length", (*chosen, num + num_others, tokens + other_tokens, all_squares))
        others = DROPPED if is_trained else fate
        self._mean("tokens", {"admitted": (tokens, num), fate: (tokens, num)})
        self._mean("tokens", {"admitted": (other_tokens, num_others), others: (other_tokens, num_others)})
        rewards = sum(meta.reward for meta in metas), num
        self._mean("reward", {"admitted": rewards, fate: rewards})
        if (x := self._first_rewards.get(key.uid)) is not None:
            self._add("difficulty", (is_trained, x * is_trained, 1, x, x * x))
            self._mean("difficulty", {"admitted": (x, 1), fate: (x, 1)})

    def _add(self, name: str, cluster: Cluster) -> None:
        for key, kind in ((f"bias/{name}", Selection), (f"bias/{name}_error", SelectionError)):
            merge_into(self.values, {key: kind.of([cluster])})

    def _mean(self, name: str, sums: dict[str, tuple[float, int]]) -> None:
        means = {f"bias/{name}/{fate}": Ratio(*both) for fate, both in sums.items() if both[1]}
        merge_into(self.values, means)

"""Which prompts come less often (`task.curriculum`): those whose last group had equal rewards, because all of
its responses were right or all were wrong. Nothing is learned from such a group by comparison.

In each epoch a number that follows from seed, epoch and prompt decides whether such a prompt comes. All
others come once per epoch, as without a curriculum; so does a prompt that has no finished group yet.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from random import Random

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count, Finite, parse_json
from asyncrl_cli.contracts.ports import Json
from asyncrl_cli.contracts.prompt_group import GroupResult

RECENT_PROMPTS = 256
"""Figures of the prompts that came are about so many."""
LastGroup = tuple[Finite, bool]
"""The mean reward of a prompt's last finished group, and whether all of its rewards were equal."""


class CurriculumState(TypedDict):
    groups: dict[str, LastGroup]
    recent: list[str]
    passed: Count


class Curriculum:
    def __init__(self, share: float, seed: int) -> None:
        """`share`: of the epochs, in which a prompt whose last group had equal rewards comes."""
        self._share, self._seed = share, seed
        self._groups: dict[str, LastGroup] = {}
        self._recent: deque[str] = deque(maxlen=RECENT_PROMPTS)
        """The uids of the prompts that came."""
        self._passed = 0

    def lets_come(self, uid: str, epoch: int) -> bool:
        _, is_equal = self._groups.get(uid, (0.0, False))
        if is_equal and Random(f"curriculum {self._seed} {epoch} {uid}").random() >= self._share:
            self._passed += 1
            return False
        self._recent.append(uid)
        return True

    def ended(self, group: GroupResult) -> None:
        rewards = [one.reward for one in group.trajectories]
        self._groups[group.key.uid] = (sum(rewards) / len(rewards), len(set(rewards)) == 1)

    def figures(self) -> dict[str, float]:
        """The metrics `curriculum/...`. Both kinds of prompts are judged by the same groups, or a policy that
        learns would make those that came earlier look more difficult."""
        found: dict[str, float] = {"passed": self._passed}
        everything = list(self._groups.values())
        recent = [self._groups[uid] for uid in self._recent if uid in self._groups]
        for prefix, groups in (("", everything), ("sampled_", recent)):
            if groups:
                found[f"{prefix}reward"] = sum(mean for mean, _ in groups) / len(groups)
                found[f"{prefix}equal_ratio"] = sum(is_equal for _, is_equal in groups) / len(groups)
        if recent:
            found["distance"] = distance([mean for mean, _ in everything], [mean for mean, _ in recent])
        return {f"curriculum/{name}": figure for name, figure in found.items()}

    def state(self) -> Json:
        state = CurriculumState(groups=dict(self._groups), recent=list(self._recent), passed=self._passed)
        return {**state}

    def restore(self, state: object) -> None:
        """Raises ValueError if it is damaged."""
        found = parse_json(json.dumps(state), CurriculumState)
        self._groups, self._passed = dict(found["groups"]), found["passed"]
        self._recent.extend(found["recent"])


def distance(some: Sequence[float], others: Sequence[float]) -> float:
    """How far two distributions are apart: the area between their cumulative distributions (Wasserstein's
    distance), in the unit of the values."""
    steps = sorted(
        [(value, 1 / len(some)) for value in some] + [(value, -1 / len(others)) for value in others]
    )
    area = height = 0.0
    for (value, step), (following, _) in pairwise(steps):
        height += step
        area += abs(height) * (following - value)
    return area

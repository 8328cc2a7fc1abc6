"""How far generation may run ahead, and how much of it may run at once, steered while the run goes on
(`async_training.target_kl`). A pure state machine, no I/O.

    lever       groups ahead: 0 ... eta * W (admission.py)   sequences in flight: n ... the workers' slots
    measured    KL(sampler, trainer) of the trained tokens   preemptions by engines whose KV cache is full
    when        at the end of a window                       at the end of a train step

Both limits only lower what admission allows: the budget stays between W and floor((1 + eta) * W), and the
deadlines bound staleness as without a governor. Once nothing is in flight, a group may always start.

Groups ahead. `kl` is the mean over tokens, in which each window counts half as much as the next:

    kl > target                                    ahead *= max(sqrt(target / kl), 1/2)
    kl < 0.8 * target, the budget was used up,     ahead *= min(sqrt(0.9 * target / kl), 2)
    the trainer waited for groups, and two         (at least one group)
    windows were measured
    otherwise                                      unchanged

A trainer that never waits gains nothing from older data, so KL may stay below its target. A change acts late:
a window still trains groups that were admitted before it. So after a change no window counts that begins
before ceil(ahead / W) more versions have risen, with the larger `ahead` of before and after.

Sequences in flight, of at most `cap`:

    more preemptions than the step has responses   cap = 0.9 * the most that were in flight
    hardly any, and the cap was reached            cap *= 1.1

Worked example: W = 8, eta = 2, target 0.02. The run begins with 8 groups ahead, a budget of 16. Windows 1 and
2 have a kl of 0.005, and the trainer has waited: sqrt(0.018 / 0.005) = 1.9, so 15.2 groups, a budget of 23.
Windows 3 and 4 train groups of the budget of 16, too, and do not count. Window 5: kl = 0.03, above the
target: sqrt(0.02 / 0.03) = 0.82, so 12.4 groups, a budget of 20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.profile.arithmetic import LoopSettings

FIRST_ETA = 1.0
"""The share of a window that a run begins with. Data one version old was learned as well as new data
(docs/learning.md), and where a window's longest response decides, less than a window ahead gains nothing."""
AIM, RAISE_BELOW = 0.9, 0.8
"""Raises aim at this share of the target, and happen below the other. Means over a window scatter by some
percent; without the gap they would change the budget all the time, and half of the windows would be above the
target."""
EXPONENT = 0.5
"""KL grows about as staleness ** 1.7 (docs/learning.md), so the exact answer would be 1 / 1.7. A smaller
exponent approaches the target from its own side, and converges for any power below 4."""
MOST_CHANGE = 2.0
"""Of the groups ahead at once: a measured KL says little about staleness that was never tried."""
FORGET = 0.5
"""The weight of earlier windows. One window may have only a few long responses, which decide its KL."""
RAISE_WINDOWS = 2
"""A raise that one lucky window causes acts for several windows before it is taken back."""
LEAST_WAIT = 0.01
"""Share of the time that the trainer must have waited for groups. More groups cannot gain more than that."""
MOST_KL = MOST_CHANGE ** (1 / EXPONENT)
"""In targets. More would not lower the groups ahead further, and NaN or one broken step would outweigh all
others."""
CUT, RAISE = 0.9, 1.1
"""The in-flight cap falls and rises in steps that cost a few percent of throughput if they are wrong."""
THRASHES, HARDLY_ANY = 1.0, 0.1
"""Preemptions per response. A preempted response computes its context again, which takes a tenth of the time
of sampling it or less: an empty slot costs more than a few preemptions. When every response is preempted once
on average, most are several times, and the cache is the limit."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(slots=True, kw_only=True)
class WindowSums:
    """What was measured since the last change of the groups ahead acts; sums over train steps."""

    windows: Count = 0
    kl_sum: Amount = 0.0
    tokens: Amount = 0.0
    waited_s: Amount = 0.0
    elapsed_s: Amount = 0.0
    was_full: bool = False

    def end_window(self) -> None:
        self.kl_sum, self.tokens = FORGET * self.kl_sum, FORGET * self.tokens
        self.waited_s, self.elapsed_s = FORGET * self.waited_s, FORGET * self.elapsed_s
        self.was_full = False


class GovernorState(TypedDict):
    """The governor's part of a checkpoint. `most_in_flight`: None if not capped, so a resumed run with more
    slots is not, either. `counts_from`: the first window whose figures count."""

    ahead_groups: Amount
    most_in_flight: Count | None
    counts_from: Count
    measured: WindowSums


class Governor:
    def __init__(self, settings: LoopSettings, slots: int) -> None:
        """`slots`: of all workers together."""
        schedule, target_kl = settings.schedule, settings.profile.async_training.target_kl
        assert target_kl is not None
        self._target_kl = target_kl
        self._window_groups, self._n = schedule.window_groups, settings.profile.rollout.n
        self._most_ahead = schedule.budget_groups - schedule.window_groups
        self._ahead_groups = min(float(self._most_ahead), FIRST_ETA * self._window_groups)
        self._slots = self.most_in_flight = max(slots, self._n)
        """`most_in_flight`: the cap, in sequences."""
        self._preemptions = 0.0
        self._last_kl: float | None = None
        """That of the last step, to be shown."""
        self._peak = 0
        """The most sequences in flight since the last step."""
        self._counts_from = self._settled(0, self._ahead_groups)
        self._measured = WindowSums()

    def __str__(self) -> str:
        cap = f", at most {self.most_in_flight} sequences in flight" if self.is_capped else ""
        kl = "KL" if self._last_kl is None else f"KL {self._last_kl:.2g}"
        eta = f"eta {self.eta:.2g} of {self._most_ahead / self._window_groups:.2g}"
        return f"{eta}, {kl} (target {self._target_kl:g}){cap}"

    @property
    def eta(self) -> float:
        return int(self._ahead_groups) / self._window_groups

    @property
    def budget_groups(self) -> int:
        """At most so many groups may be running, finished or taken in a window."""
        return self._window_groups + int(self._ahead_groups)

    def has_room(self, in_flight: int) -> bool:
        """Whether another group's sequences may start beside those in flight. Only a cap below the slots
        counts: else some may also wait in the workers' queues."""
        return not in_flight or not self.is_capped or in_flight + self._n <= self.most_in_flight

    @property
    def is_capped(self) -> bool:
        return self.most_in_flight < self._slots

    def admitted(self, num_groups: int, in_flight: int) -> None:
        """A group has started. `num_groups`: running, finished and taken in the window, with it."""
        self._measured.was_full |= num_groups >= self.budget_groups
        self._peak = max(self._peak, in_flight)

    def trained(
        self,
        kl: float | None,
        num_tokens: int,
        num_responses: int,
        preemptions: float,
        timing_s: Mapping[str, float],
    ) -> None:
        """A train step has ended. `preemptions`: of all engines so far; `timing_s`: the step's parts."""
        measured, most_kl, self._last_kl = self._measured, MOST_KL * self._target_kl, kl
        if kl is not None:
            # not min(): NaN counts as the most
            measured.kl_sum += num_tokens * (max(kl, 0.0) if kl < most_kl else most_kl)
            measured.tokens += num_tokens
        # rounding may leave the time beside an eval below 0, which no checkpoint may hold
        measured.waited_s += max(timing_s["wait_data"], 0.0)
        measured.elapsed_s += timing_s["step"]
        ratio = max(0.0, preemptions - self._preemptions) / max(num_responses, 1)
        self._preemptions = preemptions
        if ratio > THRASHES:
            self.most_in_flight = max(self._n, int(CUT * min(self._peak, self.most_in_flight)))
        elif ratio < HARDLY_ANY and self._peak + self._n > self.most_in_flight:
            self.most_in_flight = min(self._slots, ceil(RAISE * self.most_in_flight))
        self._peak = 0

    def open_window(self, version: int) -> None:
        """The window before `version` has ended."""
        if version > self._counts_from:
            self._measured.windows += 1
            before = self._ahead_groups
            if self._change():
                self._counts_from = self._settled(version, max(before, self._ahead_groups))
            self._measured.end_window()
        if version <= self._counts_from:
            self._measured = WindowSums()

    def figures(self) -> dict[str, float]:
        """Metrics of where the levers are."""
        return {"governor/eta": self.eta, "governor/most_in_flight": self.most_in_flight}

    def state(self) -> GovernorState:
        measured: Any = asdict(self._measured)  # JSON, which is read back as `WindowSums`
        return {
            "ahead_groups": self._ahead_groups,
            "most_in_flight": self.most_in_flight if self.is_capped else None,
            "counts_from": self._counts_from,
            "measured": measured,
        }

    def resume(self, version: int, state: GovernorState | None) -> None:
        """Continue from `state`, within the limits of the resumed run. None: the run had a fixed eta so far,
        and its groups tell nothing of the one that is steered."""
        if state is None:
            self._counts_from = self._settled(version, self._most_ahead)
            return
        self._ahead_groups, cap = min(state["ahead_groups"], self._most_ahead), state["most_in_flight"]
        if cap is not None:
            self.most_in_flight = max(self._n, min(cap, self._slots))
        self._counts_from, self._measured = state["counts_from"], state["measured"]

    def _change(self) -> bool:
        """Set the groups ahead. Returns whether the budget has changed."""
        measured, before, target = self._measured, self.budget_groups, self._target_kl
        if not measured.tokens:
            return False
        kl = measured.kl_sum / measured.tokens
        starves = measured.was_full and measured.waited_s > LEAST_WAIT * measured.elapsed_s
        if kl > target:
            self._ahead_groups *= max((target / kl) ** EXPONENT, 1 / MOST_CHANGE)
        elif kl < RAISE_BELOW * target and starves and measured.windows >= RAISE_WINDOWS:
            factor = min((AIM * target / max(kl, 1e-12)) ** EXPONENT, MOST_CHANGE)
            raised = max(self._ahead_groups * factor, self._ahead_groups + 1)
            self._ahead_groups = min(raised, float(self._most_ahead))
        return self.budget_groups != before

    def _settled(self, version: int, ahead_groups: float) -> int:
        """The first window that trains only groups admitted from `version` on, if so many were ahead."""
        return version + ceil(ahead_groups / self._window_groups)

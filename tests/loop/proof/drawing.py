"""What a scenario is, and how one is drawn from a seed: a mode, sizes, lengths, delays, faults, a stop, a
resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Literal

from asyncrl_cli.profile.arithmetic import CRITIC, PROX, REF, REWARD, LoopSettings
from tests.loop.keywords import changed, loop_settings
from tests.loop.proof.faults import Fault, FaultKind, draw_faults, draw_lack_of_room, draw_worker_faults

MODES = (
    "on-policy-pipeline",
    "stream-off-policy",
    "stale-samples",
    "partial-rollout",
    "one-step-off",
    "colocate",
)
MAX_TOKENS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One drawn run. Seconds are means where they are drawn per call. `resume_at`: at which share of its
    checkpoints to resume."""

    seed: int
    mode: str
    settings: LoopSettings
    num_workers: int
    slots: int
    num_eval_prompts: int
    lengths: str
    step_s: float
    speed_spread: float
    reward_s: float
    prefetch_lag_s: float
    load_lag_s: float
    failed_rewards: float
    train_s: float
    gather_s: float
    publish_s: float
    write_s: float
    faults: tuple[Fault, ...]
    stop_at_s: float | None
    resume_at: float | None
    shuffle_seed: int | None
    restart_s: float = 0.0
    max_turns: int = 1
    tool_s: float = 0.0
    failing_tools: float = 0.0
    hanging_tools: float = 0.0
    scorers: tuple[str, ...] = ()
    group_score_s: float = 0.0
    """Seconds that a scorer takes for a group."""
    learn_s: float = 0.0
    """Seconds for which a critic learns from a train step."""
    version_kl: float = 0.0
    """KL that a version adds, if a governor steers to one."""
    preemptions: int = 0
    """How often an engine preempts each response of some versions."""
    judge_s: float = 0.0
    """Seconds for which a reward model judges a trajectory of an eval."""
    num_lent: int = 0
    """Workers on the trainer's devices."""
    wake_s: float = 0.0
    sleep_s: float = 0.0

    @property
    def least_workers(self) -> int:
        """How many workers have room for a group."""
        rollout = self.settings.profile.rollout
        return -(-rollout.n // self.slots) if rollout.placement == "response" else 1

    def workers_of(self, leg: int) -> int:
        """A resumed run may have more workers or fewer, as long as a group finds room."""
        others = random.Random(f"workers {self.seed} {leg}").choice((self.num_workers, 1, 2, 4))
        return max(others, self.least_workers) if leg else self.num_workers

    def names_of(self, leg: int) -> tuple[list[str], list[str]]:
        """Its own workers, and those on the trainer's devices."""
        own = self.workers_of(leg)
        names = worker_names(own + self.num_lent)
        return names[:own], names[own:]

    def __str__(self) -> str:
        shown = [name for name in (field.name for field in fields(self)) if name != "settings"]
        drawn = [f"  {name} = {getattr(self, name)}" for name in shown]
        profile = self.settings.profile.model_dump(mode="json", exclude_unset=True)
        return "\n".join([*drawn, f"  profile = {profile}"])


LENGTHS: Mapping[str, Callable[[random.Random], int]] = {
    "constant": lambda rng: 12,
    "pareto": lambda rng: min(int(5 * rng.paretovariate(1.2)), MAX_TOKENS),
    "heavy pareto": lambda rng: min(int(3 * rng.paretovariate(0.8)), MAX_TOKENS),
    "bimodal": lambda rng: 250 if rng.random() < 0.08 else 6,
}


TOOL_TIMEOUT_S = 8.0
"""A tool that hangs fails its trajectory after this long."""


def draw(seed: int, *, with_turns: bool = False, with_scorer: bool = False) -> Scenario:
    """`with_turns`, `with_scorer`: the scenario of that seed, but for certain with several turns, or a
    scorer."""
    rng = random.Random(f"scenario {seed}")
    mode = rng.choice(MODES)
    settings = changed(_draw_settings(rng, mode), weights_mode=_draw_weights_mode(seed))
    if mode == "partial-rollout":
        settings = changed(settings, **_draw_mixed_versions(seed))
    train_s = rng.choice((0.0, 0.2, 0.7, 2.0))
    expected_s = settings.schedule.train_steps * (train_s + 0.5)
    num_workers = rng.randint(1, 4)
    scenario = Scenario(
        seed=seed,
        mode=mode,
        settings=settings,
        num_workers=num_workers,
        slots=settings.profile.rollout.n * rng.randint(1, 3) + rng.randint(0, settings.profile.rollout.n - 1),
        num_eval_prompts=rng.choice((0, 0, 0, 6, 20)),
        lengths=rng.choice(tuple(LENGTHS)),
        step_s=rng.choice((0.005, 0.02, 0.05)),
        speed_spread=rng.choice((0.0, 0.3)),
        reward_s=rng.choice((0.0, 0.0, 0.1, 1.5)),
        prefetch_lag_s=rng.choice((0.0, 0.3, 2.0)),
        load_lag_s=rng.choice((0.0, 0.2, 2.0)),
        failed_rewards=rng.choice((0.0, 0.0, 0.0, 0.1, 0.4)),
        train_s=train_s,
        gather_s=rng.choice((0.0, 0.1, 0.5)),
        publish_s=rng.choice((0.0, 0.1, 1.0)),
        write_s=rng.choice((0.0, 0.4, 3.0)),
        faults=_draw_faults(rng, settings, num_workers, expected_s),
        stop_at_s=rng.uniform(0, expected_s) if rng.random() < 0.2 else None,
        resume_at=rng.random() if rng.random() < 0.3 else None,
        shuffle_seed=rng.choice((None, rng.randrange(2**31))),
    )
    scenario = _with_restarts(_with_placement(scenario), expected_s)
    scenario = _with_lending(_with_governor(scenario), expected_s)
    scenario = _with_filter(_with_turns(scenario, is_certain=with_turns))
    return _with_limits(_with_eval_deaths(_with_scorer(scenario, expected_s, is_certain=with_scorer)))


def _with_limits(scenario: Scenario) -> Scenario:
    """In half of the scenarios limits that some failed trajectories or groups of equal rewards exceed."""
    rng = random.Random(f"limits {scenario.seed}")
    if rng.random() < 1 / 2:
        return scenario
    ratio, batches = rng.choice((0.02, 0.05, 0.1, 0.2, 0.4)), rng.choice((1, 1, 2, 3))
    failed = rng.choice((scenario.failed_rewards, 0.1, 0.4))
    settings = changed(scenario.settings, max_failed_ratio=ratio, max_num_gen_batches=batches)
    return replace(scenario, settings=settings, failed_rewards=failed)


def _with_eval_deaths(scenario: Scenario) -> Scenario:
    """In a quarter of the scenarios some workers die in an eval, mostly in the last one. The run may go on
    without them."""
    rng = random.Random(f"eval deaths {scenario.seed}")
    if rng.random() < 3 / 4:
        return scenario
    settings, names = scenario.settings, worker_names(scenario.num_workers)
    syncs, least = settings.schedule.syncs, scenario.least_workers
    if not settings.profile.placement.colocate and rng.random() < 0.8 and least < scenario.num_workers:
        settings = changed(settings, min_workers=rng.randint(least, scenario.num_workers - 1))
    deaths = tuple(
        Fault(
            kind=FaultKind.DIES_IN_EVAL,
            executor=name,
            nth=rng.choice((syncs, syncs, rng.randint(0, syncs))),
            seconds=rng.choice((0.0, rng.random() * 0.3, rng.random() * 3)),
        )
        for name in rng.sample(names, rng.randint(1, min(2, len(names))))
    )
    prompts = scenario.num_eval_prompts or rng.choice((6, 20))
    return replace(scenario, settings=settings, num_eval_prompts=prompts, faults=(*scenario.faults, *deaths))


def _with_governor(scenario: Scenario) -> Scenario:
    """A governor in half of the scenarios that generate ahead: KL is far below its target, about there, or
    far above it."""
    rng = random.Random(f"governor {scenario.seed}")
    if rng.random() < 1 / 2 or not scenario.settings.schedule.eta:
        return scenario
    settings = changed(scenario.settings, target_kl=0.02)
    version_kl, preemptions = rng.choice((0.001, 0.012, 0.1)), rng.choice((0, 1, 3))
    return replace(scenario, settings=settings, version_kl=version_kl, preemptions=preemptions)


def _with_lending(scenario: Scenario, expected_s: float) -> Scenario:
    """The trainer's devices may be lent in half of the scenarios that are not colocated. In half of these a
    worker on them dies, hangs or loads slowly."""
    rng = random.Random(f"lending {scenario.seed}")
    if rng.random() < 1 / 2 or scenario.mode == "colocate":
        return scenario
    num_lent, loads = rng.randint(1, 2), scenario.settings.schedule.train_steps
    names = worker_names(scenario.num_workers + num_lent)[scenario.num_workers :]
    kinds = (FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS, FaultKind.LOST_PREFETCH, FaultKind.SLOW_LOAD)
    faults = [
        Fault(
            kind=rng.choice(kinds),
            executor=rng.choice(names),
            at_s=rng.random() * expected_s,
            nth=rng.randint(1, loads),
            seconds=rng.random() * expected_s / 10,
        )
        for _ in range(rng.choice((0, 0, 1, 2)))
    ]
    return replace(
        scenario,
        settings=changed(scenario.settings, lend=True),
        num_lent=num_lent,
        wake_s=rng.choice((0.0, 0.3, 2.0)),
        sleep_s=rng.choice((0.0, 0.1, 1.0)),
        faults=(*scenario.faults, *faults),
    )


def _with_filter(scenario: Scenario) -> Scenario:
    """Dynamic sampling in a third of the scenarios: a half of the groups of two have equal rewards."""
    if random.Random(f"filter {scenario.seed}").random() < 2 / 3:
        return scenario
    settings = changed(scenario.settings, filter_groups=True, max_num_gen_batches=1000)
    return replace(scenario, settings=settings)


def _with_turns(scenario: Scenario, *, is_certain: bool) -> Scenario:
    """Several turns in a third of the scenarios; some tools fail, others hang."""
    rng = random.Random(f"turns {scenario.seed}")
    if rng.random() < 2 / 3 and not is_certain:
        return scenario
    return replace(
        scenario,
        settings=changed(scenario.settings, hold_slots=rng.random() < 0.5),
        max_turns=rng.choice((2, 3, 8)),
        tool_s=rng.choice((0.0, 0.05, 0.5, 3.0)),
        failing_tools=rng.choice((0.0, 0.0, 0.1)),
        hanging_tools=rng.choice((0.0, 0.0, 0.05)),
    )


def _with_scorer(scenario: Scenario, expected_s: float, *, is_certain: bool) -> Scenario:
    """Scorers in a quarter of the scenarios in which they can have resources of their own: some that always
    wait, some that keep up, some that all wait for. In half of these one dies or hangs, once or as often as
    restarts are allowed."""
    rng = random.Random(f"scorer {scenario.seed}")
    if (rng.random() < 3 / 4 and not is_certain) or scenario.mode == "colocate":
        return scenario
    step_groups = scenario.settings.schedule.step_groups
    scorers = tuple(rng.sample((REF, PROX, REWARD), rng.choice((1, 1, 2, 3))))
    mortal = rng.choice(scorers)
    most = max(1, scenario.settings.profile.rollout.max_restarts)
    num_faults = rng.randint(1, most) if rng.random() < 0.5 else 0
    kinds = (FaultKind.WORKER_DIES, FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS)
    faults = [
        Fault(kind=rng.choice(kinds), executor=mortal, at_s=rng.random() * expected_s)
        for _ in range(num_faults)
    ]
    train_s = scenario.train_s
    costs = {
        "group_score_s": rng.choice((0.0, 0.5 * train_s, train_s, 2 * train_s + 0.5)) / step_groups,
        "judge_s": random.Random(f"judge {scenario.seed}").choice((0.0, 0.05, 0.5)),
    }
    faults = [*scenario.faults, *faults]
    return _with_critic(replace(scenario, scorers=scorers, faults=tuple(faults), **costs), expected_s)


def _with_critic(scenario: Scenario, expected_s: float) -> Scenario:
    """A critic beside a third of them, whose faults end the run, as a trainer's."""
    rng = random.Random(f"critic {scenario.seed}")
    if rng.random() < 2 / 3:
        return scenario
    kind = rng.choice((FaultKind.WORKER_DIES, FaultKind.WORKER_HANGS))
    faults = [Fault(kind=kind, executor=CRITIC, at_s=rng.random() * expected_s)] if rng.random() < 0.2 else []
    learn_s = rng.choice((0.0, 0.5, 2.0)) * scenario.train_s
    return replace(
        scenario, scorers=(*scenario.scorers, CRITIC), learn_s=learn_s, faults=(*scenario.faults, *faults)
    )


def _with_placement(scenario: Scenario) -> Scenario:
    """Response by response in two thirds of the scenarios; in some of these a group is larger than what one
    worker holds."""
    rng = random.Random(f"placement {scenario.seed}")
    placement = rng.choice(("response", "response", "group"))
    n, slots = scenario.settings.profile.rollout.n, scenario.slots
    if placement == "response" and rng.random() < 0.5:
        n = rng.randint(2, 8)
        slots = rng.randint(-(-n // scenario.num_workers), n + 2)
    return replace(scenario, settings=changed(scenario.settings, placement=placement, n=n), slots=slots)


def _with_restarts(scenario: Scenario, expected_s: float) -> Scenario:
    """Workers may be restarted in a third of the scenarios, and then there is some reason for it."""
    rng = random.Random(f"restarts {scenario.seed}")
    if rng.random() < 2 / 3:
        return scenario
    settings = changed(scenario.settings, max_restarts=rng.randint(1, 3))
    faults = draw_worker_faults(
        rng,
        workers=worker_names(scenario.num_workers),
        at_most=settings.profile.rollout.max_restarts,
        until_s=expected_s,
        loads=settings.schedule.train_steps // settings.schedule.window_steps,
    )
    restart_s = rng.choice((0.0, 1.0, 20.0))
    few = random.Random(f"away {scenario.seed}")
    if not settings.profile.placement.colocate and few.random() < 0.5:
        names = worker_names(scenario.num_workers)
        least = max(few.randint(1, scenario.num_workers), scenario.least_workers)
        settings = changed(settings, min_workers=least)
        faults += draw_lack_of_room(few, workers=names, at_most=3) if least < scenario.num_workers else []
    return replace(scenario, settings=settings, faults=(*scenario.faults, *faults), restart_s=restart_s)


def _draw_settings(rng: random.Random, mode: str) -> LoopSettings:
    eta = Fraction(mode == "one-step-off")
    if mode in ("stale-samples", "partial-rollout"):
        eta = Fraction(rng.choice(("1/4", "1/2", "1", "2", "3")))
    step_groups = rng.randint(1, 3) * rng.choice((1, 1, 2))
    has_steps = {"on-policy-pipeline": 1, "one-step-off": 1, "stream-off-policy": rng.randint(2, 4)}
    policies = ("wait", "wait", "wait", "accept", "drop", "requeue")
    on_stale = rng.choice(policies) if eta else "wait"
    return loop_settings(
        seed=rng.randrange(2**31),
        step_groups=step_groups,
        window_steps=has_steps.get(mode, rng.randint(1, 4)),
        train_steps=rng.randint(3, min(20, 48 // step_groups)),
        eta=eta,
        max_staleness=-(-eta.numerator // eta.denominator) + (rng.choice((0, 0, 0, 1, 2)) if eta else 0),
        n=rng.randint(2, 4),
        colocate=mode == "colocate",
        interrupt=rng.choice(("keep-kv", "recompute-kv")) if mode == "partial-rollout" else "drain",
        on_stale=on_stale,
        max_requeues=rng.randint(0, 2),
        on_exhausted=rng.choice(("drop", "drop", "fail")),
        prefetch_groups=rng.choice((0, 0, 1, 2)),
        max_failed_ratio=0.95,
        checkpoint_every_steps=rng.choice((0, 1, 3)),
        eval_every_versions=rng.choice((0, 1, 2)),
        eval_timeout_s=rng.choice((0.5, 60.0)),
    )


def _draw_weights_mode(seed: int) -> Literal["async", "sync"]:
    """From a generator of its own: what is drawn beside it stays as it is."""
    return random.Random(f"weights {seed}").choice(("async", "async", "sync"))


def _draw_mixed_versions(seed: int) -> dict[str, str]:
    """What becomes of trajectories that cross an update: trained in 2 of 5 scenarios."""
    drawn = random.Random(f"mixed {seed}").choice(("train", "train", "reject", "requeue", "restart"))
    return {"interrupt": drawn} if drawn == "restart" else {"mixed_versions": drawn}


def _draw_faults(
    rng: random.Random, settings: LoopSettings, num_workers: int, expected_s: float
) -> tuple[Fault, ...]:
    """None in half of the scenarios."""
    if rng.random() < 0.5:
        return ()
    drawn = draw_faults(
        rng.randrange(2**31),
        workers=worker_names(num_workers),
        until_s=expected_s,
        loads=settings.schedule.train_steps // settings.schedule.window_steps,
        groups=settings.schedule.groups // num_workers,
        steps=settings.schedule.train_steps,
    )
    return tuple(drawn.pending)


def worker_names(num_workers: int) -> list[str]:
    return [f"rollout-{i}" for i in range(num_workers)]

"""The event-driven engine against decoding token by token."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from fractions import Fraction

import pytest

from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.simulate.sequences import CacheSize, SimulatedSequence, ToolWait
from asyncrl_cli.simulate.simulated_engine import SimulatedEngine
from asyncrl_cli.simulate.workload import Decoding
from asyncrl_cli.simulate.world import run_virtual
from tests.simulate.token_by_token import Seq, TokenByToken

SLOTS = 4
BLOCK_TOKENS = 3
LONGEST = 50
PLAIN = dict(step=Fraction(1), per_sequence=Fraction(0), prefill=Fraction(0), speed=Fraction(1))
PLAIN |= dict(blocks=None, block_size=16, hold=True)


def drawn_case(seed):
    """Times in fractions, and what happens from outside: joins, aborts, loads (frozen, recomputed, drained),
    slow stretches."""
    rng = random.Random(seed)
    costs = {
        "step": Fraction(rng.randint(5, 30), 100),
        "per_sequence": Fraction(rng.randint(0, 10), 100),
        "prefill": Fraction(rng.choice([0, 0, 1, 3]), 100),
        "speed": Fraction(rng.randint(8, 12), 10),
        "blocks": rng.choice([None, LONGEST // BLOCK_TOKENS + 1, 22, 30]),
        "block_size": BLOCK_TOKENS,
        "hold": rng.random() < 0.5,
    }
    has_turns = rng.random() < 0.6
    actions, names, version, now = [], 0, 0, Fraction(0)
    while len(actions) < 22:
        now += Fraction(rng.randint(1, 40_000), 10_007)
        what = rng.choice(["submit", "submit", "submit", "abort", "load", "load", "drain", "slow_down"])
        if what == "submit":
            prompt, which = rng.randint(0, LONGEST - 40), rng.choice([None, names])
            group = []
            for i in range(rng.randint(1, 3)):
                tokens, calls = rng.randint(1, 12 if has_turns else 40), drawn_calls(rng) if has_turns else []
                group.append((names + i, prompt, tokens, which, calls))
            names += len(group)
            actions.append((now, "submit", (group,)))
        elif what == "abort" and names:
            actions.append((now, "abort", (rng.sample(range(names), min(names, 2)),)))
        elif what == "slow_down":
            actions.append((now, "slow_down", (Fraction(rng.choice([10, 12, 15]), 10),)))
        elif what in ("load", "drain"):
            if what == "drain":
                actions.append((now, "drain", ()))
                now += Fraction(rng.randint(1, 90_000), 10_007)
            version += 1
            actions.append((now, "freeze", ()))
            now += Fraction(rng.randint(0, 20_000), 10_007)
            actions.append((now, "thaw", (version, rng.random() < 0.4)))
    return costs, actions


def drawn_calls(rng):
    """Up to two calls of tools; all tokens together stay within LONGEST."""
    num_calls = rng.choice((0, 1, 2, 2))
    return [
        (Fraction(rng.randint(1, 50_000), 10_009), rng.randint(0, 2), rng.randint(1, 12))
        for _ in range(num_calls)
    ]


def in_the_engine(costs, actions):
    """The same actions on the engine: (ends, tokens per version, tokens of aborted ones, drained at,
    report)."""

    async def main():
        loop = asyncio.get_running_loop()
        meter = RolloutMeter("rollout-0", SLOTS, loop.time, lambda: None)
        step_s, per_sequence_s, prefill_s = (
            float(costs[name]) for name in ("step", "per_sequence", "prefill")
        )
        times = Decoding(step_s=step_s, step_s_per_sequence=per_sequence_s, prefill_s_per_token=prefill_s)
        cache = CacheSize(costs["blocks"] or float("inf"), costs["block_size"])
        engine = SimulatedEngine(
            SLOTS,
            times,
            speed=float(costs["speed"]),
            version=0,
            cache=cache,
            hold_slots=costs["hold"],
            on_running=meter.running,
        )
        sequences, ends, drained_at = {}, {}, []

        def on_turn(sequence):
            loop.call_later(sequence.calls[sequence.num_calls].seconds, tool_ended, sequence)

        def tool_ended(sequence):
            if not sequence.is_aborted:
                engine.continue_after_tool(sequence)

        def submit(group):
            for name, prompt_tokens, tokens, prompt, *calls in group:
                on_end = functools.partial(lambda name, _: ends.__setitem__(name, loop.time()), name)
                tools = [
                    ToolWait(float(seconds), results, more)
                    for seconds, results, more in (calls[0] if calls else ())
                ]
                sequences[name] = SimulatedSequence(
                    prompt_tokens, tokens, on_end, prompt=prompt, calls=tools, on_turn=on_turn
                )
            engine.submit([sequences[name] for name, *_ in group])

        def drain():
            engine.drained().add_done_callback(lambda future: drained_at.append(loop.time()))

        calls = {
            "submit": submit,
            "abort": lambda names: engine.abort([sequences[name] for name in names]),
            "freeze": engine.freeze,
            "thaw": lambda version, recompute: engine.thaw(version, recompute=recompute),
            "slow_down": lambda slowdown: engine.slow_down(float(slowdown)),
            "drain": drain,
        }
        for time, method, arguments in actions:
            loop.call_at(float(time), calls[method], *arguments)
        await asyncio.sleep(float(actions[-1][0]) + 1000)
        spans = {name: engine.version_tokens(sequence) for name, sequence in sequences.items()}
        sampled_tokens, decode_steps, _ = engine.counters()
        report = meter.report(
            version=engine.version, sampled_tokens=sampled_tokens, decode_steps=decode_steps, running_tokens=0
        )
        assert engine.counters()[2] == pytest.approx(0, abs=1e-9), "nothing is left"
        return ends, spans, drained_at, report, engine.preemptions

    return run_virtual(main())


@pytest.mark.slow
def test_it_agrees_with_decoding_token_by_token():
    happened = Counter()
    for seed in range(60):
        costs, actions = drawn_case(seed)
        reference = TokenByToken(SLOTS, **costs, version=0)
        plain = []
        for time, method, arguments in actions:
            if method == "submit":
                arguments = ([Seq(*given, calls=[*calls]) for *given, calls in arguments[0]],)
            plain.append((time, method, arguments))
        reference.run(plain)
        ends, spans, drained_at, report, preemptions = in_the_engine(costs, actions)
        seen = reference.seen
        ended = {name: float(one.ended_at) for name, one in seen.items() if one.ended_at is not None}
        assert ends == pytest.approx(ended, abs=1e-9, rel=0), seed
        assert spans == {name: tuple(sorted(Counter(one.versions).items())) for name, one in seen.items()}, (
            seed
        )
        assert preemptions == reference.preemptions, seed
        after_s = report.now_s - float(reference.now)
        sums = {
            "running_sequence_s": float(reference.running_sequence_s),
            "sampled_tokens": float(reference.sampled),
            "idle_s": float(reference.idle_s) + after_s,
        }
        found = {name: report.sums[name] for name in sums}
        assert found == pytest.approx(sums, abs=1e-9, rel=1e-12), seed
        if reference.drained_at is not None:
            assert drained_at[-1] == pytest.approx(float(reference.drained_at), abs=1e-9, rel=0), seed
        for one in seen.values():
            happened["cut"] += one.aborted and bool(one.versions)
            happened["crossed loads"] += len(set(one.versions)) > 2
            happened["made turns that ended"] += bool(one.results) and one.ended_at is not None
            happened["shared a prompt"] += one.of_prompt is not None
        happened["drained"] += len(drained_at)
        happened["preempted"] += preemptions
    assert min(happened.values()) > 15, f"a case that never happens proves nothing: {happened}"


def test_contexts_that_grow_make_later_steps_longer():
    # token j of a sequence is sampled with its prompt and j - 1/2 tokens, on average, in the cache
    step_s, per_sequence_s, per_token_s = 0.01, 0.002, 0.0001
    given = [(40, 7), (0, 30), (100, 30), (13, 90)]

    async def main():
        loop, ended = asyncio.get_running_loop(), {}
        times = Decoding(
            step_s=step_s, step_s_per_sequence=per_sequence_s, step_s_per_context_token=per_token_s
        )
        engine = SimulatedEngine(4, times)
        engine.submit(
            SimulatedSequence(prompt, tokens, lambda one: ended.setdefault(one.tokens, loop.time()))
            for prompt, tokens in given
        )
        for pause_s in (0.13, 0.4, 0.001):  # timed anew in the middle of a step, it ends as before
            await asyncio.sleep(pause_s)
            engine.slow_down(1.0)
        await asyncio.sleep(100)
        return ended

    expected, now_s = {}, 0.0
    for token in range(1, 91):
        running = [(prompt, tokens) for prompt, tokens in given if tokens >= token]
        context = sum(prompt + token - 0.5 for prompt, _ in running)
        now_s += step_s + per_sequence_s * len(running) + per_token_s * context
        expected |= {tokens: now_s for _, tokens in running if tokens == token}
    assert run_virtual(main()) == pytest.approx(expected)


def test_a_batch_reads_as_many_experts_as_its_tokens_choose():
    rng = random.Random(0)
    times = Decoding(step_s=1.0, step_s_per_sequence=0.0, experts_s=10.0, expert_ratio=8 / 128)
    for batch in (1, 4, 16, 64):
        chosen = [
            len(set().union(*(rng.sample(range(128), 8) for _ in range(batch)))) / 128 for _ in range(100)
        ]
        assert times.batch_step_s(batch) == pytest.approx(1 + 10 * sum(chosen) / 100, rel=0.03)


def test_the_worked_example_of_the_docstring():
    load = [(Fraction(5, 2), "freeze", ()), (Fraction(4), "thaw", (3, False))]
    ends, spans, *_ = in_the_engine(PLAIN, [(Fraction(0), "submit", ([(0, 0, 5, None)],)), *load])
    assert ends == {0: 6.5}
    assert spans == {0: ((0, 2), (3, 3))}


def test_the_newest_is_preempted_and_begins_again_with_its_tokens():
    costs = PLAIN | {"blocks": 3, "block_size": 2}
    ends, spans, *_, preemptions = in_the_engine(
        costs, [(Fraction(0), "submit", ([(0, 0, 5, None), (1, 0, 5, None)],))]
    )
    assert ends == {0: 5, 1: 7}
    assert spans == {0: ((0, 5),), 1: ((0, 5),)}
    assert preemptions == 1


def test_a_preempted_sequence_is_computed_again_and_others_wait_behind_it():
    # At 5 s both want a third block of the 4: the second is preempted with 5 tokens, which need 3 blocks. The
    # third needs only 1.
    costs = PLAIN | {"prefill": Fraction(1, 10), "blocks": 4, "block_size": 2}
    first, late = [(0, 0, 6, None), (1, 0, 8, None)], [(2, 1, 2, None)]
    ends, *_ = in_the_engine(costs, [(Fraction(0), "submit", (first,)), (Fraction(9, 2), "submit", (late,))])
    assert ends == {0: 6, 2: pytest.approx(6 + 0.5 + 0.1 + 2), 1: pytest.approx(6 + 0.5 + 0.1 + 3)}


def test_the_responses_to_a_prompt_share_its_full_blocks():
    # 5 prompt tokens in blocks of 2: 2 blocks are shared, 1 is each one's own. With 5 blocks all three run,
    # and 4 tokens are computed once.
    costs = PLAIN | {"prefill": Fraction(1), "blocks": 5, "block_size": 2}
    group = [(name, 5, 1, 0) for name in range(3)]
    ends, *_ = in_the_engine(costs, [(Fraction(0), "submit", (group,))])
    assert ends == dict.fromkeys(range(3), 5 + 1 + 1 + 1)
    strangers = [(name, prompt_tokens, tokens, None) for name, prompt_tokens, tokens, _ in group]
    ends, *_ = in_the_engine(costs, [(Fraction(0), "submit", (strangers,))])
    assert ends == {0: 6, 1: 12, 2: 18}


def test_a_slot_goes_to_whoever_has_waited_longest_and_the_engine_has_one_timer():
    async def main():
        loop, ended, timers = asyncio.get_running_loop(), [], []
        call_at = loop.call_at
        loop.call_at = lambda *timer, **context: timers.append(timer) or call_at(*timer, **context)
        engine = SimulatedEngine(2, Decoding(step_s=1.0, step_s_per_sequence=0.0))
        lengths = [5, 1, 3, 9, 2]
        engine.submit(
            SimulatedSequence(0, tokens, lambda _, i=i: ended.append(i)) for i, tokens in enumerate(lengths)
        )
        await asyncio.sleep(100)
        return ended, len(timers)

    # Slots: 0 until 5 and 1 until 1, then 2 until 4, then 3 until 13; 4 gets the slot of 0 and has it until
    # 7.
    ended, timer_events = run_virtual(main())
    assert ended == [1, 2, 0, 4, 3]
    assert timer_events == 5 + 1

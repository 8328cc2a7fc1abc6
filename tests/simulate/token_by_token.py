"""Continuous batching token by token, in exact fractions: slow, plain, and written apart from the engine that
it judges.

Every running sequence has a phase, the finished part of its next token. All phases grow by 1 per decode step,
whose length depends on how many run. Whatever happens next (a token, the end of a prefill, a change from
outside) is found by looking at everybody.

A block of the cache is named by what is in it: ("prompt", which, number) for a full block of a prompt, the
same for all its responses, or ("own", sequence, number). What is in use is the union of what the running
sequences need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class Seq:
    name: int
    prompt: int
    tokens: int
    of_prompt: int | None = None
    phase: Fraction = Fraction(0)
    versions: list[int] = field(default_factory=list)
    ended_at: Fraction | None = None
    aborted: bool = False
    begun: bool = False
    calls: list = field(default_factory=list)
    results: int = 0

    @property
    def total(self):
        return self.prompt + self.results + len(self.versions)

    def blocks(self, size):
        tokens, shared = self.total, 0
        names = set()
        # the last token of a prompt is never shared
        while self.of_prompt is not None and (shared + 1) * size < self.prompt:
            names.add(("prompt", self.of_prompt, shared))
            shared += 1
        own, number = tokens - shared * size, 0
        while own > 0:
            names.add(("own", self.name, number))
            own, number = own - size, number + 1
        return names


class TokenByToken:
    def __init__(
        self, slots, step, per_sequence, prefill, speed, version, blocks=None, block_size=16, hold=True
    ):
        self.blocks, self.block_size, self.preemptions = blocks, block_size, 0
        self.slots, self.prefill, self.speed = slots, prefill, speed
        self.step, self.per_sequence = step, per_sequence
        self.version, self.slowdown = version, Fraction(1)
        self.now, self.prefill_left = Fraction(0), Fraction(0)
        self.frozen = self.closed = False
        self.waiting, self.running, self.seen = [], [], {}
        self.hold, self.going_on, self.at_tools, self.parked = hold, [], {}, {}
        self.running_sequence_s = self.idle_s = self.sampled = Fraction(0)
        self.drained_at = None
        self.is_draining = False

    def run(self, actions):
        """`actions`: (time, method, arguments), ascending in time."""
        for time, method, arguments in actions:
            self.go_on(until=time)
            getattr(self, method)(*arguments)
            self.fill()
        self.go_on(until=None)

    def submit(self, sequences):
        for sequence in sequences:
            self.seen[sequence.name] = sequence
            self.waiting.append(sequence)

    def abort(self, names):
        for name in names:
            sequence = self.seen[name]
            if sequence.ended_at is None and not sequence.aborted:
                sequence.aborted = True
                self.take_parked()
                for where in (self.waiting, self.going_on, self.running):
                    if sequence in where:
                        where.remove(sequence)
                for where in (self.at_tools, self.parked):
                    where.pop(name, None)
        self.fill()

    def freeze(self):
        self.frozen = True

    def thaw(self, version, recompute):
        self.version, self.frozen, self.closed = version, False, False
        if recompute:
            self.prefill_left = Fraction(0)
            self.parked.clear()
            running, self.running = self.running, []
            for sequence in running:
                self.compute(sequence)
                self.running.append(sequence)

    def slow_down(self, slowdown):
        self.slowdown = slowdown

    def drain(self):
        self.closed = self.is_draining = True
        self.fill()

    def fill(self):
        if not self.running:
            self.prefill_left = Fraction(0)
        while queue := self.going_on or self.waiting:
            first = queue[0]
            held = len(self.at_tools) if self.hold and not first.begun else 0
            is_shut_out = self.closed and not first.begun
            if is_shut_out or len(self.running) + held >= self.slots:
                break
            if self.lacks(self.in_use() | first.blocks(self.block_size)):
                break
            queue.pop(0)
            self.take_parked()
            self.compute(first)
            self.parked.pop(first.name, None)
            self.running.append(first)
            self.take_parked()
            first.begun = True
        if self.is_draining and not self.running and not self.at_tools:
            self.drained_at, self.is_draining = self.now, False

    def compute(self, sequence):
        """Prefill what is not there."""
        if sequence.name in self.parked:
            self.prefill_left += (sequence.total - self.parked[sequence.name]) * self.prefill
            return
        there = {name for name in sequence.blocks(self.block_size) if name[0] == "prompt"} & self.in_use()
        self.prefill_left += (sequence.total - len(there) * self.block_size) * self.prefill

    def in_use(self):
        return set().union(*(sequence.blocks(self.block_size) for sequence in self.running))

    def lacks(self, blocks):
        return self.blocks is not None and len(blocks) > self.blocks

    def preempt(self):
        while self.lacks(self.in_use()):
            self.take_parked()
            victim = self.running.pop()
            victim.phase = Fraction(0)
            self.going_on.insert(0, victim)
            self.preemptions += 1

    def take_parked(self):
        """Blocks that running sequences need are taken from whoever has been at a tool for longest, all of
        its blocks at once."""
        size = self.block_size
        while self.parked and self.lacks(
            range(len(self.in_use()) + sum(-(-tokens // size) for tokens in self.parked.values()))
        ):
            self.parked.pop(next(iter(self.parked)))

    def tools_end(self):
        for name in [name for name, ends in self.at_tools.items() if ends == self.now]:
            del self.at_tools[name]
            sequence = self.seen[name]
            _, results, tokens = sequence.calls.pop(0)
            sequence.results += results
            sequence.tokens += tokens
            self.going_on.append(sequence)
            self.fill()

    def go_on(self, until):
        while until is None or self.now < until:
            pace = self.speed * self.slowdown
            step = (self.step + self.per_sequence * len(self.running)) * pace
            is_still = self.frozen or not self.running
            times = [*self.at_tools.values(), *([] if until is None else [until])]
            if not is_still:
                times.append(
                    self.now + (self.prefill_left * pace or min(1 - s.phase for s in self.running) * step)
                )
            if not times:
                return
            self.pass_time(min(times) - self.now, pace, step, is_still)
            self.tools_end()

    def pass_time(self, elapsed, pace, step, is_still):
        self.now += elapsed
        self.running_sequence_s += elapsed * len(self.running)
        self.idle_s += 0 if self.running else elapsed
        if is_still:
            return
        if self.prefill_left:
            self.prefill_left -= elapsed / pace
            return
        for sequence in list(self.running):
            sequence.phase += elapsed / step
            self.sampled += elapsed / step
            if sequence.phase == 1:
                sequence.phase = Fraction(0)
                sequence.versions.append(self.version)
        for sequence in [sequence for sequence in self.running if len(sequence.versions) == sequence.tokens]:
            self.take_parked()
            self.running.remove(sequence)
            if sequence.calls:
                self.at_tools[sequence.name] = self.now + sequence.calls[0][0]
                self.parked[sequence.name] = sequence.total
            else:
                sequence.ended_at = self.now
        self.preempt()
        self.fill()

"""Continuous batching token by token, in exact fractions: slow, plain, and written apart from the engine that it judges.

Every running sequence has a phase, the finished part of its next token. All phases grow by 1 per decode step, whose length depends
on how many run. Whatever happens next (a token, the end of a prefill, a change from outside) is found by looking at everybody.

A block of the cache is named by what is in it: ("prompt", which, number) for a full block of a prompt, the same for all its
responses, or ("own", sequence, number). What is in use is the union of what the running sequences need.
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

    def blocks(self, size):
        tokens, shared = self.prompt + len(self.versions), 0
        names = set()
        while self.of_prompt is not None and (shared + 1) * size < self.prompt:  # the last token of a prompt is never shared
            names.add(("prompt", self.of_prompt, shared))
            shared += 1
        own, number = tokens - shared * size, 0
        while own > 0:
            names.add(("own", self.name, number))
            own, number = own - size, number + 1
        return names


class TokenByToken:
    def __init__(self, slots, step, per_sequence, prefill, speed, version, blocks=None, block_size=16):
        self.blocks, self.block_size, self.preemptions = blocks, block_size, 0
        self.slots, self.step, self.per_sequence, self.prefill, self.speed = slots, step, per_sequence, prefill, speed
        self.version, self.slowdown = version, Fraction(1)
        self.now, self.prefill_left = Fraction(0), Fraction(0)
        self.frozen = self.closed = False
        self.waiting, self.running, self.seen = [], [], {}
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
                for where in (self.waiting, self.running):
                    if sequence in where:
                        where.remove(sequence)
        self.fill()

    def freeze(self):
        self.frozen = True

    def thaw(self, version, recompute):
        self.version, self.frozen, self.closed = version, False, False
        if recompute:
            self.prefill_left = Fraction(0)
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
        while self.waiting and len(self.running) < self.slots and not (self.closed and not self.waiting[0].begun):
            if self.lacks(self.in_use() | self.waiting[0].blocks(self.block_size)):
                break
            sequence = self.waiting.pop(0)
            self.compute(sequence)
            self.running.append(sequence)
            sequence.begun = True
        if self.is_draining and not self.running:
            self.drained_at, self.is_draining = self.now, False

    def compute(self, sequence):
        """Prefill what is not there."""
        tokens = sequence.prompt + len(sequence.versions)
        there = {name for name in sequence.blocks(self.block_size) if name[0] == "prompt"} & self.in_use()
        self.prefill_left += (tokens - len(there) * self.block_size) * self.prefill

    def in_use(self):
        return set().union(*(sequence.blocks(self.block_size) for sequence in self.running))

    def lacks(self, blocks):
        return self.blocks is not None and len(blocks) > self.blocks

    def preempt(self):
        while self.lacks(self.in_use()):
            victim = self.running.pop()
            victim.phase = Fraction(0)
            self.waiting.insert(0, victim)
            self.preemptions += 1

    def go_on(self, until):
        while until is None or self.now < until:
            pace = self.speed * self.slowdown
            step = (self.step + self.per_sequence * len(self.running)) * pace
            is_still = self.frozen or not self.running
            if is_still and until is None:
                return
            next_at = until
            if not is_still:
                needed = self.prefill_left * pace or min(1 - s.phase for s in self.running) * step
                next_at = self.now + needed if until is None else min(until, self.now + needed)
            self.pass_time(next_at - self.now, pace, step, is_still)

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
                if len(sequence.versions) == sequence.tokens:
                    sequence.ended_at = self.now
                    self.running.remove(sequence)
        self.preempt()
        self.fill()

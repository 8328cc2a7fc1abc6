"""A version on its way from rank 0 to the workers: what carries it, how long each waits, and the probes that verify it.

    rank 0   begin(version) -> put(bucket) -> ref ... -> finish(manifest)     a Sender; `keep` ends older versions
    driver   carries (manifest, refs) to every worker
    worker   ref -> bucket ..., and `buckets.verified` compares fingerprints

`object-store` lives in job/transports.py (its refs are Ray's), `disk` in disk.py, `nccl` and `ipc` in held.py. This module
imports no torch, for the driver uses it, too.

The waits of `nccl` and `ipc` are bounded. Each wait is longer than those inside it: the innermost fails first, and its
error is the most precise.

    rank 0     a meeting, a transfer: T = `weights.timeout_s`.  a turn: T for each worker of the job
    worker     a meeting, a transfer by nccl: T + WORKER_MARGIN_S, by ipc: T.  a call to rank 0's actor: rank 0's + CALL_MARGIN_S
    driver     a meeting: T + DRIVER_MARGIN_S.  a load: a turn + T + DRIVER_MARGIN_S, after a drain, however long that takes
    loop       until all have loaded: a load + LOOP_MARGIN_S in which nothing has moved

A part of a transfer by ipc has no bound at rank 0: there it is a copy to the GPU, which waits for nobody.

Probes are fixed token sequences that trainer and workers score with the same weights. Fingerprints say that the bytes arrived;
only logprobs say that the engine computes with them (an engine may hold prepacked or tied copies that a load does not reach).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, PROBE_TOKENS, WeightsSection

if TYPE_CHECKING:
    from asyncrl_cli.weights.buckets import Bucket

TIMEOUT_KEY = "weights.timeout_s"
AT_ONCE_S = 10.0
"""For what rank 0 answers at once, whatever else it does: an address, a worker's leave."""
WORKER_MARGIN_S = 10.0
"""Time for rank 0's own error to arrive. If none has come by then, it is rank 0 that does not answer."""
CALL_MARGIN_S = 20.0
"""Longer than WORKER_MARGIN_S: the worker waits for both ends, so it reports a late meeting or transfer first."""
DRIVER_MARGIN_S = 60.0
"""An address, the worker's margin, the pause; and when a transfer has failed, to tell rank 0 and to end vLLM's processes."""
LOOP_MARGIN_S = 60.0
"""Until the worker has been told of the version and begins to load it."""
ERRORS = 5.0
"""How many standard errors a verdict needs: the noise of neighbouring tokens is alike, and a run has many syncs."""
OUTLIER = 5.0
"""A token that has changed by more than so many medians is left out: the trainer chose another expert for it, say."""
SLACK = 0.05
"""How far from 1 the share of a loaded version may be, beside what noise explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a version must look like on arrival.

    `fingerprints` are the buckets', in order. `probe_logprobs[i]` are the trainer's logprobs (at `temperature`) of
    tokens 1.. of `probe_tokens[i]`, made with these very weights; `previous_logprobs[i]` with those of the version before, if there
    is one.
    """

    version: int
    num_bytes: int
    fingerprints: tuple[int, ...]
    temperature: float
    probe_tokens: tuple[tuple[int, ...], ...] = ()
    probe_logprobs: tuple[tuple[float, ...], ...] = ()
    previous_logprobs: tuple[tuple[float, ...], ...] = ()


class Sender(Protocol):
    """Rank 0's end. One version at a time, one call at a time, in any thread."""

    def begin(self, version: int, num_buckets: int) -> None:
        """Forgets a version that was not finished."""

    def put(self, bucket: Bucket) -> Any:
        """What a worker gets this bucket by, once the version is finished. In the order of the layout."""

    def finish(self, manifest: Manifest) -> None:
        """All buckets of the version are put."""

    def keep(self, wanted: Collection[int]) -> None:
        """No worker can want another version any more: let go of all others."""


def send(sender: Sender, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Any]:
    sender.begin(manifest.version, len(buckets))
    refs = [sender.put(bucket) for bucket in buckets]
    sender.finish(manifest)
    return refs


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where rank 0 and a worker's vLLM processes make their NCCL group, and the wire sizes that both ends must agree on."""

    host: str
    port: int
    world_size: int
    wire_bytes: int
    num_wires: int = 2


class RankZero(Protocol):
    """Rank 0, as one worker asks it in `nccl` and `ipc`. Every answer is bounded; what it raises says what rank 0 failed in."""

    async def meeting_point(self) -> tuple[str, int]: ...

    async def leave(self) -> None:
        """Whatever rank 0 does for this worker, or holds on its GPU for it, ends. Answered at once."""

    async def ask(self, call: str, *args: Any) -> Any:
        """A method of rank 0's end (`EngineKind.rank_zero_end`), for this worker."""

    async def join(self, meeting: Meeting) -> None:
        """`nccl`: make the group, as its rank 0; an older one of this worker is given up."""
        await self.ask("join", meeting)

    async def turn(self) -> None:
        """`nccl`: wait until rank 0 sends to no other worker; it then waits for this one's `broadcast`, or `leave`, for as long as
        a transfer may take."""
        await self.ask("turn")

    async def broadcast(self, version: int, names: Mapping[str, str]) -> None:
        """`nccl`: send these tensors (`AnnouncedWeights.chosen`) to the group, in the order of their layouts; returns when they are
        sent."""
        await self.ask("broadcast", version, names)

    async def export(self, version: int, names: Mapping[str, str], part: int) -> dict[str, Any] | None:
        """`ipc`: the next part of the version, as vLLM's update info; None when all parts were exported. Part 0 begins anew."""
        found: dict[str, Any] | None = await self.ask("export", version, names, part)
        return found


def turn_s(timeout_s: float, workers: int) -> float:
    """Each worker before it in the line may take as long as a transfer may."""
    return workers * timeout_s


def load_s(timeout_s: float, workers: int) -> float:
    """Of a load as the driver waits for it, after the drain."""
    return turn_s(timeout_s, workers) + timeout_s + DRIVER_MARGIN_S


def all_loads_s(weights: WeightsSection, workers: int) -> float:
    """Until every worker has loaded a version, as the loop waits for it, after the drain."""
    is_direct = weights.transport in DIRECT_TRANSPORTS
    return load_s(weights.timeout_s, workers) + LOOP_MARGIN_S if is_direct else weights.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`share`: how far a worker's probes have gone from the version before to the new one: 0 for nothing loaded, 1 for all of it.
    None where it says nothing (`unclear`)."""

    verdict: Literal["loaded", "not loaded", "unclear"]
    share: float | None


def make_probes(num_sequences: int, vocab_size: int, seed: int, length_tokens: int = PROBE_TOKENS) -> tuple[tuple[int, ...], ...]:
    """The same sequences for the same arguments, in every process; tokens uniform over the vocabulary."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(length_tokens)) for _ in range(num_sequences))


def mean_abs_diff(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens; infinite if any value is not finite, so that no alarm is missed."""
    diffs = [abs(difference) for difference in _differences(ours, theirs)]
    if not diffs:
        raise ValueError("there are no probe logprobs to compare")
    return math.fsum(diffs) / len(diffs) if all(math.isfinite(d) for d in diffs) else math.inf


def judge(worker: Sequence[Sequence[float]], new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]) -> Judgement:
    """Whether a worker computes with the new version or still with (some of) the old one; docs/weights.md has the reasons.

    The share is the least-squares slope of worker - old on new - old. What each token is off by when the share is found without
    it is the engines' numerical noise: with it the share of a loaded version may be as much lower as the square of noise to change.
    Its standard error is the one that holds for noise of any distribution (HC3: MacKinnon and White 1985).
    """
    both = list(zip(_differences(worker, old), _differences(new, old), strict=True))
    usual = OUTLIER * statistics.median(abs(change) for _, change in both)
    moved, change = zip(*((m, c) for m, c in both if not abs(c) > usual), strict=True)
    size = math.fsum(c * c for c in change)
    if max(c * c for c in change) == size:  # none, or of one token
        return Judgement(verdict="unclear", share=None)
    share = math.fsum(m * c for m, c in zip(moved, change, strict=True)) / size
    if not math.isfinite(share):  # `mean_abs_diff` finds what the worker or the new version has that is not
        return Judgement(verdict="unclear", share=None)
    off = [(m - share * c) / (1 - c * c / size) for m, c in zip(moved, change, strict=True)]
    noise = math.sqrt(math.fsum(e * e for e in off) / size)
    error = ERRORS * math.sqrt(math.fsum((e * c) ** 2 for e, c in zip(off, change, strict=True))) / size
    if abs(share - 1) > SLACK + noise**2 + error or share < 0.5 - error:
        return Judgement(verdict="not loaded", share=share)
    return Judgement(verdict="loaded", share=share) if share > 0.5 + error else Judgement(verdict="unclear", share=None)


def _differences(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        raise ValueError(f"probe logprobs differ in shape: {[len(r) for r in ours]} and {[len(r) for r in theirs]}")
    return [a - b for ra, rb in zip(ours, theirs, strict=True) for a, b in zip(ra, rb, strict=True)]

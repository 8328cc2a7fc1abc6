"""What trainer, driver and workers agree on: the description of a version, the calls that bring it from rank
0 to a worker, the time limits of the waits for it, its names on disk, and the probes that verify a load.

    rank 0   begin(version) -> put(bucket) -> ref ... -> finish(manifest)    a Sender; `keep` ends older ones
    driver   carries (manifest, refs) to every worker
    worker   ref -> bucket ..., and `receivers.verified` checks fingerprints

This module does not import torch, because the driver imports it. The Sender of `object-store` is in
job/rank_sending.py (its refs are Ray's), that of `directory` in directory_buckets.py, others in senders.py.

The waits of `nccl` and `ipc` are bounded. Each has a longer limit than the waits inside it, so the innermost
fails first, with the most precise error. T is `weights.timeout_s`.

    rank 0     a meeting, a transfer: T.  a turn: T for each worker of the job
    worker     a meeting, a transfer by nccl: T + WORKER_MARGIN_S, by ipc: T
               a call to rank 0's actor: rank 0's + CALL_MARGIN_S
    driver     a meeting: T + DRIVER_MARGIN_S
               a load: a turn + T + DRIVER_MARGIN_S, after a drain, however long that takes
    loop       until all have loaded: a load + LOOP_MARGIN_S in which nothing has moved

At rank 0, a part of a transfer by ipc has no limit: it is a copy to the GPU, which waits for no other
process.

Probes are fixed token sequences that trainer and workers score with the same weights. Fingerprints prove that
the bytes arrived. Only logprobs show that the engine computes with them: it may hold prepacked or tied copies
that a load does not update.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import xxhash

from asyncrl_cli.profile.rollout_sections import WeightsSection
from asyncrl_cli.profile.schema import DIRECT_TRANSPORTS, PROBE_TOKENS

if TYPE_CHECKING:  # it needs torch
    from asyncrl_cli.weights.buckets import Bucket

Ref = Any
"""With it a worker gets a bucket: a Ray ObjectRef, a BucketObject, or, with `nccl` and
`ipc`, only its layout. A DeltaRef has two: of the bucket, and of its delta (an ObjectRef or DeltaObject)."""
UpdateInfo = dict[str, object]
"""What vLLM's processes are told of a transfer, as plain values."""

VERSIONS = "versions"
"""Folder in a run's directory with its kept versions."""
MANIFEST, SCHEMA_VERSION = "manifest.json", 1
"""A version's own description in its directory (senders.py)."""
VERSION_NAME = re.compile(r"version-(\d{6,})")
TIMEOUT_KEY = "weights.timeout_s"
AT_ONCE_S = 10.0
"""Timeout of calls that rank 0 answers at once, even while it sends: for an address, and `leave`."""
WORKER_MARGIN_S = 10.0
"""Time for rank 0's own error to arrive. If none has arrived by then, rank 0 is not answering."""
CALL_MARGIN_S = 20.0
"""Longer than WORKER_MARGIN_S, so that the worker, which waits for both ends, is the first to report a late
meeting or transfer."""
DRIVER_MARGIN_S = 60.0
"""Covers getting an address, the worker's margin and the pause; after a failure, telling rank 0 and ending
vLLM's processes."""
LOOP_MARGIN_S = 60.0
"""Covers the time until the worker learns of the version and begins to load it."""
ERRORS = 5.0
"""Standard errors that a verdict needs. High, because neighbouring tokens' noise is correlated and a run has
many syncs."""
OUTLIER = 5.0
"""Tokens whose logprob changed by more than this many medians are left out: another expert may have processed
them, for example."""
SLACK = 0.05
"""How far the share of a loaded version may be from 1, beyond what noise explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """`probe_logprobs[i]` are the trainer's logprobs (at `temperature`) of tokens 1.. of `probe_tokens[i]`
    under these weights; `previous_logprobs[i]` those under the previous version, if any. They are in
    manifest.json, too: a reader that is not part of the run can verify its load."""

    temperature: float
    probe_tokens: tuple[tuple[int, ...], ...] = ()
    probe_logprobs: tuple[tuple[float, ...], ...] = ()
    previous_logprobs: tuple[tuple[float, ...], ...] = ()


NO_PROBES = Probes(temperature=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Probes):
    """Describes a version, so that workers can verify what they receive and load. `fingerprints`: of the
    buckets, in order; `of_tensors`: of all tensors, where the same ones may come in other buckets, or ""."""

    version: int
    num_bytes: int
    fingerprints: tuple[int, ...]
    of_tensors: str = ""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the whole version, in 16 hex digits."""
        buckets = b"".join(one.to_bytes(8, "big") for one in self.fingerprints)
        return self.of_tensors or xxhash.xxh3_64_hexdigest(buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where rank 0 and a worker's vLLM processes form their NCCL group, and the wire sizes on which both ends
    must agree."""

    host: str
    port: int
    world_size: int
    wire_bytes: int
    num_wires: int = 2


class Sender(Protocol):
    """Rank 0's end of a transport. Handles one version and one call at a time; calls may come from any
    thread."""

    def begin(self, version: int, num_buckets: int) -> None:
        """Start a version. Discards an unfinished one."""

    def put(self, bucket: Bucket) -> Ref:
        """Send a bucket, in the order of the layout. Returns a ref with which workers get it once the version
        is finished."""

    def finish(self, manifest: Manifest) -> None:
        """Complete the version after its last bucket."""

    def keep(self, wanted: Collection[int]) -> None:
        """Drop all versions except `wanted`: no worker will ask for any other."""


def joined_version(sent: Sequence[tuple[Manifest, Sequence[Ref]]]) -> tuple[Manifest, list[Ref]]:
    """A version, of what each rank has sent of it: a bucket of each rank in turn, so that a worker fetches
    from several nodes at a time."""
    turns = zip_longest(*(zip(manifest.fingerprints, refs, strict=True) for manifest, refs in sent))
    pairs = [pair for turn in turns for pair in turn if pair is not None]
    num_bytes = sum(manifest.num_bytes for manifest, _ in sent)
    fingerprints = tuple(fingerprint for fingerprint, _ in pairs)
    manifest = replace(sent[0][0], num_bytes=num_bytes, fingerprints=fingerprints)
    return manifest, [ref for _, ref in pairs]


def send(sender: Sender, manifest: Manifest, buckets: Sequence[Bucket]) -> list[Ref]:
    sender.begin(manifest.version, len(buckets))
    refs = [sender.put(bucket) for bucket in buckets]
    sender.finish(manifest)
    return refs


class RankZero(Protocol):
    """One worker's calls to rank 0, for `nccl` and `ipc`. Every call has a timeout, and its error says what
    rank 0 failed to do."""

    async def meeting_point(self) -> tuple[str, int]: ...

    async def leave(self) -> None:
        """End everything that rank 0 does for this worker, and free what rank 0's GPU holds for it. Answered
        at once."""

    async def ask(self, call: str, *args: object) -> Any:
        """Call a method of rank 0's end (`EngineKind.rank_zero_end`) for this worker."""

    async def join(self, meeting: Meeting) -> None:
        """`nccl`: form the group, in which the trainer's rank 0 is rank 0. Replaces an older group of this
        worker."""
        await self.ask("join", meeting)

    async def turn(self) -> None:
        """`nccl`: wait until rank 0 is not sending to another worker. Rank 0 then waits for this worker's
        `broadcast` or `leave`, for as long as a transfer may take."""
        await self.ask("turn")

    async def broadcast(self, version: int, names: Mapping[str, str]) -> None:
        """`nccl`: send these tensors (`AnnouncedWeights.chosen`) to the group, in the order of their layouts;
        returns once they are sent."""
        await self.ask("broadcast", version, names)

    async def export(self, version: int, names: Mapping[str, str], part: int) -> UpdateInfo | None:
        """`ipc`: the next part of the version, as vLLM's update info; None after the last part. Part 0 starts
        over."""
        info: UpdateInfo | None = await self.ask("export", version, names, part)
        return info


def turn_s(timeout_s: float, workers: int) -> float:
    """Longest wait for a turn: each worker before this one may take as long as a transfer may."""
    return workers * timeout_s


def load_s(timeout_s: float, workers: int) -> float:
    """How long the driver waits for one worker's load, after the drain."""
    return turn_s(timeout_s, workers) + timeout_s + DRIVER_MARGIN_S


def all_loads_s(weights: WeightsSection, workers: int) -> float:
    """How long the loop waits, after the drain, until every worker has loaded a version."""
    if weights.transport not in DIRECT_TRANSPORTS:
        return weights.timeout_s
    return load_s(weights.timeout_s, workers) + LOOP_MARGIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`share`: how far a worker's probe logprobs moved from the old version's to the new one's: 0 if nothing
    was loaded, 1 if everything was. None if the probes cannot tell (`unclear`)."""

    verdict: Literal["loaded", "not loaded", "unclear"]
    share: float | None


def file_fingerprint(content: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(content):016x}"


def version_name(version: int) -> str:
    return f"version-{version:06d}"


def version_directory(root: Path, version: int) -> Path:
    return root / version_name(version)


def kept_versions(root: Path) -> list[int]:
    """Versions on disk, ascending."""
    names = (entry.name for entry in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := VERSION_NAME.fullmatch(name)))


def make_probes(
    num_sequences: int,
    vocab_size: int,
    seed: int,
    length_tokens: int = PROBE_TOKENS,
    text: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Make probe sequences, which depend only on the arguments: consecutive pieces of `text`, which is
    repeated if it is too short. Without text, tokens are uniform over the vocabulary, where a model's logits
    are large and coarse in bfloat16."""
    if text:
        endless = cycle(text)
        return tuple(tuple(islice(endless, length_tokens)) for _ in range(num_sequences))
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(length_tokens)) for _ in range(num_sequences))


def mean_abs_diff(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens; infinite if any value is not finite, so that a NaN cannot
    pass a threshold."""
    diffs = [abs(difference) for difference in _differences(ours, theirs)]
    if not diffs:
        raise ValueError("there are no probe logprobs to compare")
    return math.fsum(diffs) / len(diffs) if all(math.isfinite(d) for d in diffs) else math.inf


def median_abs_diff(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Median absolute difference over all tokens; infinite if any value is not finite."""
    diffs = [abs(difference) for difference in _differences(ours, theirs)]
    return statistics.median(diffs) if all(map(math.isfinite, diffs)) else math.inf


def judge(
    worker: Sequence[Sequence[float]], new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]
) -> Judgement:
    """Whether a worker computes with the new version or still with (some of) the old one; docs/weights.md has
    the reasons.

    The share is the least-squares slope of worker - old on new - old. Each token's leave-one-out residual
    estimates the engines' numerical noise, which may lower the share of a loaded version by up to the squared
    ratio of noise to change. The slope's standard error is valid for noise of any distribution (HC3:
    MacKinnon and White 1985).
    """
    both = list(zip(_differences(worker, old), _differences(new, old), strict=True))
    usual = OUTLIER * statistics.median(abs(change) for _, change in both)
    moved, change = zip(*((m, c) for m, c in both if not abs(c) > usual), strict=True)
    size = math.fsum(c * c for c in change)
    if max(c * c for c in change) == size:  # no token changed, or only one
        return Judgement(verdict="unclear", share=None)
    share = math.fsum(m * c for m, c in zip(moved, change, strict=True)) / size
    # `mean_abs_diff` reports values of the worker or the new version that are not finite
    if not math.isfinite(share):
        return Judgement(verdict="unclear", share=None)
    off = [(m - share * c) / (1 - c * c / size) for m, c in zip(moved, change, strict=True)]
    noise = math.sqrt(math.fsum(e * e for e in off) / size)
    error = ERRORS * math.sqrt(math.fsum((e * c) ** 2 for e, c in zip(off, change, strict=True))) / size
    if abs(share - 1) > SLACK + noise**2 + error or share < 0.5 - error:
        return Judgement(verdict="not loaded", share=share)
    if share > 0.5 + error:
        return Judgement(verdict="loaded", share=share)
    return Judgement(verdict="unclear", share=None)


def _differences(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        shapes = f"{[len(row) for row in ours]} and {[len(row) for row in theirs]}"
        raise ValueError(f"probe logprobs differ in shape: {shapes}")
    return [a - b for ra, rb in zip(ours, theirs, strict=True) for a, b in zip(ra, rb, strict=True)]

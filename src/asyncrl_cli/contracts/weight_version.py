"""One version of the weights on its way from the trainer to a rollout worker.

    Published(version=10, num_bytes=3_087_467_520, publish_s=0.4, handle=<buckets and manifest>)
    LoadReport(version=10, send_s=0.0, load_s=0.3, pause_s=0.3, logprob_abs_diff=2e-4, verdict="loaded")

The manifest lies behind the handle. It has the parts of each bucket, their fingerprints, and the trainer's
logprobs of the probe sequences: a worker scores these after its load, and so says whether it really computes
with the version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl_cli.contracts.prompt_group import Handle

LoadVerdict = Literal["loaded", "not loaded", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One version's weights, ready to be sent. `handle` is the transport's (Ray object refs and a manifest);
    `fingerprint` the manifest's ("" in a simulation, which has no weights)."""

    version: int
    num_bytes: int
    publish_s: float
    handle: Handle
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One worker's load. `pause_s`: how long no sequence ran; `send_s`: the part of it in which weights were
    fetched (0 with a second buffer, which is filled beforehand); `fetched_bytes`: of buckets and deltas,
    where they are counted, 0 if another worker of the node has fetched them; `logprob_abs_diff` and its
    median: trainer against worker on the probe sequences, if scored; `verdict` and `loaded_share`: where the
    worker's logprobs lie between the previous version's and this one's, if both are known
    (weights/versions.py). A doubt is only a warning: the worker stays.
    `fingerprint`: of the version's bytes, which is the same in two runs if all weights are."""

    version: int
    send_s: float
    load_s: float
    pause_s: float
    logprob_abs_diff: float | None
    fetched_bytes: int | None = None
    logprob_abs_diff_median: float | None = None
    verdict: LoadVerdict | None = None
    loaded_share: float | None = None
    fingerprint: str = ""

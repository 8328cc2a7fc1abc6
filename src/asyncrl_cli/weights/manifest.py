"""What is known of a version beside its tensors. Without torch: the driver passes it on."""

from __future__ import annotations

from dataclasses import dataclass


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

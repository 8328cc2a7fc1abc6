"""The claim that each token was sampled by the version that it is stamped with: its logprob is computed again
by a plain forward of transformers, one sequence at a time, with that version's kept weights.

A response that continued over a load has keys and values of older versions in its cache (`keep-kv`), or its
cache was computed anew (`recompute-kv`, a resume, another turn), which no file says. So a response of several
versions is computed in each of these ways, and a token may agree with any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from asyncrl_cli.audit.accounts import bound
from asyncrl_cli.audit.claims import Claim
from asyncrl_cli.audit.run_files import RunFiles, Sample

LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""By model.dtype, of logprobs: two programs that compute the same round differently."""
MOST_TRAJECTORIES = 64
MOST_MODELS = 8
"""Held at once."""


def logprob_claims(
    files: RunFiles, total: int, *, check_all: bool, progress: Callable[..., None]
) -> Iterator[Claim]:
    """One claim. `total`: how many trajectories were kept."""
    dtype, rollout = files.section("model")["dtype"], files.section("rollout")
    is_mean = dtype != "float32"
    what = f"logprobs are those of the stamped version{', on average over a trajectory' if is_mean else ''}"
    claim = Claim("logprobs", what, limit=LIMITS[dtype])
    directory = files.path / "versions"
    kept = {int(path.name.removeprefix("version-")): path for path in directory.glob("version-*")}
    if not total or not kept:
        keys = ['logging.samples = "all"'] * (not total) + ['weights.keep_versions = "all"'] * (not kept)
        claim.unchecked = f"{' and '.join(keys)} would have kept what it takes"
        yield claim
        return
    truncates = rollout["top_p"] < 1 or rollout["top_k"] > 0 or (rollout.get("min_p") or 0) > 0
    has_masks = truncates and rollout.get("sampling_mask", False)
    replays = bool(files.section("trainer").get("router_replay"))
    chosen = range(total) if check_all else {*Random(0).sample(range(total), min(total, MOST_TRAJECTORIES))}
    every = ((group, index) for group in files.groups() for index in range(len(group.samples)))
    picked = (one for number, one in enumerate(every) if number in chosen)
    # by step, whose tokens have so many versions, within what memory holds
    opened = lru_cache(min(bound(files) + 1, MOST_MODELS))(
        partial(_opened, section=files.section("model"), replays=replays)
    )
    temperature, left_out = float(rollout["temperature"]), 0
    for number, (group, index) in enumerate(picked):
        progress("computing logprobs again", number, len(chosen))
        sample = group.samples[index]
        missing = set(sample.versions[sample.mask.astype(bool)].tolist()) - set(kept)
        lacking = ["sampling masks"] * (has_masks and sample.kept is None)
        lacking += ["experts"] * (replays and sample.experts is None)
        if missing or lacking:
            left_out += 1
            why = f'their {" and ".join(lacking)} are not in the text: logging.samples = "all" keeps them'
            why = f"version {min(missing)}, for example, was not kept" if missing else why
            claim.unchecked = f"{left_out} trajectories: {why}"
            continue
        differences = [
            one for segment in _segments(sample) for one in _differences(opened, kept, segment, temperature)
        ]
        shown = float(np.mean(differences) if is_mean else np.max(differences))
        claim.near(shown, 0.0, f"step {group.step}: {group.key}, trajectory {index}")
    if truncates and not has_masks:
        claim.what += "; of the untruncated distribution, as rollout.sampling_mask = false has it"
    if not check_all and len(chosen) < total:
        more = f"{total - len(chosen)} of {total} trajectories: --all checks them, too"
        claim.unchecked = f"{more}; {claim.unchecked}" if claim.unchecked else more
    yield claim


def _opened(path: Path, section: dict[str, Any], replays: bool) -> tuple[Any, Any]:
    """The model, and what replays the choice of experts in it. (An engine records it by the same code; what
    that got wrong would show as a difference of logprobs.)"""
    import torch
    from transformers import AutoModelForCausalLM, logging

    from asyncrl_cli.models.experts import Routing

    logging.disable_progress_bar()
    dtype, trust = getattr(torch, section["dtype"]), bool(section.get("trust_remote_code"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust).eval()
    return model, Routing(model) if replays else None


class Segment(NamedTuple):
    """`places_N`: of the sampled tokens. Those have entries in `versions_N`, `logprobs_N` and `kept`. W:
    experts of a token, layer by layer."""

    tokens_T: Any
    places_N: Any
    versions_N: Any
    logprobs_N: Any
    kept: Sequence[Sequence[int]] | None
    experts_TW: Any


def _segments(sample: Sample) -> Iterator[Segment]:
    begin = begin_kept = 0
    for length in sample.segment_lengths:
        part = slice(begin, begin + length)
        places_N, begin = np.flatnonzero(sample.mask[part]), begin + length
        kept = sample.kept and sample.kept[begin_kept : begin_kept + len(places_N)]
        begin_kept += len(places_N)
        if len(places_N):
            versions_N, logprobs_N = sample.versions[part][places_N], sample.logprobs[part][places_N]
            experts_TW = None if sample.experts is None else sample.experts[part]
            yield Segment(sample.tokens[part], places_N, versions_N, logprobs_N, kept, experts_TW)


def _differences(
    opened: Callable[[Path], tuple[Any, Any]], kept: dict[int, Path], segment: Segment, temperature: float
) -> list[float]:
    """Of each sampled token's logprob, in the way that agrees best."""
    runs = list[tuple[int, Path]]()  # a first token, and the version that sampled from there on
    for place, version in zip(segment.places_N.tolist(), segment.versions_N.tolist(), strict=True):
        if not runs or runs[-1][1] != kept[version]:
            runs.append((place, kept[version]))
    ways = [_logprobs(opened, runs[start:], segment, temperature) for start in range(len(runs))]
    return list(np.nanmin([abs(way - segment.logprobs_N) for way in ways], axis=0))


def _logprobs(
    opened: Callable[[Path], tuple[Any, Any]],
    runs: Sequence[tuple[int, Path]],
    segment: Segment,
    temperature: float,
) -> Any:
    """Of the sampled tokens (float64; NaN before the first of `runs`), with one cache: it is computed by the
    version of the first run up to the end of that one, then by the next."""
    import torch

    tokens_T, places_N, cache = segment.tokens_T, segment.places_N, None
    found_N = np.full(len(places_N), np.nan)
    stops = [0, *(first - 1 for first, _ in runs[1:]), len(tokens_T)]
    experts_TW: Any = None if segment.experts_TW is None else segment.experts_TW.copy()
    if experts_TW is not None and runs[0][0] > places_N[0]:
        experts_TW[: runs[0][0] - 1] = -1  # a cache that is computed anew has its own experts, unrecorded
    with torch.no_grad():
        for (first, path), (begin, end) in zip(runs, pairwise(stops), strict=True):
            model, routing = opened(path)
            if routing is not None:
                experts_QW = torch.from_numpy(experts_TW[begin:end])
                routing.replayed_QLK = experts_QW.unflatten(-1, (routing.num_layers, routing.top_k))
            ids = torch.from_numpy(tokens_T[begin:end].astype(np.int64))[None]
            answer = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            for index, place in enumerate(places_N.tolist()):
                if place < first or not begin <= place - 1 < end:
                    continue
                logits_V = answer.logits[0, place - 1 - begin].float() / temperature
                row = list(segment.kept[index]) if segment.kept is not None else []  # an empty one keeps all
                norm = (logits_V[row] if row else logits_V).logsumexp(-1)
                found_N[index] = float(logits_V[int(tokens_T[place])] - norm)
    return found_N

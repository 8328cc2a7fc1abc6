"""The claim that each token was sampled by the version that it is stamped with: its logprob is computed again
by a plain forward of transformers, one sequence at a time, with that version's kept weights.

A response that continued over a load has keys and values of older versions in its cache (`keep-kv`), or its
cache was computed anew (`recompute-kv`, a resume, another turn), which no file says. So a response of several
versions is computed in each of these ways, and a token may agree with any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from asyncrl_cli.audit.claims import Claim
from asyncrl_cli.audit.run_files import RunFiles

LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""By model.dtype, of logprobs: two programs that compute the same round differently."""
MOST_TRAJECTORIES, MOST_MODELS = 64, 8


def logprob_claims(
    files: RunFiles, total: int, *, check_all: bool, progress: Callable[[str], None]
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
    chosen = range(total) if check_all else {*Random(0).sample(range(total), min(total, MOST_TRAJECTORIES))}
    every = ((group, index) for group in files.groups() for index in range(len(group.samples)))
    picked = (one for number, one in enumerate(every) if number in chosen)  # by step: few models at a time
    models, left_out = lru_cache(MOST_MODELS)(_opened), 0
    lacks_kept = False
    for number, (group, index) in enumerate(picked):
        progress(f"logprobs of trajectory {number + 1} of {len(chosen)}")
        sample, begin, begin_kept = group.samples[index], 0, 0
        lacks_kept |= sample.kept is None
        where, differences = f"step {group.step}: {group.key}, trajectory {index}", list[float]()
        if missing := set(sample.versions[sample.mask.astype(bool)].tolist()) - set(kept):
            left_out += 1
            claim.unchecked = f"{left_out} trajectories: version {min(missing)}, for example, was not kept"
            continue
        if has_masks and sample.kept is None:
            left_out += 1
            why = 'their sampling masks are not in the text: logging.samples = "all" keeps them'
            claim.unchecked = f"{left_out} trajectories: {why}"
            continue
        for length in sample.segment_lengths:
            part = slice(begin, begin + length)
            mask_T = sample.mask[part].astype(bool)
            places, begin = np.flatnonzero(mask_T), begin + length
            if not len(places):
                continue
            rows = None if sample.kept is None else sample.kept[begin_kept : begin_kept + len(places)]
            begin_kept += len(places)
            versions_N, runs = sample.versions[part][places], list[tuple[int, int]]()
            for place, version in zip(places.tolist(), versions_N.tolist(), strict=True):
                if not runs or runs[-1][1] != version:
                    runs.append((place, version))
            ends = [place - 1 for place, _ in runs[1:]]
            ways = [
                _logprobs(models, kept, runs[start:], ends[start:], sample.tokens[part], places, rows, files)
                for start in range(len(runs))
            ]
            found_N = sample.logprobs[part][places]
            differences += np.nanmin([abs(way - found_N) for way in ways], axis=0).tolist()
        shown = float(np.mean(differences) if is_mean else np.max(differences))
        claim.near(shown, 0.0, where)
    if truncates and lacks_kept and not has_masks:
        claim.what += "; of the untruncated distribution, because the samples have no kept_tokens"
    if not check_all and len(chosen) < total:
        more = f"{len(chosen)} of {total} trajectories: --all checks every one"
        claim.unchecked = f"{more}; {claim.unchecked}" if claim.unchecked else more
    yield claim


def _opened(path: Path, dtype: str, trust: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), trust_remote_code=trust)
    return model.eval()


def _logprobs(
    opened: Callable[[Path, str, bool], Any],
    kept: dict[int, Path],
    runs: Sequence[tuple[int, int]],
    ends: Sequence[int],
    tokens_T: Any,
    places_N: Any,
    rows: Sequence[Sequence[int]] | None,
    files: RunFiles,
) -> Any:
    """Of the sampled tokens of a segment (float64; NaN before the first of `runs`, each a first token and its
    version), with one cache: it is computed by the version of the first run up to the end of that one, then
    by the next."""
    import torch

    section, found = files.section("model"), np.full(len(places_N), np.nan)
    temperature, cache = float(files.section("rollout")["temperature"]), None
    stops = [0, *ends, len(tokens_T)]
    with torch.no_grad():
        for (first, version), (begin, end) in zip(runs, pairwise(stops), strict=True):
            model = opened(kept[version], section["dtype"], bool(section.get("trust_remote_code")))
            ids = torch.from_numpy(tokens_T[begin:end].astype(np.int64))[None]
            answer = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, logits_TV = answer.past_key_values, answer.logits[0].float() / temperature
            for index, place in enumerate(places_N.tolist()):
                if place < first or not begin <= place - 1 < end:
                    continue
                logits_V = logits_TV[place - 1 - begin]
                row = list(rows[index]) if rows is not None else []  # an empty one keeps all
                norm = (logits_V[row] if row else logits_V).logsumexp(-1)
                found[index] = float(logits_V[int(tokens_T[place])] - norm)
    return found

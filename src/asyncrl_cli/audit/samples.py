"""Claims about the trajectories that were kept: their arrays, advantages and the metrics made of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from asyncrl_cli.audit.accounts import step_groups
from asyncrl_cli.audit.claims import Claim
from asyncrl_cli.audit.run_files import Line, RunFiles, Sample, SampledGroup

KEEPS = 'logging.samples = "all" keeps all trajectories'
EPSILON = 1e-6
"""Added to standard deviations, as in docs/algorithms.md."""


def sample_claims(files: RunFiles, groups: Iterable[SampledGroup]) -> Iterator[Claim]:
    """`groups`: those whose samples were kept, in order. Those of one step are held at a time."""
    trained = {event["group"]: event for event in files.named("trained")}
    arrays = Claim("samples", "each token has a version if it was sampled, and no logprob if it was not")
    events = Claim("samples' groups", "the samples are of the groups and tokens that the events say")
    advantages = Claim("advantages", "advantages follow from the rewards", limit=1e-5)
    advantages.unchecked = _without_advantages(files)
    what = "rewards, response lengths and histograms of the metrics are those of the samples"
    metrics = Claim("sample metrics", what, limit=1e-6)
    lines, left_out = defaultdict[int, list[Line]](list), 0
    for line in files.metrics:
        lines[line["step"]].append(line)
    lacking = dict.fromkeys(lines)
    for step, of_step in groupby(groups, key=lambda group: group.step):
        whole = list[SampledGroup]()
        for group in of_step:
            _check_arrays(arrays, group)
            if _check_event(events, group, trained.get(group.key)):
                whole.append(group)
        if not advantages.unchecked:
            left_out += _advantages(advantages, files, step, whole)
        cases_before = metrics.cases
        _metrics(metrics, files, lines[step], whole)
        if metrics.cases > cases_before:
            lacking.pop(step, None)
    if not events.cases:
        arrays.unchecked = events.unchecked = f"no samples were kept: {KEEPS}"
    if left_out:
        estimator = files.section("algorithm")["adv_estimator"]
        advantages.unchecked = f"{left_out} groups: {estimator} needs all trajectories of an optimizer step"
    elif not advantages.cases:
        advantages.unchecked = advantages.unchecked or f"no group was kept whole: {KEEPS}"
    if not metrics.cases:
        metrics.unchecked = f"no step was kept whole: {KEEPS}"
    elif lacking:
        number, first = len(lacking), min(lacking)
        of = f"step {first}" if number == 1 else f"{number} steps, from step {first} on,"
        is_all = files.section("logging").get("samples") == "all"
        metrics.unchecked = f"samples of {of} are missing" + ("" if is_all else f": {KEEPS}")
    yield from (arrays, events, advantages, metrics)


def _check_event(claim: Claim, group: SampledGroup, event: Line | None) -> bool:
    """Whether all trajectories of the group were kept. `event`: the one that says that it was trained."""
    where = f"step {group.step}: {group.key}"
    claim.check(event and event["step"] == group.step, f"{where} was not trained in this step")
    if event is None or "versions" not in event:
        return False
    versions = Counter[int]()
    for sample in group.samples:
        versions.update(sample.versions[sample.mask].tolist())
    expected = dict(map(tuple, event["versions"]))
    is_whole = versions.total() == sum(expected.values())
    fits = versions == expected if is_whole else all(expected.get(v, 0) >= n for v, n in versions.items())
    claim.check(fits, f"{where} has tokens of versions {dict(versions)}, the event says {expected}")
    return is_whole


def _check_arrays(claim: Claim, group: SampledGroup) -> None:
    prompts = set[tuple[int, ...]]()
    for number, one in enumerate(group.samples):
        where = f"step {group.step}: {group.key}, trajectory {number}:"
        lengths = {len(one.tokens), len(one.logprobs), len(one.versions), len(one.mask)}
        claim.check(lengths == {sum(one.segment_lengths)}, f"{where} its arrays differ in length")
        if len(lengths) > 1:
            continue
        mask_T, versions_T, logprobs_T = one.mask.astype(bool), one.versions, one.logprobs
        claim.check((mask_T == (versions_T >= 0)).all(), f"{where} its mask does not fit its versions")
        claim.check((logprobs_T[~mask_T] == 0).all(), f"{where} a token that was not sampled has a logprob")
        is_logprob = np.isfinite(logprobs_T) & (logprobs_T <= 1e-5)
        claim.check(is_logprob.all(), f"{where} a logprob is not finite, or above 0")
        claim.check((versions_T <= group.window).all(), f"{where} a token is newer than its window")
        claim.check(mask_T.any(), f"{where} no token was sampled")
        begin = 0
        for length in one.segment_lengths:  # within one, weights are only loaded, never taken back
            sampled = versions_T[begin : begin + length][mask_T[begin : begin + length]]
            claim.check((np.diff(sampled) >= 0).all(), f"{where} its versions fall")
            begin += length
        first = int(mask_T.argmax())
        if len(one.segment_lengths) == 1 and mask_T[first:].all():
            prompts.add(tuple(one.tokens[:first].tolist()))
        else:
            return  # several turns: what was given to the model differs
    claim.check(len(prompts) <= 1, f"step {group.step}: {group.key} has {len(prompts)} different prompts")


def _without_advantages(files: RunFiles) -> str:
    """Why the samples do not have the advantages, if so."""
    algorithm, teacher = files.section("algorithm"), files.section("teacher")
    estimator = str(algorithm["adv_estimator"])
    if estimator not in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "none"):
        return f"{estimator}: its advantages are per token, and samples do not have them"
    per_token = algorithm.get("distill_coef") and algorithm.get("distill_loss", "sampled") == "sampled"
    if algorithm.get("use_kl_in_reward") or (teacher.get("path") and per_token):
        return "the reference or the teacher adds to them for each token: samples do not have that"
    return ""


def _advantages(claim: Claim, files: RunFiles, step: int, groups: Sequence[SampledGroup]) -> int:
    """How many of the step's groups were left out."""
    algorithm = files.section("algorithm")
    estimator = str(algorithm["adv_estimator"])
    batches = files.section("async_training")["require_batches"]
    if estimator.startswith("reinforce_plus_plus") and (batches > 1 or len(groups) < step_groups(files)):
        return len(groups)
    rewards = [np.array([_shaped(files, one) for one in group.samples]) for group in groups]
    for group, expected in zip(groups, _estimated(rewards, estimator, algorithm), strict=True):
        for number, (one, advantage) in enumerate(zip(group.samples, expected.tolist(), strict=True)):
            where = f"step {step}: {group.key}, trajectory {number}: its advantage"
            if algorithm.get("mask_truncated") and one.finish_reason in ("length", "max_turns"):
                claim.check(one.advantage is None, f"{where}: it was cut off, but is trained")
            else:
                claim.near(one.advantage, advantage, where)
    return 0


def _shaped(files: RunFiles, one: Sample) -> float:
    algorithm = files.section("algorithm")
    if (buffer := algorithm.get("overlong_buffer_tokens")) is None:
        return one.reward
    over = one.num_sampled - (files.section("rollout")["max_response_tokens"] - buffer)
    return one.reward - float(algorithm["overlong_penalty_factor"]) * float(np.clip(over / buffer, 0, 1))


def _estimated(rewards: list[np.ndarray], estimator: str, algorithm: dict[str, object]) -> list[np.ndarray]:
    """The advantages of the groups of an optimizer step, by docs/algorithms.md."""
    centred = [row - row.mean() if np.ptp(row) > 0 else np.zeros_like(row) for row in rewards]
    if estimator == "none":
        return [np.zeros_like(row) for row in rewards]
    if estimator == "rloo":  # against the mean of the others
        return [
            (row - (row.sum() - row) / max(len(row) - 1, 1)) if np.ptp(row) > 0 else np.zeros_like(row)
            for row in rewards
        ]
    if estimator == "grpo":
        if not algorithm["normalize_advantages"]:
            return centred
        return [row / (row.std(ddof=1) + EPSILON) if row.any() else row for row in centred]
    if estimator == "reinforce_plus_plus":
        mean = np.concatenate(rewards).mean()
        centred = [row - mean for row in rewards]
    every = np.concatenate(centred)
    std = np.sqrt((every**2).sum() / max(len(every) - 1, 1))
    return [row / (std + EPSILON) for row in centred]


def _metrics(claim: Claim, files: RunFiles, lines: Sequence[Line], groups: Sequence[SampledGroup]) -> None:
    """`lines`: those of the groups' step."""
    for line in lines if len(groups) >= step_groups(files) else ():
        every, where = [one for group in groups for one in group.samples], f"step {line['step']}: "
        claim.near(line.get("reward/mean"), sum(one.reward for one in every) / len(every), f"{where}reward")
        tokens = sum(one.num_sampled for one in every) / len(every)
        claim.near(line.get("response_tokens/mean"), tokens, f"{where}response_tokens/mean")
        ages, spans = list[int](), list[int]()
        for one in every:
            sampled = one.versions[one.mask.astype(bool)]
            ages.append(int(line["window"] - sampled.min()))
            spans.append(int(np.ptp(sampled)))
        for name, values in (("staleness/histogram", ages), ("staleness/span_histogram", spans)):
            own, found = Counter(values), line.get(name)
            text = f"{where}{name}: {found}, but {sorted(own.items())} by the audit"
            claim.check(Counter(dict(enumerate(found if isinstance(found, list) else []))) == own, text)

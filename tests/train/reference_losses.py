"""Losses, corrections and their gradients in float64 NumPy, written from the papers apart from the product:
loops over sequences, and no code shared with it. Every function takes a list of sequences, each a dictionary
of arrays over its tokens.
"""

from __future__ import annotations

import math

import numpy as np


def vanilla(sequence, low, high, dual=None):
    """(loss, d loss / d log theta) per token: PPO's clip, by cases (which side decides, and whether it still
    has a slope)."""
    losses, slopes = [], []
    for theta, prox, advantage in zip(
        sequence["theta"], sequence["prox"], sequence["advantage"], strict=True
    ):
        ratio = math.exp(theta - prox)
        if advantage >= 0 and ratio > 1 + high:
            loss, slope = -(1 + high) * advantage, 0.0
        elif advantage < 0 and ratio < 1 - low:
            loss, slope = -(1 - low) * advantage, 0.0
        else:
            loss = slope = -ratio * advantage
        if dual is not None and advantage < 0 and loss > -dual * advantage:
            loss, slope = -dual * advantage, 0.0
        losses.append(loss)
        slopes.append(slope)
    return np.array(losses), np.array(slopes)


def gspo(sequence, low, high):
    theta, prox, advantage = sequence["theta"], sequence["prox"], sequence["advantage"][0]
    ratio = math.exp(sum(theta - prox) / len(theta))
    is_flat = ratio > 1 + high if advantage >= 0 else ratio < 1 - low
    value = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    # Each token's own slope is that of the sequence's ratio, (d ratio / d log theta_t) * T, as in GSPO-token.
    slope = 0.0 if is_flat else -ratio * advantage
    return np.full(len(theta), value), np.full(len(theta), slope)


def cispo(sequence, low, high):
    ratio = np.exp(sequence["theta"] - sequence["prox"])
    weight = np.minimum(np.maximum(ratio, 1 - low), 1 + high)
    return -weight * sequence["advantage"] * sequence["theta"], -weight * sequence["advantage"]


def dppo(sequence, low, high):
    losses = []
    for theta, prox, advantage in zip(
        sequence["theta"], sequence["prox"], sequence["advantage"], strict=True
    ):
        rise = math.exp(theta) - math.exp(prox)
        is_out = (advantage > 0 and rise > high) or (advantage < 0 and rise < -low)
        losses.append(0.0 if is_out else -math.exp(theta - prox) * advantage)
    return np.array(losses), np.array(losses)


def sapo(sequence, positive, negative):
    losses, slopes = [], []
    for theta, prox, advantage in zip(
        sequence["theta"], sequence["prox"], sequence["advantage"], strict=True
    ):
        tau, ratio = (positive if advantage > 0 else negative), math.exp(theta - prox)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        losses.append(-4 / tau * gate * advantage)
        slopes.append(-4 * gate * (1 - gate) * ratio * advantage)
    return np.array(losses), np.array(slopes)


def reinforce(sequence):
    return -sequence["advantage"] * sequence["theta"], -sequence["advantage"]


def weights(sequence, level, threshold, newer="prox"):
    """Importance weights of a sequence's tokens."""
    log = sequence[newer] - sequence["mu"]
    if level == "none":
        return np.ones(len(log))
    if level == "token":
        found = np.exp(log)
    else:
        found = np.full(len(log), math.exp(math.fsum(log) / (len(log) if level == "geometric" else 1)))
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        return np.array([weight if low <= weight <= high else 0.0 for weight in found])
    return found if threshold is None else np.minimum(found, threshold)


def kept(sequence, rule, threshold, newer="prox"):
    """Whether rejection keeps each token."""
    over, kind = rule[:-3], rule[-2:]
    ratio = np.exp(sequence[newer] - sequence["mu"])
    values = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}[kind]
    total = {"token": lambda: values, "seq_sum": values.sum, "seq_mean": values.mean, "seq_max": values.max}[
        over
    ]()
    totals = np.broadcast_to(total, len(values))
    if kind != "k1":
        return totals <= threshold
    low, high = map(float, threshold.split("_")) if isinstance(threshold, str) else (1 / threshold, threshold)
    return (np.exp(-totals) >= low) & (np.exp(-totals) <= high)


def kl(kind, policy, ref):
    """(estimate of KL(policy || ref), its derivative by the policy's logprob) of each token, from the ratio
    of probabilities."""
    values, slopes = [], []
    for log_p, log_q in zip(policy, ref, strict=True):
        ratio, log = math.exp(log_q) / math.exp(log_p), log_q - log_p
        is_limited = ratio - 1 - log > 10 or abs(log) > 20
        value, slope = {
            "k1": (-log, 1.0),
            "abs": (abs(log), -math.copysign(1.0, log)),
            "k2": (log * log / 2, -log),
            "k3": (ratio - 1 - log, 1 - ratio),
            "low_var_kl": (10.0, 0.0) if is_limited else (ratio - 1 - log, 1 - ratio),
        }[kind]
        values.append(value)
        slopes.append(slope)
    return np.array(values), np.array(slopes)


def gae(rewards, values, gamma, lam, is_unfinished=False):
    """Advantages of one trajectory by their definition: a sum over all later TD errors (equation 16). The
    state after an unfinished one is worth as much as the last one that has a value (T-PPO)."""
    values = [*values, values[-1] if is_unfinished else 0.0]
    errors = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return np.array(
        [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]
    )


def value_loss(values, old, returns, clip):
    """(loss, its derivative by the value) per token: half the larger squared error, of the value or of the
    clipped one."""
    losses, slopes = [], []
    for value, before, target in zip(values, old, returns, strict=True):
        clipped = min(max(value, before - clip), before + clip)
        is_clip_larger = (clipped - target) ** 2 > (value - target) ** 2
        losses.append(0.5 * max((value - target) ** 2, (clipped - target) ** 2))
        slopes.append(0.0 if is_clip_larger else value - target)
    return np.array(losses), np.array(slopes)


def aggregate(losses, mode, max_tokens):
    """The loss of all sequences together, each a trajectory of its own."""
    if mode == "token-mean":
        return np.concatenate(losses).mean()
    per_sequence = {
        "seq-mean-token-sum": lambda loss: loss.sum(),
        "seq-mean-token-mean": lambda loss: loss.mean(),
        "seq-mean-token-sum-norm": lambda loss: loss.sum() / max_tokens,
    }[mode]
    return np.mean([per_sequence(loss) for loss in losses])

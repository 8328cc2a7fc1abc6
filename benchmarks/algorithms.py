"""Trains with every loss, estimator, correction and KL, and with LoRA: real runs of 20 steps, partial
rollout, one Ray session.

    python -m benchmarks.algorithms --directory DIR [--only WORD]

Each row is a run of the profile partial-rollout with a few keys. Together they cover every `loss_mode`,
`adv_estimator`, `loss_agg_mode` and `old_logprobs`, every `rollout_is` except `none`, every KL estimate, and
rejection by k1, k2, k3 of tokens and sequence means and maxima. Prints Markdown: reward of the first and the
last five steps, largest gradient norm, KL(sampler, policy) at the end, largest difference of the probes'
logprobs between trainer and workers, bytes of a sync, seconds. Exits with 1 if a figure is not finite.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.training import shared_session, train_here

from asyncrl_cli.observe.recorded import read_metrics
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import Profile

PROFILE, STEPS = "partial-rollout", 20
SMALL = (
    f"run.train_steps={STEPS}",
    "trainer.ppo_mini_batch_size=4",
    "rollout.n=4",
    "rollout.slots=16",
    "rollout.max_response_tokens=48",
    "eval.prompts=0",
    "checkpoint.every_steps=0",
    "logging.samples_every_steps=0",
)
RECOMPUTE = "old_logprobs=recompute"
RUNS = {
    "vanilla, grpo": "",
    "vanilla with a dual clip, rloo, token weights cut at 2, KL in the loss: k3": (
        f"clip_ratio_c=3.0 adv_estimator=rloo {RECOMPUTE} rollout_is_threshold=2.0 "
        "loss_agg_mode=seq-mean-token-sum "
        "use_kl_loss=true kl_loss_type=k3"
    ),
    "gspo, reinforce_plus_plus, loglinear, KL in the loss: low_var_kl": (
        "loss_mode=gspo clip_ratio_low=0.003 clip_ratio_high=0.004 loss_agg_mode=seq-mean-token-mean "
        "adv_estimator=reinforce_plus_plus old_logprobs=loglinear use_kl_loss=true"
    ),
    "cispo, reinforce_plus_plus_baseline, sequences within a band, KL in the reward: k1": (
        f"loss_mode=cispo clip_ratio_low=1.0 adv_estimator=reinforce_plus_plus_baseline {RECOMPUTE} "
        "rollout_is=sequence "
        "rollout_is_threshold='0.2_5.0' use_kl_in_reward=true"
    ),
    "dppo, gae, geometric means, rejection token_k1, KL in the loss: k2": (
        f"loss_mode=dppo clip_ratio_low=0.15 clip_ratio_high=0.15 adv_estimator=gae {RECOMPUTE} "
        "rollout_is=geometric "
        "rollout_rs=token_k1 rollout_rs_threshold=2.0 use_kl_loss=true kl_loss_type=k2"
    ),
    "sapo, grpo without std, normalized weights, rejection seq_mean_k3, KL in the reward: abs": (
        f"loss_mode=sapo loss_agg_mode=seq-mean-token-sum-norm normalize_advantages=false {RECOMPUTE} "
        "rollout_is_batch_normalize=true rollout_rs=seq_mean_k3 rollout_rs_threshold=0.1 "
        "use_kl_in_reward=true kl_penalty=abs"
    ),
    "reinforce, token weights within a band, rejection seq_max_k2, KL in the loss: k1": (
        "loss_mode=reinforce rollout_is_threshold='0.5_5.0' rollout_rs=seq_max_k2 rollout_rs_threshold=2.0 "
        "use_kl_loss=true kl_loss_type=k1"
    ),
    "dynamic sampling, overlong shaping, truncated masked": (
        "filter_groups=true overlong_buffer_tokens=8 mask_truncated=true clip_ratio_high=0.28"
    ),
    "LoRA, merged": "lora.rank=8 trainer.lr=5e-3",
    "LoRA, adapters alone": "lora.rank=8 trainer.lr=5e-3 lora.sync=adapter",
}
"""Keys of `[algorithm]`, unless they name their section."""
COLUMNS = ("reward from", "to", "gradient norm", "KL", "probes", "bytes of a sync", "seconds")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--only", default="", help="only runs with this in their name")
    options = parser.parse_args()
    directory, are_fine = options.directory.absolute(), True
    print(f"| {' | '.join(['20 steps', *COLUMNS])} |\n{'|---' * (len(COLUMNS) + 1)}|", flush=True)
    with shared_session(profile_of("", directory)):
        for number, (name, keys) in enumerate(RUNS.items()):
            if options.only not in name:
                continue
            result = train_here(profile_of(keys, directory), f"algorithms-{number}", directory / "runs")
            lines = read_metrics(result.run_dir / "metrics.jsonl")
            figures = figures_of(lines)
            is_fine = result.error is None and len(lines) == STEPS and all(map(math.isfinite, figures))
            are_fine &= is_fine
            print(
                f"| {' | '.join([name, *(f'{figure:.3g}' for figure in figures)])} "
                f"|{'' if is_fine else ' FAILED'}",
                flush=True,
            )
    return 0 if are_fine else 1


def profile_of(keys: str, directory: Path) -> Profile:
    own = [key if "." in key.partition("=")[0] else f"algorithm.{key}" for key in keys.split()]
    return load(PROFILE, [*SMALL, *own, f"model.cache_dir={directory / 'models'}"], environ={}).profile


def figures_of(lines: Sequence[Line]) -> list[float]:
    rewards = [line.get("reward/unfiltered_mean", line["reward/mean"]) for line in lines]
    last = lines[-1]
    return [
        statistics.fmean(rewards[:5]),
        statistics.fmean(rewards[-5:]),
        max(line["train/grad_norm"] for line in lines if "train/grad_norm" in line),
        last["correction/kl"],
        max(line["sync/logprob_abs_diff"] for line in lines if "sync/logprob_abs_diff" in line),
        last["sync/bytes"],
        last["time_s"],
    ]


if __name__ == "__main__":
    raise SystemExit(main())

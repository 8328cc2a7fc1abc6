"""Peak memory of a trainer rank on CPUs, measured and as estimated by `asyncrl plan`.

Each case is a train step of a random model on made-up groups (two microbatches per rank), with each rank in
its own process. A peak is the largest resident set that the kernel has seen (VmHWM, reset before loading and
before the step), minus the files mapped at the end (libraries) and minus the memory of the process before the
model. glibc's malloc is set to return freed tensors of 256 KiB or more at once, so that only live tensors
count; with `--heap run` it keeps them, as in the processes of a run.

    python -m benchmarks.memory                                   the table of docs/memory.md (some minutes)
    python -m benchmarks.memory --sizes small --features lora     a part of the table
    python -m benchmarks.memory --logits 16384                    so many tokens, a vocabulary of 151,936
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.train.train_samples import make_segment, meta_of
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of
from asyncrl_cli.job.host_process import M_MMAP_THRESHOLD, keep_freed_memory
from asyncrl_cli.models.shape import shape_of
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import TRAINER
from asyncrl_cli.plan.memory import estimate_memory
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train import sharded_model
from asyncrl_cli.train.policy_trainer import PolicyTrainer
from asyncrl_cli.train.step_plan import plan_train_step

MIB = 2**20
FORK = multiprocessing.get_context("fork")
PROMPT_TOKENS, TRAJECTORIES = 16, 4
SIZES = {  # hidden, intermediate, layers, vocabulary: the third has the logits of a microbatch in two chunks
    "small": (256, 768, 4, 8192),
    "medium": (512, 1536, 6, 2048),
    "large": (512, 1536, 4, 81920),
}
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"trainer.activation_checkpointing": "selective"},
    "full": {"trainer.activation_checkpointing": "full"},
    "sequence": {"trainer.sequence_parallel_size": 2},
    "lora": {"lora.rank": 8},
    "reference": {"algorithm.use_kl_loss": True},
    "critic": {"algorithm.adv_estimator": "gae"},
    "recompute": {"algorithm.old_logprobs": "recompute", "async_training.trigger_parameter_sync_step": 2},
    "bfloat16": {"model.dtype": "bfloat16"},
}
"""Keys by the name of what they turn on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size: tuple[int, int, int, int]
    tokens: int = 512
    ranks: int = 1
    microbatches: int = 2
    threads: int = 1
    feature: str = "none"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=list(FEATURES))
    parser.add_argument(
        "--jobs", type=int, default=1, help="cases run at a time (does not change the memory)"
    )
    parser.add_argument(
        "--heap", choices=["tight", "run"], default="tight", help="what malloc does with freed tensors"
    )
    parser.add_argument("--logits", type=int, metavar="TOKENS")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.heap == "run":
        keep_freed_memory()
    else:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**18)
    if arguments.logits:
        threads = len(os.sched_getaffinity(0))
        found = _run(
            Case(
                size=(64, 192, 2, 151_936),
                tokens=arguments.logits,
                microbatches=1,
                threads=threads,
                feature="full",
            )
        )
        above = found["step"] - found["shard"]
        print(
            f"step {found['step']:,.0f} MiB: {above:,.0f} above the {found['shard']:,.0f} of the model's "
            "weights"
        )
        print(
            f"of these, gathered weights, gradients and moments: {4 * found['shard']:,.0f}; estimated: "
            f"{found['estimate']:,.0f}"
        )
        return
    print("| model | ranks | with | loading MiB | shard + largest tensor | step MiB | estimated | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    names = [
        (size, ranks, feature)
        for size, ranks, feature in itertools.product(arguments.sizes, arguments.ranks, arguments.features)
        if ranks > 1 or feature != "sequence"
    ]
    cases = [Case(size=SIZES[size], ranks=ranks, feature=feature) for size, ranks, feature in names]
    with ProcessPoolExecutor(arguments.jobs, mp_context=FORK) as pool:
        for (size, ranks, feature), found in zip(names, pool.map(_run, cases), strict=True):
            print(
                f"| {size} | {ranks} | {feature} | {found['load']:,.0f} | {found['shard']:,.0f} + "
                f"{found['tensor']:,.0f} "
                f"| {found['step']:,.0f} | {found['estimate']:,.0f} | "
                f"{found['estimate'] / found['step']:.2f} |",
                flush=True,
            )


def _run(case: Case) -> dict[str, float]:
    """Run the ranks of a case, forks of this process; of each figure the largest."""
    with tempfile.TemporaryDirectory() as directory:
        with ProcessPoolExecutor(1, mp_context=FORK) as saver:
            saver.submit(_save_model, case, directory).result()
        with ProcessPoolExecutor(case.ranks, mp_context=FORK) as pool:
            answers = list(pool.map(partial(_measured, case, directory), range(case.ranks)))
    return {key: max(answer[key] for answer in answers) for key in answers[0]}


def _save_model(case: Case, directory: str) -> None:
    hidden, intermediate, layers, vocabulary = case.size
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1),
        head_dim=64,
        max_position_embeddings=case.tokens,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def _measured(case: Case, directory: str, rank: int) -> dict[str, float]:
    """One rank's peaks in MiB, while loading and in a train step, and what they are compared with."""
    peaks: dict[str, int] = {}
    sharded = sharded_model.sharded

    def watched(*args: Any) -> Any:
        sharded_model.sharded = sharded  # a reference, which comes after the policy, is not watched
        peaks["before"] = _status("RssAnon")
        _forget_peak()
        made = sharded(*args)
        peaks["load"] = _peak()
        return made

    sharded_model.sharded = watched
    profile, place = (
        _profile(case, directory),
        ProcessPlace(model_dir=directory, workers=case.ranks, threads=case.threads),
    )
    trainer = PolicyTrainer(
        profile, place, rank=rank, init_method=f"file://{directory}/meet", total_optimizer_steps=2
    )
    groups = _groups(case)
    plan = plan_train_step([meta for meta, _ in groups], profile, ranks=case.ranks, step=1, window=0)[rank]
    _forget_peak()
    trainer.train(0, plan, dict(enumerate(payload for _, payload in groups)))
    peaks["step"] = _peak()
    figures = {name: peaks[name] - peaks["before"] for name in ("load", "step")}
    hidden, intermediate, _, vocabulary = case.size
    figures["shard"] = Path(directory, "model.safetensors").stat().st_size // case.ranks
    figures["tensor"] = 4 * hidden * max(intermediate, vocabulary)
    figures["estimate"] = _estimated(profile, directory)
    trainer.close()
    return {name: num_bytes / MIB for name, num_bytes in figures.items()}


def _estimated(profile: Profile, directory: str) -> int:
    """Of a train step, on host and device, which are the same here."""
    machine = ClusterResources(nodes=(NodeResources(name="one", cpus=64, gpus=0),), elastic_cpus=True)
    estimate = estimate_memory(profile, compile_job(profile, machine), shape_of(directory))
    phases: Counter[str] = Counter()
    for item in [*estimate.of(TRAINER, "device"), *estimate.of(TRAINER, "host")]:
        phases[item.phase] += item.num_bytes
    return phases["always"] + max(phases["step"], phases["update"])


def _profile(case: Case, directory: str) -> Profile:
    settings = {
        "run.train_steps": 2,
        "model.path": directory,
        "trainer.max_tokens_per_microbatch": case.tokens,
        "placement.trainer_workers": case.ranks,
        "rollout.max_prompt_tokens": PROMPT_TOKENS,
        "rollout.max_response_tokens": case.tokens // TRAJECTORIES - PROMPT_TOKENS,
        **FEATURES[case.feature],
    }
    return load("base", [f"{key}={json.dumps(value)}" for key, value in settings.items()]).profile


def _groups(case: Case) -> list[tuple[GroupResult, GroupPayload]]:
    """Groups, each of which fills a microbatch."""
    response_tokens = case.tokens // TRAJECTORIES - PROMPT_TOKENS
    groups = []
    for index in range(case.microbatches * case.ranks):
        draw = random.Random(index)
        segments = [make_segment(draw, PROMPT_TOKENS, response_tokens, [0]) for _ in range(TRAJECTORIES)]
        trajectories = tuple(
            trajectory_of((s,), BUILT_IN, reward=float(i % 2), finish_reason="stop")
            for i, s in enumerate(segments)
        )
        key = AttemptKey(f"prompt-{index}", 0, 0)
        meta = GroupResult(
            key=key,
            trajectories=tuple(map(meta_of, trajectories)),
            failures=(),
            failed_tokens=0,
            payload=None,
        )
        groups.append((meta, GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=trajectories)))
    return groups


def _peak() -> int:
    """Bytes of this process's largest resident set, without mapped files."""
    return _status("VmHWM") - _status("RssFile")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()

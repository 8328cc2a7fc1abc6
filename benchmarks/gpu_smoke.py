"""Checks that need a GPU: one CUDA GPU (nccl: two). Each check is run, timed and reported as passed or failed.

    python benchmarks/gpu_smoke.py [--parameters 80000000] [--check NAME...] [--json]

    trainer    PolicyTrainer under FSDP2 with bfloat16 compute: train steps on made-up groups, then a gather; all finite
    buckets    VllmEngine in bfloat16 generates while our bucket engine loads the gathered weights; afterwards, and not before, the
               engine's logprobs of the probes equal the trainer's
    sleep-1    AsyncLLM.sleep(1) frees the GPU's memory; after wake_up() the greedy response is the same
    sleep-2    the same with level 2, which discards the weights: they are loaded again before the cache is allocated
    ipc        like buckets, with the weights sent through CUDA IPC from this process to vLLM's on the same GPU
    nccl       like buckets, with the weights sent by NCCL to vLLM on a second GPU; skipped if there is only one GPU
    colocate   `asyncrl train --profile colocate` with vLLM: trainer and rollouts take turns on the one GPU for three train steps;
               with the object store, then with `ipc`

Needs vLLM (pip install 'asyncrl-cli[vllm]'). Without a CUDA GPU it prints that and exits with 0. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from engine_kit import RandomModel, has_vllm, make_random_model, table
from gpu_smoke_direct import check_ipc, check_nccl
from gpu_smoke_engine import check_buckets, check_sleep_1, check_sleep_2
from gpu_smoke_kit import GPU_SHARE, TRAIN_STEPS, Skipped, Wrong
from gpu_smoke_trainer import check_trainer

TRAIN_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    check: str
    passed: bool
    skipped: bool
    seconds: float
    detail: str


def why_skipped() -> str:
    """Empty where the checks can be run."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA GPU"
    return "" if has_vllm() else "vLLM is not installed: pip install 'asyncrl-cli[vllm]'"


def check_colocate(_: RandomModel, options: argparse.Namespace) -> str:
    """In processes of their own: by now this one holds memory of the GPU."""
    torch.cuda.empty_cache()
    return "; ".join(f"{transport}: {_colocated(transport)}" for transport in ("object-store", "ipc"))


def _colocated(transport: str) -> str:
    settings = {
        "weights.transport": transport,
        "placement.gpus": 1,
        "rollout.engine": "vllm",
        "rollout.gpu_memory_utilization": GPU_SHARE,
        "placement.device": "cuda",
        "run.train_steps": TRAIN_STEPS,
    }
    with tempfile.TemporaryDirectory() as runs_dir:
        command = [sys.executable, "-m", "asyncrl_cli", "train", "--profile", "colocate", "--name", "smoke", "--ui", "none"]
        command += ["--runs-dir", runs_dir, *(part for name, value in settings.items() for part in ("--set", f"{name}={value}"))]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TRAIN_TIMEOUT_S, check=False)
        if ended.returncode:
            raise Wrong(f"asyncrl train exited with {ended.returncode}: {' '.join(ended.stderr.split())[-400:]}")
        lines = [json.loads(line) for line in (Path(runs_dir) / "smoke" / "metrics.jsonl").read_text().splitlines()]
    if lines[-1]["step"] != TRAIN_STEPS:
        raise Wrong(f"the run ended after train step {lines[-1]['step']} of {TRAIN_STEPS}")
    names = ("timing/step_s", "sync/pause_s", "sync/logprob_abs_diff")
    return ", ".join(f"{name} {lines[-1][name]:.4g}" for name in names if name in lines[-1])


CHECKS: dict[str, Callable[[RandomModel, argparse.Namespace], str]] = {
    "trainer": check_trainer,
    "buckets": check_buckets,
    "ipc": check_ipc,
    "nccl": check_nccl,
    "sleep-1": check_sleep_1,
    "sleep-2": check_sleep_2,
    "colocate": check_colocate,
}


def outcome_of(name: str, model: RandomModel, options: argparse.Namespace) -> Outcome:
    """Whatever a check ends with is told, so that the others are run too."""
    began_s = time.perf_counter()
    skipped = False
    try:
        passed, detail = True, CHECKS[name](model, options)
    except Skipped as why:
        passed, skipped, detail = True, True, str(why)
    except Wrong as wrong:
        passed, detail = False, str(wrong)
    except Exception as error:
        traceback.print_exc()
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Outcome(check=name, passed=passed, skipped=skipped, seconds=time.perf_counter() - began_s, detail=detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=80_000_000, help="size of the random Qwen3 (all checks but colocate)")
    parser.add_argument("--check", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := why_skipped():
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        model = make_random_model(Path(directory), options.parameters)
        outcomes = [outcome_of(name, model, options) for name in options.check]
    if options.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        ends = ["skipped" if o.skipped else "ok" if o.passed else "FAILED" for o in outcomes]
        rows = [[o.check, end, f"{o.seconds:.1f}", o.detail] for o, end in zip(outcomes, ends, strict=True)]
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {model.parameters / 1e6:.1f} million parameters")
        print(table(["check", "", "seconds", "what was seen"], rows))
    return int(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

"""What only a GPU can show, on one CUDA GPU: each check is run, timed and said to be right or not.

    python benchmarks/gpu_smoke.py [--parameters 80000000] [--check NAME...] [--json]

    trainer    PolicyTrainer under FSDP2 with bfloat16 compute: train steps on made-up groups, then a gather; all finite
    buckets    VllmEngine in bfloat16 generates while the gathered weights are loaded by our bucket engine; afterwards the engine's
               logprobs of the probes are the trainer's (they were not before)
    sleep-1    AsyncLLM.sleep(1) gives the GPU's memory back, wake_up() brings the same greedy response
    sleep-2    the same with level 2, which discards the weights: they are loaded again before the cache is allocated
    colocate   `asyncrl train --profile colocate` with vLLM, trainer and rollouts in turns on the one GPU, three train steps

Needs vLLM (pip install 'asyncrl-cli[vllm]'). Without a CUDA GPU it says so and exits with 0. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from engine_kit import MB, PROMPT_TOKENS, RandomModel, has_vllm, make_random_model, prompts_of, table

from asyncrl_cli.loop.ports import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.rollout.engine import Sampling
from asyncrl_cli.samples.trajectory import GroupPayload, Segment, Trajectory
from asyncrl_cli.train.balance import plan_train_step
from asyncrl_cli.train.policy_trainer import PolicyTrainer, RankBatch
from asyncrl_cli.train.settings import TrainerSettings
from asyncrl_cli.weights.buckets import Bucket, Manifest
from asyncrl_cli.weights.probes import mean_abs_diff

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncrl_cli.rollout.vllm_engine import VllmEngine

DEVICE = "cuda:0"
SLOTS = 32
RESPONSE_TOKENS = 128
GROUPS, GROUP_SIZE, TRAIN_STEPS = 8, 8, 3
LEARNING_RATE = 1e-3
"""Large enough that a worker on the old weights shows."""
LARGEST_DIFFERENCE = 0.05
"""Of mean logprobs: trainer and engine both round to bfloat16, in different kernels."""
GPU_SHARE = 0.3
LOAD_BUCKET_BYTES = 128 * MB
TRAIN_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    check: str
    passed: bool
    seconds: float
    detail: str


class Wrong(Exception):
    """A check ran to its end and found this."""


def why_skipped() -> str:
    """Empty where the checks can be run."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA GPU"
    return "" if has_vllm() else "vLLM is not installed: pip install 'asyncrl-cli[vllm]'"


# --- trainer


def made_up_group(model: RandomModel, number: int) -> tuple[GroupResult, GroupPayload]:
    """Random tokens with the logprobs of a model that has learned nothing; rewards are by chance."""
    draw = random.Random(number)
    key = AttemptKey(f"prompt-{number}", 0, 0)
    trajectories, metas = [], []
    for _ in range(GROUP_SIZE):
        response_tokens = draw.randint(RESPONSE_TOKENS // 4, RESPONSE_TOKENS)
        length = PROMPT_TOKENS + response_tokens
        sampled = np.arange(length) >= PROMPT_TOKENS
        segment = Segment(
            tokens_T=np.array([draw.randrange(model.vocab_size) for _ in range(length)], dtype=np.int32),
            logprobs_T=np.where(sampled, -math.log(model.vocab_size), 0.0).astype(np.float32),
            versions_T=np.where(sampled, 0, -1).astype(np.int32),
            mask_T=sampled,
        )
        reward = float(draw.random() < 0.5)
        trajectories.append(Trajectory(segments=(segment,), reward=reward, finish_reason="stop"))
        metas.append(
            TrajectoryMeta(
                prompt_tokens=PROMPT_TOKENS,
                response_tokens=response_tokens,
                reward=reward,
                finish_reason="stop",
                version_tokens=((0, response_tokens),),
            )
        )
    result = GroupResult(key=key, trajectories=tuple(metas), failures=(), failed_tokens=0, payload=None)
    return result, GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=tuple(trajectories))


def batch_of(model: RandomModel, step: int) -> RankBatch:
    groups = [made_up_group(model, step * GROUPS + index) for index in range(GROUPS)]
    (plan,) = plan_train_step([result for result, _ in groups], ranks=1, num_minibatches=1, normalize=True)
    return RankBatch(step=step, step_in_window=0, plan=plan, payloads=dict(enumerate(payload for _, payload in groups)))


@contextmanager
def trained(model: RandomModel) -> Iterator[tuple[Manifest, list[Bucket], str]]:
    """The published weights after some train steps, and what is to be said of them."""
    settings = TrainerSettings(model_dir=str(model.directory), dtype="bfloat16", lr=LEARNING_RATE)
    with tempfile.TemporaryDirectory() as directory:
        trainer = PolicyTrainer(settings, rank=0, world_size=1, device=DEVICE, init_method=f"file://{directory}/meet")
        try:
            before = {name: local.clone() for name, local in trainer.model.locals().items()}
            reports = [trainer.train(batch_of(model, step)) for step in range(1, TRAIN_STEPS + 1)]
            gather_s = trainer.gather(1)
            manifest, buckets = trainer.published(1)
            _check_trained(trainer, before, [report.metrics for report in reports])
            rate = reports[-1].tokens / reports[-1].train_s
            peak = torch.cuda.max_memory_allocated() / MB
            yield manifest, buckets, f"{rate:,.0f} tokens/s, gather {1e3 * gather_s:.0f} ms, peak {peak:,.0f} MiB"
        finally:
            trainer.close()
    del trainer
    torch.cuda.empty_cache()


def _check_trained(trainer: PolicyTrainer, before: dict[str, torch.Tensor], metrics: list[dict[str, float]]) -> None:
    odd = sorted({name for step in metrics for name, value in step.items() if not math.isfinite(value)})
    if odd:
        raise Wrong(f"not finite: {', '.join(odd)}")
    after = trainer.model.locals()
    if not all(bool(tensor.isfinite().all()) for tensor in after.values()):
        raise Wrong("weights are not finite")
    same = [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
    if same:
        raise Wrong(f"{len(same)} of {len(after)} parameters were not trained, {same[0]} among them")


def check_trainer(model: RandomModel, _: argparse.Namespace) -> str:
    with trained(model) as (_manifest, buckets, detail):
        return f"{detail}, {sum(len(bucket.data) for bucket in buckets) / MB:,.0f} MiB in {len(buckets)} bucket(s)"


# --- engine


@asynccontextmanager
async def engine_on_gpu(model: RandomModel, **engine_args: Any) -> AsyncIterator[VllmEngine]:
    from asyncrl_cli.rollout.vllm_engine import VllmEngine
    from asyncrl_cli.rollout.vllm_settings import VllmOptions, VllmSetup

    setup = VllmSetup(
        model_dir=model.directory,
        slots=SLOTS,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
        device=DEVICE.partition(":")[0],
        dtype="bfloat16",
        options=VllmOptions(gpu_memory_utilization=GPU_SHARE, engine_args=engine_args),
    )
    engine = VllmEngine(setup)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def difference_of(engine: VllmEngine, manifest: Manifest) -> float:
    scores = await engine.score([list(tokens) for tokens in manifest.probe_tokens], manifest.temperature)
    difference = mean_abs_diff(scores.logprobs, manifest.probe_logprobs)
    assert difference is not None
    return difference


def check_buckets(model: RandomModel, _: argparse.Namespace) -> str:
    with trained(model) as (manifest, buckets, _detail):
        return asyncio.run(_load_in_flight(model, manifest, buckets))


async def _load_in_flight(model: RandomModel, manifest: Manifest, buckets: list[Bucket]) -> str:
    async with engine_on_gpu(model) as engine:
        before = await difference_of(engine, manifest)
        sampling = Sampling(temperature=1.0, max_response_tokens=RESPONSE_TOKENS)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(engine.generate(f"running-{row}", prompt, sampling, row))
                for row, prompt in enumerate(prompts_of(model, SLOTS))
            ]
            while engine.sampled_tokens == 0:  # noqa: ASYNC110  (it is counted where the tokens come in)
                await asyncio.sleep(0.001)
            weights = await asyncio.to_thread(engine.receive, buckets, LOAD_BUCKET_BYTES)
            report = await engine.load(weights, manifest.version, "recompute-kv")
        versions = {version for task in running for version in task.result().versions}
        after = await difference_of(engine, manifest)
        if after > LARGEST_DIFFERENCE or before < 2 * after:
            raise Wrong(f"logprobs differ from the trainer's by {after:.4f} after the load, by {before:.4f} before")
        pause = f"pause {1e3 * report.pause_s:.0f} ms, load {1e3 * report.load_s:.0f} ms"
        return f"{pause}, |logprob| off by {after:.4f} (before {before:.4f}), versions sampled {sorted(versions)}"


def check_sleep_1(model: RandomModel, _: argparse.Namespace) -> str:
    return asyncio.run(_sleep_and_wake(model, 1))


def check_sleep_2(model: RandomModel, _: argparse.Namespace) -> str:
    return asyncio.run(_sleep_and_wake(model, 2))


async def _sleep_and_wake(model: RandomModel, level: int) -> str:
    """Level 1 keeps the weights in host memory; after level 2 they come again by a load, while the cache is still asleep."""
    from safetensors.torch import load_file

    greedy = Sampling(temperature=0.0, max_response_tokens=RESPONSE_TOKENS)
    prompt = prompts_of(model, 1)[0]
    async with engine_on_gpu(model, enable_sleep_mode=True) as engine:
        llm = engine._running_llm()
        expected = await engine.generate("before", prompt, greedy, 0)
        used = used_bytes()
        began_s = time.perf_counter()
        await llm.sleep(level, mode="wait")
        asleep_s, asleep = time.perf_counter() - began_s, used_bytes()
        began_s = time.perf_counter()
        if level == 1:
            await llm.wake_up()
        else:
            await llm.wake_up(tags=["weights"])
            weights = {name: tensor.bfloat16() for name, tensor in load_file(model.directory / "model.safetensors").items()}
            await engine.load(weights, 1, "keep-kv")
            await llm.wake_up(tags=["kv_cache"])
        awake_s = time.perf_counter() - began_s
        if await llm.is_sleeping():
            raise Wrong("the engine still sleeps after wake_up")
        found = await engine.generate("after", prompt, greedy, 0)
        if found.tokens != expected.tokens:
            raise Wrong("the greedy response after waking up is another one")
        if asleep > used - 100 * MB:
            raise Wrong(f"{used / MB:,.0f} MiB of the GPU were in use, {asleep / MB:,.0f} MiB still are asleep")
        memory = f"{used / MB:,.0f} -> {asleep / MB:,.0f} -> {used_bytes() / MB:,.0f} MiB in use"
        return f"{memory}, asleep in {1e3 * asleep_s:.0f} ms, awake in {1e3 * awake_s:.0f} ms"


def used_bytes() -> int:
    """Of the whole GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


# --- run


def check_colocate(_: RandomModel, options: argparse.Namespace) -> str:
    """In a process of its own: by now this one holds memory of the GPU."""
    torch.cuda.empty_cache()
    settings = {
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
    "sleep-1": check_sleep_1,
    "sleep-2": check_sleep_2,
    "colocate": check_colocate,
}


def outcome_of(name: str, model: RandomModel, options: argparse.Namespace) -> Outcome:
    """Whatever a check ends with is told, so that the others are run too."""
    began_s = time.perf_counter()
    try:
        passed, detail = True, CHECKS[name](model, options)
    except Wrong as wrong:
        passed, detail = False, str(wrong)
    except Exception as error:
        traceback.print_exc()
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Outcome(check=name, passed=passed, seconds=time.perf_counter() - began_s, detail=detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=80_000_000, help="of the random Qwen3 (all checks but colocate)")
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
        rows = [[o.check, "ok" if o.passed else "FAILED", f"{o.seconds:.1f}", o.detail] for o in outcomes]
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {model.parameters / 1e6:.1f} million parameters")
        print(table(["check", "", "seconds", "what was seen"], rows))
    return int(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

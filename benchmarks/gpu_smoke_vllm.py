"""gpu_smoke.py's checks that need vLLM: weights in flight by each transport, sleep and wake, experts, and a
colocated run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from engine_kit import MB, RandomModel, generate_all, pack, prompts_of
from gpu_smoke_engine import MAX_LOGPROB_DIFF, load_in_flight, rollout_section, trained
from gpu_smoke_kit import OTHER_SETTINGS, Figures, Machine, Skipped, Wrong, save_random, trainer_on

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.data.sample_fields import BUILT_IN, NOT_SAMPLED, ROUTED_EXPERTS
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of
from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.profile.schema import Profile, TrainerSection, WeightsSection
from asyncrl_cli.weights.receivers import AnnouncedWeights, SharedWeights
from asyncrl_cli.weights.senders import HeldVersions
from asyncrl_cli.weights.versions import RankZero, send

if TYPE_CHECKING:
    from asyncrl_cli.engines.vllm.vllm_engine import VllmEngine

SLOTS, RESPONSE_TOKENS, TRAIN_STEPS = 32, 128, 3
GPU_SHARE = 0.3
"""Of the GPU's memory, for vLLM: a trainer shares the GPU with it."""
LOAD_BUCKET_BYTES = 128 * MB
TIMEOUT_S, TRAIN_TIMEOUT_S = 60.0, 900.0
WORKER, NCCL_PORT = "smoke", 29_561
SPREAD = 0.5
"""Standard deviation of a mixture's weights, times the root of its width."""


def need_gpu(machine: Machine) -> None:
    if not machine.is_gpu:
        raise Skipped("needs a GPU: on CPUs tests/engines/vllm covers it")


def check_probes(machine: Machine, figures: Figures) -> None:
    """vLLM generates while our bucket engine loads a trained version; then its logprobs of the probes are the
    trainer's."""
    asyncio.run(_load(machine, "object-store", figures))


def check_ipc(machine: Machine, figures: Figures) -> None:
    """The same, with the weights sent through CUDA IPC from this process to vLLM's on the same GPU."""
    need_gpu(machine)
    asyncio.run(_load(machine, "ipc", figures))


def check_nccl(machine: Machine, figures: Figures) -> None:
    """The same, with the weights sent by NCCL to vLLM on a second GPU. NCCL refuses two processes of a group
    on one GPU, and has no CPU peers, so one GPU can only show that a group of one process starts and
    broadcasts."""
    need_gpu(machine)
    if torch.cuda.device_count() < 2:
        _group_of_one(figures)
        raise Skipped("a group of one process broadcasts; sending to vLLM needs a second GPU")
    with _second_gpu_only():
        asyncio.run(_load(machine, "nccl", figures))


def _group_of_one(figures: Figures) -> None:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(host="127.0.0.1", port=NCCL_PORT, rank=0, world_size=1)
    communicator = PyNcclCommunicator(group, device=torch.device("cuda:0"))
    communicator.broadcast(torch.ones(16, device="cuda:0"), src=0)
    torch.cuda.synchronize()
    figures["group_of_one"] = True


class ThisProcess(RankZero):
    """Rank 0 in this process, as an engine asks it; vLLM's processes are others."""

    def __init__(self, end: Any) -> None:
        self._end = end

    async def meeting_point(self) -> tuple[str, int]:
        return "127.0.0.1", NCCL_PORT

    async def leave(self) -> None:
        self._end.leave(WORKER)

    async def ask(self, call: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self._end, call), WORKER, *args)


async def _load(machine: Machine, transport: str, figures: Figures) -> None:
    model, profile = machine.main, _profile(machine, transport)
    with trainer_on(machine, model, profile) as trainer:
        manifest, buckets = trained(trainer, model, profile)
        load = partial(
            load_in_flight, model=model, manifest=manifest, profile=profile, figures=figures, slots=SLOTS
        )
        async with vllm_on(machine, model, profile) as engine:
            if transport == "object-store":
                await load(engine, receive=lambda: SharedWeights(buckets))
                return
            held = HeldVersions()
            layouts = send(held, manifest, buckets)
            await engine.connect(ThisProcess(_end(transport, held)))
            await load(engine, receive=lambda: AnnouncedWeights(layouts))


def _end(transport: str, held: HeldVersions) -> Any:
    from asyncrl_cli.engines.vllm.rank_zero import IpcExports, NcclGroup, NcclLinks, produce_on

    device = torch.device("cuda:0")
    if transport == "ipc":
        return IpcExports(held, partial(produce_on, device), buffer_bytes=LOAD_BUCKET_BYTES)
    return NcclLinks(held, lambda meeting: NcclGroup(meeting, device), timeout_s=TIMEOUT_S)


def _profile(machine: Machine, transport: str = "object-store", **engine_args: Any) -> Profile:
    share = GPU_SHARE if machine.is_gpu else None
    rollout = rollout_section(
        slots=SLOTS,
        response_tokens=RESPONSE_TOKENS,
        gpu_memory_utilization=share,
        engine_args=engine_args,
        engine="vllm",
    )
    return machine.profile(rollout=rollout, weights=WeightsSection(transport=transport, timeout_s=TIMEOUT_S))


@asynccontextmanager
async def vllm_on(machine: Machine, model: RandomModel, profile: Profile) -> AsyncIterator[VllmEngine]:
    from asyncrl_cli.engines.vllm.vllm_engine import VllmEngine

    engine = VllmEngine(profile, machine.place(model))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@contextmanager
def _second_gpu_only() -> Iterator[None]:
    """For the processes that are started meanwhile; this one has its GPUs already."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[1]
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def check_sleep(machine: Machine, figures: Figures) -> None:
    """`AsyncLLM.sleep` frees the GPU's memory; after `wake_up` the greedy response is the same. Level 1 keeps
    the weights in host memory; after level 2 they come again by a load, while the cache is still asleep."""
    need_gpu(machine)
    for level in (1, 2):
        asyncio.run(_sleep_and_wake(machine, level, figures))


async def _sleep_and_wake(machine: Machine, level: int, figures: Figures) -> None:
    from safetensors.torch import load_file

    model, greedy = machine.main, Sampling(temperature=0.0, max_response_tokens=RESPONSE_TOKENS)
    prompt = prompts_of(model, 1)[0]
    async with vllm_on(machine, model, _profile(machine, enable_sleep_mode=True)) as engine:
        llm = engine._running_llm()
        expected = await engine.generate("before", prompt, greedy, 0)
        used = _used_bytes()
        began_s = time.perf_counter()
        await llm.sleep(level, mode="wait")
        asleep_s, asleep = time.perf_counter() - began_s, _used_bytes()
        began_s = time.perf_counter()
        if level == 1:
            await llm.wake_up()
        else:
            await llm.wake_up(tags=["weights"])
            weights = {
                name: tensor.bfloat16()
                for name, tensor in load_file(model.directory / "model.safetensors").items()
            }
            await engine.load(SharedWeights(pack(weights, 2**28)), 1, "keep-kv")
            await llm.wake_up(tags=["kv_cache"])
        seconds = {"asleep_in_s": asleep_s, "awake_in_s": time.perf_counter() - began_s}
        sizes = {"used_mib": used / MB, "asleep_mib": asleep / MB, "awake_mib": _used_bytes() / MB}
        figures |= {f"level_{level}_{name}": value for name, value in (seconds | sizes).items()}
        if await llm.is_sleeping():
            raise Wrong(f"level {level}: the engine still sleeps after wake_up")
        if (await engine.generate("after", prompt, greedy, 0)).tokens != expected.tokens:
            raise Wrong(f"level {level}: the greedy response after waking up is another one")
        if asleep > used - 100 * MB:
            raise Wrong(f"level {level}: the engine frees no memory asleep")


def _used_bytes() -> int:
    """Of the whole GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_experts(machine: Machine, figures: Figures) -> None:
    """vLLM returns the experts of each token (`trainer.router_replay`). With them the trainer's logprobs of
    what vLLM has sampled are nearer to vLLM's than with experts that the trainer chooses itself."""
    asyncio.run(_experts(machine, figures))


async def _experts(machine: Machine, figures: Figures) -> None:
    model, replays = _mixture(machine), TrainerSection(router_replay=True)
    profile = _profile(machine).model_copy(update={"trainer": replays})
    prompts = prompts_of(model, SLOTS)
    with trainer_on(machine, model, profile) as trainer:
        try:
            async with vllm_on(machine, model, profile) as engine:
                _, completions = await generate_all(engine, prompts, RESPONSE_TOKENS)
        except ConfigError as refused:
            if machine.is_gpu:
                raise
            raise Skipped(refused.message) from refused
        routing, differ, diffs = trainer.model._forward.routing, [], dict[str, list[Any]]()
        routing.recorded = {}
        for prompt, completion in zip(prompts, completions, strict=True):
            versions = [NOT_SAMPLED] * len(prompt) + completion.versions
            logprobs = [0.0] * len(prompt) + completion.logprobs
            segment = segment_of(prompt + completion.tokens, logprobs, versions)
            rows = [*completion.prompt_fields[ROUTED_EXPERTS], *completion.fields[ROUTED_EXPERTS]]
            theirs = np.stack(rows).reshape(len(versions), routing.num_layers, routing.top_k)
            for name, experts in (("with", theirs), ("without", np.full_like(theirs, -1))):
                arrays = {**segment, ROUTED_EXPERTS: experts.reshape(len(versions), -1)}
                one = trajectory_of([arrays], BUILT_IN, reward=0.0, finish_reason="stop")
                payload = GroupPayload(uid=name, epoch=0, attempt=0, trajectories=(one,))
                ((found,),) = trainer.model.column({0: payload}).values()
                diffs.setdefault(name, []).append(np.abs(found - completion.logprobs))
            ours = torch.stack([routing.recorded[layer] for layer in range(routing.num_layers)], 1)
            ours = ours.sort(-1).values.numpy(force=True)
            differ.append((ours != np.sort(theirs[:-1], -1)).any(-1))
    figures["tokens_of_other_experts"] = float(np.concatenate(differ).any(-1).mean())
    figures["other_choices"] = float(np.concatenate(differ).mean())
    for name, parts in diffs.items():
        figures[f"diff_{name}"] = float(np.concatenate(parts).mean())
        figures[f"largest_{name}"] = float(np.concatenate(parts).max())
    if not figures["diff_with"] <= MAX_LOGPROB_DIFF[profile.model.dtype]:
        raise Wrong(f"with vLLM's experts, logprobs differ from vLLM's by {figures['diff_with']:.4f}")
    if figures["other_choices"] and figures["diff_with"] >= figures["diff_without"]:
        raise Wrong("with vLLM's experts, logprobs are not nearer to vLLM's")


def _mixture(machine: Machine) -> RandomModel:
    """A random Qwen3-MoE. The spread of its weights keeps the sizes of activations from layer to layer."""
    from transformers import Qwen3MoeConfig

    sizes = (512, 8, 64, 8, 32_768) if machine.is_gpu else (64, 3, 16, 4, 256)
    hidden, layers, experts, top_k, vocab_size = sizes
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        moe_intermediate_size=hidden,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        initializer_range=SPREAD / hidden**0.5,
        **OTHER_SETTINGS,
    )
    directory = machine.directory / "mixture"
    save_random(config, directory, torch.device(machine.device))
    return RandomModel(
        directory=directory, parameters=3 * layers * experts * hidden**2, vocab_size=vocab_size
    )


def check_colocate(machine: Machine, figures: Figures) -> None:
    """`asyncrl train --profile colocate` with vLLM: trainer and rollouts take turns on the one GPU for three
    train steps; with the object store, then with `ipc`."""
    need_gpu(machine)
    for transport in ("object-store", "ipc"):
        line = _colocated(transport)
        names = ("timing/step_s", "sync/pause_s", "sync/logprob_abs_diff")
        figures |= {f"{transport}_{name}": line[name] for name in names if name in line}


def _colocated(transport: str) -> dict[str, Any]:
    """The last line of the run's metrics."""
    settings = {
        "weights.transport": transport,
        "placement.gpus": 1,
        "rollout.engine": "vllm",
        "rollout.gpu_memory_utilization": GPU_SHARE,
        "placement.device": "cuda",
        "run.train_steps": TRAIN_STEPS,
    }
    with tempfile.TemporaryDirectory() as runs_dir:
        command = [
            sys.executable,
            "-m",
            "asyncrl_cli",
            "train",
            "--profile",
            "colocate",
            "--name",
            "smoke",
            "--ui",
            "none",
        ]
        command += [
            "--runs-dir",
            runs_dir,
            *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TRAIN_TIMEOUT_S, check=False)
        if ended.returncode:
            raise Wrong(
                f"asyncrl train exited with {ended.returncode}: {' '.join(ended.stderr.split())[-400:]}"
            )
        lines = [
            json.loads(line) for line in (Path(runs_dir) / "smoke" / "metrics.jsonl").read_text().splitlines()
        ]
    if lines[-1]["step"] != TRAIN_STEPS:
        raise Wrong(f"the run ended after train step {lines[-1]['step']} of {TRAIN_STEPS}")
    last: dict[str, Any] = lines[-1]
    return last

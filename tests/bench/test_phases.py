"""Each phase alone, in actors of its own: what is measured."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.bench.phases import Side, measure_all, side_of
from asyncrl_cli.job.alone import NO_SUCH_TOKEN, Alone, CpuTime, endless_model
from asyncrl_cli.models.resolve import resolve_model
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.compiling import compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.tasks.task import load_task

LAPTOP = ClusterResources(nodes=(NodeResources(name="local", cpus=2),), elastic_cpus=True)
SPLIT = ("on-policy-pipeline", "stream-off-policy", "stale-samples", "partial-rollout", "one-step-off")
SMALL = (
    "task.train_prompts=40",
    "eval.prompts=10",
    "model.warm_start_steps=2",
    "rollout.slots=16",
    "trainer.ppo_mini_batch_size=2",
)


def spent_s_of(program: str, threads: int) -> float:
    """CPU seconds that `CpuTime` counts for a program from its first line of output to its second. It has a
    process of its own, because other tests may have left threads and children in this one."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as burning:
        assert burning.stdin is not None
        assert burning.stdout is not None
        burning.stdout.readline()
        cpu = CpuTime(threads, burning.pid)
        burning.stdin.write(b"\n")
        burning.stdin.flush()
        assert burning.stdout.readline()
        spent_s = cpu.spent_s()
        burning.kill()
    return spent_s


TAKE_TURNS = """
import sys, threading, time
burned = threading.Barrier(3)
def burn():
    while time.thread_time() < 0.3: pass
    burned.wait()
    sys.stdin.read()
print(flush=True)
sys.stdin.readline()
for _ in range(2): threading.Thread(target=burn).start()
burned.wait()
print(flush=True)
"""


@pytest.mark.slow
def test_the_cpu_time_of_two_threads_that_take_turns_is_that_of_one() -> None:
    """As of two with half a core each: 0.6 CPU seconds in 0.6 s are not all that two threads could have
    had."""
    assert spent_s_of(TAKE_TURNS, threads=2) == pytest.approx(0.3, abs=0.05)


ALONE = """
import sys, time
print(flush=True)
sys.stdin.readline()
began_s = time.process_time()
while time.process_time() - began_s < 0.2: pass
print(flush=True)
sys.stdin.read()
"""


def test_the_cpu_time_of_one_thread_is_all_that_the_process_computes() -> None:
    assert spent_s_of(ALONE, threads=1) == pytest.approx(0.2, abs=0.05)


A_CHILD = """
import subprocess, sys
burn = "import sys, time\\nwhile time.process_time() < 0.4: pass\\nprint(flush=True)\\nsys.stdin.read()"
print(flush=True)
sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(flush=True)
sys.stdin.read()
"""


def test_the_cpu_time_of_a_child_counts_too() -> None:
    """Where an engine computes; here all at once, so that the busiest process is that child."""
    assert spent_s_of(A_CHILD, threads=1) == pytest.approx(0.4, abs=0.05)


def test_an_endless_model_is_the_model_without_an_end_of_sequence(tmp_path: Path) -> None:
    original = tmp_path / "model"
    original.mkdir()
    (original / "model.safetensors").write_bytes(b"weights")
    (original / "generation_config.json").write_text('{"eos_token_id": 1, "pad_token_id": 0}')
    endless = endless_model(original, tmp_path / "endless")
    assert (endless / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((endless / "generation_config.json").read_text()) == {
        "eos_token_id": NO_SUCH_TOKEN,
        "pad_token_id": 0,
    }
    assert json.loads((original / "generation_config.json").read_text())["eos_token_id"] == 1


@pytest.mark.parametrize("split", SPLIT)
def test_colocate_computes_with_everything_in_both_phases(split: str) -> None:
    """On every number of cores or GPUs that the split side may have: workers x threads, and slots."""
    profiles = load(split).profile, load("colocate").profile
    apart, together = (compile_job(profile, LAPTOP) for profile in profiles)
    everything = sum(role.workers * role.threads for role in apart.roles)
    for name in (TRAINER, ROLLOUT):
        role = together.role(name)
        assert role.workers * role.threads == everything
    slots = [
        plan.role(ROLLOUT).workers * profile.rollout.slots
        for plan, profile in zip((apart, together), profiles, strict=True)
    ]
    assert slots[1] >= slots[0]
    assert together.cpus == apart.cpus


def test_profiles_of_the_same_resources_are_the_same_side() -> None:
    def side(name: str, *sets: str) -> Side:
        profile = load(name, (*SMALL, *sets)).profile
        return side_of(profile, compile_job(profile, LAPTOP))

    assert side("partial-rollout") == side("stream-off-policy") == side("one-step-off")
    assert side("partial-rollout") != side("colocate")
    assert side("partial-rollout") != side("partial-rollout", "rollout.slots=32")
    # A window's length says how often old logprobs are taken of older weights: it matters to training only if
    # there are any.
    windows_of_2 = "async_training.trigger_parameter_sync_step=2"
    assert side("partial-rollout", windows_of_2) == side("partial-rollout")
    recompute = "algorithm.old_logprobs=recompute"
    assert side("partial-rollout", recompute, windows_of_2)[0].async_training.trigger_parameter_sync_step == 2


def rates_told(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[list[tuple[float, float]]]]:
    """What `Alone` measures. Of each training, the first of which is a warm-up: tokens per second. Of each
    generation: tokens per second and the share of slots in use, for each worker."""
    trained: list[float] = []
    generated: list[list[tuple[float, float]]] = []
    train, ask = Alone.train, Alone._ask

    async def telling_train(alone: Alone, at_least_s: float = 0.0) -> float:
        trained.append(await train(alone, at_least_s))
        return trained[-1]

    async def telling_ask(alone: Alone, call: str) -> list[Any]:
        answers = await ask(alone, call)
        if call == "end":
            generated.append(answers)
        return answers

    monkeypatch.setattr(Alone, "train", telling_train)
    monkeypatch.setattr(Alone, "_ask", telling_ask)
    return trained, generated


@pytest.mark.slow
def test_figures_count_forced_lengths_and_full_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = (*SMALL, f'model.cache_dir="{tmp_path}"')
    profile = load("partial-rollout", sets).profile
    task = load_task(profile)
    told: list[tuple[str, int, int]] = []
    trained, generated = rates_told(monkeypatch)
    sides = {"one": side_of(profile, compile_job(profile, LAPTOP))}
    model_dir = resolve_model(profile, task)
    measured = measure_all(
        sides,
        model_dir,
        task.train,
        [5, 20],
        repeats=1,
        progress=lambda text, done, total: told.append((text, done, total)),
    )
    figures = measured["one"]
    capacities = figures.capacities
    (alone, slots_used), (beside, _) = (zip(*answers, strict=True) for answers in generated)
    assert (capacities.rollout_tokens_per_s, capacities.rollout_beside_tokens_per_s) == (
        sum(alone),
        sum(beside),
    )
    assert (capacities.trainer_tokens_per_s, capacities.trainer_beside_tokens_per_s) == tuple(trained[1:])
    assert min(*alone, *beside, *trained) > 0
    assert figures.slots_used == statistics.fmean(slots_used)
    assert figures.slots_used > 0.8, "on a busy machine a free slot gets its next response a little later"
    assert not capacities.colocated
    assert [(done, total) for text, done, total in told if text.endswith("each phase alone")] == [
        (0, 0),
        (0, 2),
        (1, 2),
        (1, 2),
    ]
    assert [(done, total) for _, done, total in told[-4:]] == [(1, 4), (2, 4), (3, 4), (4, 4)]

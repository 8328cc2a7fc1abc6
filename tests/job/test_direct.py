"""`nccl` and `ipc` between the driver, rank 0's actor and a worker's, without Ray and without a GPU: who is
told what, and when."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from benchmarks.local_store import LocalStore
from ray.exceptions import ActorDiedError

from asyncrl_cli.base.errors import ConfigError, ExecutorFailed, ExecutorLost
from asyncrl_cli.base.named_code import engine_kind
from asyncrl_cli.engines.vllm.engine_processes import END_TIMEOUT_S
from asyncrl_cli.engines.vllm.launch import set_environment, weight_backend
from asyncrl_cli.engines.vllm.rank_zero import NcclLinks
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.job import driver_rollout, rank_host, rollout_weights
from asyncrl_cli.job.driver_ranks import RayTrainer
from asyncrl_cli.job.driver_rollout import RayRolloutWorker
from asyncrl_cli.job.rank_host import RankHost
from asyncrl_cli.job.ray.calls import Limit
from asyncrl_cli.job.rollout_weights import Loader, RayRankZero
from asyncrl_cli.measure.meters import RolloutMeter, TrainerMeter
from asyncrl_cli.models.shape import shape_of_directory
from asyncrl_cli.plan.compiler import compile_job, cuda_counts
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from asyncrl_cli.plan.memory import estimate_memory
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.schema import ProcessPlace, Profile, WeightsSection
from asyncrl_cli.train.ranks import device_of
from asyncrl_cli.weights.buckets import fingerprint
from asyncrl_cli.weights.receivers import AnnouncedWeights
from asyncrl_cli.weights.versions import WORKER_MARGIN_S, Manifest, Meeting, all_loads_s
from tests.engines.vllm.in_process_ends import WAIT_S, Exchange, InProcessGroup
from tests.job.crew import make_model, nodes, small_profile
from tests.packed import pack
from tests.trainers import trainer_parts

WORKER = "rollout-0"
DEVICE = {"device": "cuda"}
SMALL_BUCKETS = 8192


def direct_profile(transport: str, **placement: Any) -> Profile:
    weights = {"transport": transport, "timeout_s": 20.0, "load_bucket_size_mb": 3}
    return small_profile(placement=DEVICE | placement, rollout={"engine": "vllm"}, weights=weights)


def remote(call: Callable[..., Any]) -> Any:
    """An actor's method: called by `remote`, awaited by who asked."""

    def submit(*args: Any) -> Any:
        return asyncio.ensure_future(asyncio.to_thread(call, *args))

    return SimpleNamespace(remote=submit)


# --- rank 0's actor


EXCHANGE = Exchange()


def in_process_nccl(weights: WeightsSection, held: Any, device: torch.device) -> NcclLinks:
    assert device.type == "cpu"  # this test's trainer
    return NcclLinks(held, lambda meeting: InProcessGroup(EXCHANGE, meeting), timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Rank 0 with a real trainer, not in Ray."""
    directory = tmp_path_factory.mktemp("direct")
    parts = trainer_parts(make_model(directory / "model"), gather_bucket_size_mb=SMALL_BUCKETS / 2**20)
    weights = parts.profile.weights.model_copy(update={"transport": "nccl"})
    rollout = parts.profile.rollout.model_copy(update={"engine": "vllm"})
    profile = parts.profile.model_copy(update={"weights": weights, "rollout": rollout})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_host, "set_up_process", lambda **_: None)  # this process is the test's
        kind = replace(engine_kind("vllm"), rank_zero_end=in_process_nccl)
        patch.setattr(rank_host, "kind_of", lambda profile: kind)
        rank_zero = RankHost(0, "trainer", profile, parts.place, directory, log_path=directory / "log")
        rank_zero.start(f"file://{directory}/meet", ["here"])
    yield rank_zero
    rank_zero.stop()


def test_a_gathered_version_leaves_rank_zero_bit_by_bit_until_it_is_wanted_no_more(actor):
    actor.gather(1)
    manifest, layouts = actor.publish(1)
    assert len(layouts) == len(manifest.fingerprints) > 2
    assert [type(layout).__name__ for layout in layouts] == ["tuple"] * len(layouts)  # no bytes
    chosen = AnnouncedWeights(layouts).chosen({entry.spec.name for layout in layouts for entry in layout})
    names = {spec.name: name for name, spec in chosen}
    host, port = EXCHANGE.meeting_point()
    meeting = Meeting(host=host, port=port, world_size=2, wire_bytes=1)
    with ThreadPoolExecutor() as threads:
        came = threads.submit(EXCHANGE.pipe(port).met.wait, WAIT_S)
        actor.direct("join", WORKER, meeting)
        came.result()
        model = actor.trainer.model
        expected = {name: tensor.clone() for name, tensor in model.sent()}
        for version in (2, 3):  # a worker that is still at version 1 keeps it
            actor.gather(version, [1])
            actor.publish(version)
        sending = threads.submit(actor.direct, "broadcast", WORKER, 1, names)
        got = dict(EXCHANGE.pipe(port).slot.get(timeout=WAIT_S) for _ in names)
        sending.result(WAIT_S)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    actor.gather(4, [3])
    with pytest.raises(ValueError, match=r"rank 0 holds only .* of version 1"):
        actor.direct("broadcast", WORKER, 1, names)
    actor.leave(WORKER)
    assert EXCHANGE.pipe(port).destroyed.wait(WAIT_S)


# --- the driver


class Driver:
    """A trainer and a worker on actors that note their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: str = "nccl") -> None:
        self.calls: list[Any] = []
        monkeypatch.setattr(ray, "kill", lambda actor: self.calls.append("kill"))
        report = TrainerMeter("trainer", "trainer-0", (), lambda: 0.0).report()
        self.trainer_actor = SimpleNamespace(
            gather=remote(
                lambda version, wanted: self.calls.append(("gather", version, wanted)) or (0.5, report)
            ),
            publish=remote(
                lambda version: (
                    Manifest(version=version, num_bytes=1, fingerprints=(1,), temperature=1.0),
                    [()],
                )
            ),
            leave=remote(lambda worker: self.calls.append(("leave", worker))),
        )
        profile = direct_profile(transport)
        self.trainer = RayTrainer(
            lambda: [self.trainer_actor], profile, LocalStore(), samples_dir=Path("samples")
        )
        self.worker = RayRolloutWorker(WORKER, self._make_actor, profile, LocalStore())

    def _make_actor(self) -> Any:
        self.calls.append("made")
        return SimpleNamespace(
            __ray_ready__=remote(lambda: True),
            start=remote(lambda: self.calls.append("started") or ("", "", [])),
            connect=remote(lambda actor: self.calls.append(("connect", actor is self.trainer_actor))),
        )


def test_a_restarted_worker_leaves_rank_zero_before_its_successor_is_made_and_meets_it_again(monkeypatch):
    there = Driver(monkeypatch)

    async def body() -> None:
        await there.worker.connect(there.trainer_actor)
        await there.worker.restart()

    asyncio.run(body())
    assert there.calls == [
        "made",
        ("connect", True),
        "kill",
        ("leave", WORKER),
        "made",
        "started",
        ("connect", True),
    ]


def test_rank_zero_hears_at_once_of_a_worker_that_is_lost(monkeypatch):
    there = Driver(monkeypatch)

    def died(version: int, interrupt: str) -> None:
        raise ActorDiedError

    async def body() -> None:
        await there.worker.connect(there.trainer_actor)
        there.worker.actor.load = remote(died)
        with pytest.raises(ExecutorLost, match="its process ended during the load of version 3"):
            await there.worker.load(3, "keep-kv")
        while ("leave", WORKER) not in there.calls:  # noqa: ASYNC110  (nobody awaits that call)
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(body(), WAIT_S))


@pytest.mark.parametrize("interrupt", ["keep-kv", "drain"])
@pytest.mark.parametrize("workers", [1, 3])
def test_each_wait_outlasts_the_waits_inside_it_so_that_who_knows_most_speaks_first(
    workers, interrupt, monkeypatch
):
    timeout_s = 20.0  # direct_profile
    limits: dict[str, float] = {}

    async def answer(ref: Any, *, call: str, limit: Limit, **_: Any) -> Any:
        limits[call.partition(" of ")[0]] = limit.seconds or 0.0
        return "10.0.0.7", 2345

    for module in (driver_rollout, rollout_weights):
        monkeypatch.setattr(module, "answer", answer)
    profile = direct_profile("nccl")
    methods = ("direct", "leave", "load", "connect", "free_address")
    actor: Any = SimpleNamespace(**dict.fromkeys(methods, remote(lambda *args: None)))

    async def body() -> None:
        link = RayRankZero(actor, WORKER, timeout_s, workers)
        await link.meeting_point()
        await link.turn()
        await link.broadcast(1, {})
        await link.join(Meeting(host="10.0.0.7", port=2345, world_size=2, wire_bytes=1))
        await link.leave()
        worker = RayRolloutWorker(WORKER, lambda: actor, profile, LocalStore(), workers)
        await worker.connect(actor)
        await worker.load(1, interrupt)

    asyncio.run(body())
    rank_zeros_turn_s, own_s = workers * timeout_s, timeout_s + WORKER_MARGIN_S  # NcclLinks; NcclWay
    after_s = limits["the leave"] + END_TIMEOUT_S  # of a transfer that failed
    assert rank_zeros_turn_s < limits["turn for rollout-0"]
    assert timeout_s < own_s < limits["broadcast for rollout-0"] == limits["join for rollout-0"]
    assert limits["an address"] + own_s + after_s < limits["its connection to trainer-0"]
    assert limits["turn for rollout-0"] + own_s + after_s < limits["the load"]
    partial = {"partial_rollout": interrupt != "drain", "staleness_threshold": 0.5}
    changed = profile.model_copy(update={"async_training": profile.async_training.model_copy(update=partial)})
    settings = LoopSettings.of(changed, all_loads_s(changed.weights, workers))
    assert settings.interrupt == interrupt
    assert limits["the load"] < settings.sync_timeout_s < settings.stall_timeout_s


def test_a_meeting_that_takes_too_long_says_what_can_be_typed(monkeypatch):
    there = Driver(monkeypatch)
    monkeypatch.setattr(driver_rollout, "DRIVER_MARGIN_S", 0.25 - 20.0)

    async def body() -> None:
        there.worker.actor.connect = SimpleNamespace(remote=lambda actor: asyncio.sleep(WAIT_S))
        with pytest.raises(ExecutorLost) as caught:
            await there.worker.connect(there.trainer_actor)
        assert str(caught.value) == (
            "rollout-0 failed: its connection to trainer-0 took longer than 0.25 s (by weights.timeout_s = "
            "20 s)"
        )
        assert caught.value.hint.endswith("--set weights.timeout_s=...")

    asyncio.run(body())


def test_a_restart_with_another_transport_asks_rank_zero_nothing(monkeypatch):
    there = Driver(monkeypatch)
    asyncio.run(there.worker.restart())
    assert there.calls == ["made", "kill", "made", "started"]


def test_each_gather_tells_rank_zero_which_versions_somebody_still_holds(monkeypatch):
    there = Driver(monkeypatch)

    async def body() -> None:
        published = {}
        for version in (1, 2):
            await there.trainer.gather(version)
            published[version] = await there.trainer.publish(version)
        await there.trainer.gather(3)
        del published[1]
        gc.collect()
        await there.trainer.gather(4)

    asyncio.run(body())
    gathers = [call for call in there.calls if call[0] == "gather"]
    assert gathers == [("gather", 1, []), ("gather", 2, [1]), ("gather", 3, [1, 2]), ("gather", 4, [2])]


# --- a worker's actor


def test_a_worker_notes_a_version_and_its_engine_asks_rank_zero_within_the_load():
    profile = direct_profile("nccl", trainer_workers=1)
    asked: list[Any] = []
    rank_zero = SimpleNamespace(
        free_address=remote(lambda: ("10.0.0.7", 2345)),
        direct=remote(lambda call, worker, *args: asked.append((call, worker, *args)) or {"part": 0}),
        leave=remote(lambda worker: asked.append(("leave", worker))),
    )

    async def connect(link: RayRankZero) -> None:
        assert await link.meeting_point() == ("10.0.0.7", 2345)
        await link.turn()
        await link.broadcast(7, {"a": "b"})
        assert await link.export(7, {"a": "b"}, 0) == {"part": 0}
        await link.leave()

    (bucket,) = pack({"a": torch.zeros(4)}, 64)
    manifest = Manifest(version=3, num_bytes=16, fingerprints=(fingerprint(bucket),), temperature=1.0)

    async def body() -> Any:
        await connect(RayRankZero(rank_zero, WORKER, profile.weights.timeout_s, 1))
        meter = RolloutMeter(WORKER, 1, lambda: 0.0, lambda: None)
        loader = Loader(SimpleNamespace(), profile.weights, meter, 2, Slots(1, hold=True))
        await loader.prefetch(manifest, [bucket.entries])
        return loader.received

    received = asyncio.run(body())
    named = (WORKER, 7, {"a": "b"})
    assert asked == [("turn", WORKER), ("broadcast", *named), ("export", *named, 0), ("leave", WORKER)]
    assert isinstance(received.weights, AnnouncedWeights)
    assert {name: tensor.device.type for name, tensor in received.weights.items()} == {"a": "meta"}


@pytest.mark.parametrize(
    ("transport", "backend"), [("nccl", "nccl"), ("ipc", "ipc"), ("object-store", "asyncrl-buckets")]
)
def test_vllm_is_started_with_the_engine_that_receives_this_transport(
    transport, backend, tmp_path, monkeypatch
):
    profile = direct_profile(transport, **({"colocate": True, "gpus": 1} if transport == "ipc" else {}))
    assert weight_backend(profile) == backend
    environment = {"PATH": "/bin"}
    monkeypatch.setattr(os, "environ", environment)
    set_environment(profile, ProcessPlace(model_dir=str(tmp_path), device="cuda"))
    assert environment.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == ("1" if transport == "ipc" else None)


def test_what_rank_zero_fails_in_is_told_with_its_name():
    def fails(*args: Any) -> None:
        raise ExecutorFailed(
            "rank 0 waited for rollout-0's vLLM processes to take version 3: longer than "
            "weights.timeout_s = 20 s"
        )

    async def body() -> None:
        link = RayRankZero(SimpleNamespace(direct=remote(fails)), WORKER, 20.0, 1)
        with pytest.raises(
            ExecutorFailed, match="rank 0 waited for rollout-0's vLLM processes to take version 3"
        ):
            await link.broadcast(3, {})

    asyncio.run(body())


# --- counts and memory


def test_ipc_shares_one_gpu_only():
    four = nodes((16, 4))
    for placement, hint in (
        ({}, "placement.gpus=1"),
        ({"trainer_workers": 2}, "placement.trainer_workers=1"),
    ):
        with pytest.raises(ConfigError, match=r'weights.transport = "ipc" with [24] GPUs') as caught:
            cuda_counts(direct_profile("ipc", colocate=True, **placement), four)
        assert f"--set {hint}" in caught.value.hint
    assert cuda_counts(direct_profile("ipc", colocate=True, gpus=1), four) == (1, 1)


def test_the_memory_estimate_counts_what_weights_pass_through_on_the_gpus(tmp_path):
    shape = shape_of_directory(make_model(tmp_path))
    largest = 4 * shape.hidden_size * max(shape.vocab_size, shape.intermediate_size)

    def wires(profile: Profile) -> dict[str, int]:
        estimate = estimate_memory(profile, compile_job(profile, nodes((16, 4))), shape)
        found = {item.role: item for item in estimate.items if item.what == "wire buffers"}
        assert all(item.kind == "device" for item in found.values())
        assert not [item for item in estimate.items if item.what == "load buffer"] or not found
        return {role: item.total_bytes for role, item in found.items()}

    apart = direct_profile("nccl", trainer_workers=2)
    apart = apart.model_copy(update={"rollout": apart.rollout.model_copy(update={"workers": 2})})
    mb = 2**20
    assert wires(apart) == {TRAINER: 3 * (3 * mb + largest), ROLLOUT: 2 * 2 * (3 * mb + largest)}
    assert wires(direct_profile("ipc", colocate=True, gpus=1)) == {TRAINER: 3 * mb, ROLLOUT: 3 * mb}
    assert wires(small_profile(placement=DEVICE)) == {}


def test_a_gpu_without_a_number_is_the_first_one():
    found = {
        device: device_of(ProcessPlace(model_dir="", device=device)) for device in ("cuda", "cuda:3", "cpu")
    }
    assert found == {
        "cuda": torch.device("cuda:0"),
        "cuda:3": torch.device("cuda:3"),
        "cpu": torch.device("cpu"),
    }

"""Loads by `nccl` and `ipc` without a GPU: our infos in vLLM's own classes, its packing, its reload of tied
layers, and the engine's whole path (pause, bytes from rank 0, version, resume, failure) with in-process ends
for NCCL groups and CUDA handles."""

from __future__ import annotations

import asyncio
import base64
import inspect
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, ExecutorLost
from asyncrl_cli.engines.vllm import worker_transports
from asyncrl_cli.engines.vllm.rank_zero import IpcExports, NcclGroup, NcclLinks, produce_on, update_info
from asyncrl_cli.engines.vllm.vllm_engine import VllmEngine
from asyncrl_cli.engines.vllm.worker_transports import Nccl, nccl_init_info, nccl_update_info
from asyncrl_cli.models.saved_form import SavedForm, skeleton
from asyncrl_cli.profile.schema import Interrupt, WeightsSection
from asyncrl_cli.weights.buckets import Layout
from asyncrl_cli.weights.receivers import AnnouncedWeights
from asyncrl_cli.weights.senders import HeldVersions
from asyncrl_cli.weights.versions import Manifest, Meeting, send
from tests.engines import tiny
from tests.engines.made import made_for, sampling
from tests.engines.needs import runs_vllm
from tests.engines.vllm.in_process_ends import (
    WAIT_S,
    Exchange,
    InProcessChunk,
    InProcessGroup,
    InProcessLlm,
    InProcessMemory,
    InProcessRankZero,
)
from tests.engines.vllm.vllm_world import world
from tests.packed import pack
from tests.waiting import until

pytestmark = runs_vllm
MEETING = Meeting(host="10.0.0.7", port=29511, world_size=3, wire_bytes=2**27)


def layouts_of(held: HeldVersions, version: int, weights: dict[str, torch.Tensor]) -> list[Layout]:
    buckets = pack(weights, 300_000)
    manifest = Manifest(version=version, num_bytes=0, fingerprints=(0,) * len(buckets), temperature=1.0)
    return send(held, manifest, buckets)


def test_vllms_nccl_engine_understands_our_infos() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferEngine,
        NCCLWeightTransferInitInfo,
    )

    engine = object.__new__(NCCLWeightTransferEngine)
    init_info = engine.parse_init_info(nccl_init_info(MEETING))
    assert isinstance(init_info, NCCLWeightTransferInitInfo)
    address = (init_info.master_address, init_info.master_port)
    assert (*address, init_info.rank_offset, init_info.world_size) == ("10.0.0.7", 29511, 1, 3)
    assert init_info.packed
    assert (init_info.packed_buffer_size_bytes, init_info.packed_num_buffers) == (2**27, 2)
    weights = tiny.weights_after(tiny.make_model(tied=True), 1)
    chosen = AnnouncedWeights(layouts_of(HeldVersions(), 1, weights)).chosen(
        weights.keys() - {"lm_head.weight"}
    )
    info = engine.parse_update_info(nccl_update_info(chosen))
    assert dict(zip(info.names, info.shapes, strict=True)) == {
        name: list(tensor.shape) for name, tensor in weights.items() if name != "lm_head.weight"
    }
    assert set(info.dtype_names) == {"float32"}


def test_vllms_ipc_engine_understands_our_infos(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    engine = object.__new__(IPCWeightTransferEngine)
    assert engine.parse_init_info({"packed": True}).packed
    handle = {"GPU-1": (torch.Tensor, torch.Size([4]), b"handle")}
    chunk = InProcessChunk(
        names=["a"], shapes=[[2, 2]], dtype_names=["bfloat16"], tensor_sizes=[8], ipc_handle=handle
    )
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        engine.parse_update_info(update_info(chunk))
    # as vllm_launch.set_environment does for this backend
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    info = engine.parse_update_info(update_info(chunk))
    assert (info.names, info.shapes) == (["a"], [[2, 2]])
    assert (info.dtype_names, info.tensor_sizes) == (["bfloat16"], [8])
    assert info.ipc_handles == handle
    assert pickle.loads(base64.b64decode(update_info(chunk)["ipc_handles_pickled"])) == handle


def test_our_calls_of_vllms_trainer_side_have_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither can be made without a GPU: here they are bound to vLLM's signatures, and what it would iterate
    over is looked at."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    calls: dict[str, dict[str, Any]] = {}

    def bound(module: Any, name: str, returned: Any) -> None:
        signature = inspect.signature(getattr(module, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = dict(signature.bind(*args, **kwargs).arguments)
            return returned

        monkeypatch.setattr(module, name, call)

    communicator = SimpleNamespace(available=True, destroy=lambda: calls.setdefault("destroy", {}))
    bound(nccl_common, "trainer_init", communicator)
    bound(packed_tensor, "packed_nccl_broadcast_producer", None)
    bound(packed_tensor, "packed_ipc_producer", iter(()))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-1"))
    tensors = {"a": torch.ones(3)}

    group = NcclGroup(MEETING, torch.device("cuda:0"))
    address = {"master_address": "10.0.0.7", "master_port": 29511}
    assert calls["trainer_init"]["init_info"] == {**address, "world_size": 3}
    group.device = torch.device("cpu")
    group.broadcast(iter(tensors.items()))
    broadcast = calls["packed_nccl_broadcast_producer"]
    assert (broadcast["group"], broadcast["src"]) == (communicator, 0)
    # as in nccl_init_info of the same meeting
    assert (broadcast["buffer_size_bytes"], broadcast["num_buffers"]) == (2**27, 2)
    assert [broadcast["post_iter_func"](item) is tensors[item[0]] for item in broadcast["iterator"]] == [True]
    group.destroy()
    assert "destroy" in calls

    assert list(produce_on(torch.device("cuda:0"), iter(tensors.items()), 99)) == []
    exported = calls["packed_ipc_producer"]
    assert (exported["gpu_uuid"], exported["buffer_size_bytes"]) == ("GPU-1", 99)
    assert [exported["post_iter_func"](item) is tensors[item[0]] for item in exported["iterator"]] == [True]

    communicator.available = False
    with pytest.raises(AsyncrlError, match="no NCCL library"):
        NcclGroup(MEETING, torch.device("cuda:0"))


@pytest.mark.parametrize("wire_bytes", [100_000, 250_000, 2**30])
def test_what_vllm_packs_of_rank_zeros_tensors_it_unpacks_by_our_info(wire_bytes: int) -> None:
    """The producer packs what rank 0 yields; the consumer cuts the same bytes by the update info alone."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

    weights = {name: tensor.bfloat16() for name, tensor in tiny.weights_after(tiny.make_model(), 1).items()}
    held = HeldVersions()
    chosen = AnnouncedWeights(layouts_of(held, 1, weights)).chosen(weights.keys())
    info = nccl_update_info(chosen)
    sent = held.tensors(1, {spec.name: name for name, spec in chosen})
    dtypes = [getattr(torch, name) for name in info["dtype_names"]]
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(info["shapes"], dtypes, strict=True)
    ]
    first, got, packs = 0, {}, 0
    while (chunk := pack_tensors(sent, lambda item: item[1], wire_bytes)) is not None:
        last, total = first, 0
        # as packed_nccl_broadcast_consumer sizes its next buffer
        while last < len(sizes) and total <= wire_bytes:
            total += sizes[last]
            last += 1
        assert chunk.packed_tensor.nbytes == total
        part = slice(first, last)
        got |= dict(
            unpack_tensor(
                chunk.packed_tensor, info["names"][part], info["shapes"][part], dtypes[part], sizes[part]
            )
        )
        first, packs = last, packs + 1
    assert packs == 1 if wire_bytes == 2**30 else packs > 3
    assert got.keys() == weights.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())


def test_vllms_reload_puts_new_bytes_under_a_tied_layer_that_keeps_no_packed_copy() -> None:
    """As on GPUs: the head gets no bytes of its own, it is the embedding's storage."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    model.requires_grad_(False)
    record_metadata_for_reloading(model)
    storage, new = model["embed"].weight.data_ptr(), torch.arange(32.0).reshape(8, 4)
    initialize_layerwise_reload(model)
    parameter = dict(model.named_parameters())["embed.weight"]
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, new)
    finalize_layerwise_reload(model, None)
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.data_ptr() == storage
    assert torch.equal(model["head"](torch.eye(4)), new.T)


class Direct:
    """An engine whose vLLM is in-process, and rank 0 with versions 1 and 2."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        model_dir: Path,
        backend: str,
        timeout_s: float = WAIT_S,
        device: str = "cpu",
        colocate: bool = False,
        **llm: Any,
    ) -> None:
        self.exchange, self.memory, self.held = Exchange(), InProcessMemory(), HeldVersions()
        self.weights = {version: tiny.weights_after(model, version) for version in (1, 2)}
        self.layouts = {
            version: layouts_of(self.held, version, weights) for version, weights in self.weights.items()
        }
        self.timeout_s = timeout_s
        if backend == "nccl":
            self.end: Any = NcclLinks(
                self.held, lambda meeting: InProcessGroup(self.exchange, meeting), timeout_s=timeout_s
            )
        else:
            self.end = IpcExports(
                self.held, self.memory.produce, buffer_bytes=100_000, collect=self.memory.collect
            )
        lengths = {"slots": 2, "max_prompt_tokens": 8, "max_response_tokens": 8}
        self.made = made_for(
            model_dir, transport=backend, timeout_s=timeout_s, device=device, colocate=colocate, **lengths
        )
        self.shape = skeleton(model_dir, trust_remote_code=False)
        self.llm = InProcessLlm(self.exchange, self.memory if backend == "ipc" else None, **llm)
        self.engine = self._engine(self.llm)

    def _engine(self, llm: InProcessLlm) -> VllmEngine:
        engine = VllmEngine(*self.made)
        engine.llm, engine.form = llm, SavedForm(self.shape)  # type: ignore[assignment]
        return engine

    async def restarts_and_loads(self, version: int) -> None:
        """A fresh process in the worker's place."""
        self.llm = InProcessLlm(self.exchange, self.memory if self.llm.memory is not None else None)
        self.engine = self._engine(self.llm)
        await self.connect()
        await self.load(version)
        assert self.holds(version)

    async def connect(self) -> None:
        await self.engine.connect(InProcessRankZero(self.end, self.exchange, "rollout-0"))

    async def connected(self) -> Direct:
        await self.connect()
        return self

    async def load(self, version: int, interrupt: Interrupt = "keep-kv") -> Any:
        return await self.engine.load(AnnouncedWeights(self.layouts[version]), version, interrupt)

    def holds(self, version: int) -> bool:
        names = [name for name, _ in self.shape.named_parameters()]
        weights = self.weights[version]
        return self.llm.order == names and all(
            torch.equal(self.llm.weights[name], weights[name]) for name in names
        )


MakeDirect = Callable[..., Direct]


@pytest.fixture
def direct(model: Qwen3ForCausalLM, model_dir: Path) -> MakeDirect:
    return partial(Direct, model, model_dir)


@pytest.mark.parametrize("interrupt", ["drain", "keep-kv", "recompute-kv"])
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
@pytest.mark.parametrize("tied", [False, True])
async def test_each_load_brings_all_bytes_of_its_version_within_one_pause(
    tied: bool, backend: str, interrupt: Interrupt, tmp_path: Path
) -> None:
    model = tiny.make_model(tied=tied)
    there = await Direct(model, tiny.save(model, tmp_path), backend).connected()
    for version in (1, 2):
        there.llm.calls.clear()
        report = await there.load(version, interrupt)
        updates = there.llm.calls.count("update")
        assert there.llm.calls == ["pause", "start", *["update"] * updates, "finish", "resume"]
        assert updates == 1 if backend == "nccl" else updates > 2
        assert there.holds(version)
        assert there.llm.weight_version == str(there.engine.version) == str(version)
        assert report.pause_s >= report.load_s > 0
        assert there.memory.collected == (version if backend == "ipc" else 0)
    assert there.llm.init_info["packed"]
    assert there.llm.init_info.get("world_size") == (2 if backend == "nccl" else None)


async def test_a_colocated_engine_that_cannot_wake_up_has_failed(
    direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wake_up(tags: Sequence[str]) -> None:
        raise RuntimeError("CUDA out of memory")

    there = await direct("ipc", device="cuda", colocate=True).connected()
    await there.engine.sleep()
    monkeypatch.setattr(there.llm, "wake_up", wake_up)
    with pytest.raises(ExecutorFailed, match=r"vLLM's waking up failed half-way: .*CUDA out of memory"):
        await there.engine.wake()
    with pytest.raises(ExecutorFailed, match="out of memory"):
        await there.load(1, "drain")


async def test_a_colocated_engine_gets_its_cache_and_requests_only_after_the_next_load(
    direct: MakeDirect,
) -> None:
    there = await direct("ipc", device="cuda", colocate=True).connected()
    await there.engine.sleep()
    asked = asyncio.create_task(there.engine.gate.entered("a request"))
    await there.engine.wake()
    await asyncio.sleep(0)
    assert not asked.done()
    assert there.llm.calls == ["sleep 2", "wake weights"]
    await there.load(1, "drain")
    assert await asked
    rest = [call for call in there.llm.calls if call != "update"]
    assert rest == ["sleep 2", "wake weights", "pause", "start", "finish", "wake kv_cache", "resume"]
    assert there.holds(1)
    there.llm.calls.clear()
    there.engine.gate.leave()
    await there.load(2, "drain")
    assert "wake kv_cache" not in there.llm.calls


@pytest.mark.parametrize(
    ("interrupt", "is_drained"), [("keep-kv", False), ("recompute-kv", False), ("drain", True)]
)
async def test_generation_goes_on_while_rank_zero_sends_to_another_worker(
    interrupt: Interrupt, is_drained: bool, direct: MakeDirect
) -> None:
    """A drained worker has nothing left to go on with, and its vLLM waits for no bytes meanwhile."""

    there = await direct("nccl").connected()
    other = InProcessLlm(there.exchange)
    rank_zero = InProcessRankZero(there.end, there.exchange, "rollout-1")
    await Nccl(rank_zero, WeightsSection(timeout_s=WAIT_S)).join(other)  # type: ignore[arg-type]
    await rank_zero.turn()
    asks, turn = threading.Event(), there.end.turn
    there.end.turn = lambda worker: (asks.set(), turn(worker))
    loading = asyncio.create_task(there.load(1, interrupt))
    await asyncio.to_thread(asks.wait, WAIT_S)
    asked_s = time.perf_counter()
    await asyncio.wait([loading], timeout=0.2)
    assert there.llm.calls == []
    assert there.engine.gate.is_open != is_drained
    waited_s = time.perf_counter() - asked_s
    await rank_zero.leave()
    report = await loading
    assert there.holds(1)
    if is_drained:
        assert report.pause_s > waited_s + report.load_s  # the wait is a part of the stop


async def test_weights_that_do_not_fit_are_refused_before_the_engine_is_paused(direct: MakeDirect) -> None:
    there = await direct("nccl").connected()
    wrong = dict(there.weights[1])
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:-1]
    there.layouts[1] = layouts_of(there.held, 1, wrong)
    with pytest.raises(ValueError, match=r"do not fit the engine's model: wrong shape model\.norm\.weight"):
        await there.load(1)
    assert there.llm.calls == []
    await there.load(2)
    assert there.holds(2)


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
async def test_a_version_that_rank_zero_does_not_hold_ends_the_engine_by_name(
    backend: str, direct: MakeDirect
) -> None:
    there = await direct(backend).connected()
    there.held.keep([2])
    lacks = r"the transfer of version 1 by .* failed: .*0 of 36 requested tensors of version 1"
    with pytest.raises(ExecutorFailed, match=lacks) as caught:
        # vLLM's processes, which waited for bytes, are gone: nobody waits for them
        await asyncio.wait_for(there.load(1), WAIT_S)
    assert there.llm.killed.is_set()
    assert "resume" not in there.llm.calls
    with pytest.raises(ExecutorFailed) as later:
        await there.load(2)
    assert str(later.value) == str(caught.value)


async def test_processes_that_stop_receiving_half_way_end_both_sides_in_bounded_time(
    direct: MakeDirect,
) -> None:
    there = await direct("nccl", breaks_after=5).connected()
    there.end.timeout_s = 0.5
    with pytest.raises(ExecutorFailed) as caught:
        await asyncio.wait_for(there.load(1), WAIT_S)
    assert str(caught.value) == (
        "loading version 1 into vLLM failed half-way: the transfer of version 1 by NCCL failed: rank 0 "
        "waited for rollout-0's vLLM processes to take version 1: longer than weights.timeout_s = 0.5 s"
    )
    assert there.llm.killed.is_set()
    assert there.engine.version == 0
    group = there.exchange.pipe(there.llm.init_info["master_port"])
    assert await asyncio.to_thread(group.destroyed.wait, WAIT_S)

    there.end.timeout_s = WAIT_S
    await there.restarts_and_loads(2)


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
async def test_a_killed_engine_ends_the_load_and_its_successor_gets_the_newest_version(
    backend: str, direct: MakeDirect
) -> None:
    there = await direct(backend, breaks_after=3).connected()
    if backend == "ipc":
        there.memory.read = lambda info: there.llm.killed.set() or {}  # type: ignore[method-assign, func-returns-value]
    else:
        killing = asyncio.create_task(killed_after(there.llm, 3))
    with pytest.raises(ExecutorFailed, match=r"the transfer of version 2 by .* failed"):
        await there.load(2)
    if backend == "nccl":
        await killing
    there.memory.__dict__.pop("read", None)

    await there.restarts_and_loads(2)


async def killed_after(llm: InProcessLlm, tensors: int) -> None:
    await until(lambda: len(llm.order) >= tensors)
    llm.killed.set()


async def test_a_cancelled_load_ends_both_sides(direct: MakeDirect) -> None:
    there = await direct("nccl", breaks_after=5).connected()
    loading = asyncio.create_task(there.load(1))
    while "update" not in there.llm.calls:  # noqa: ASYNC110  (the other end counts its calls)
        await asyncio.sleep(0.01)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(asyncio.gather(loading)), WAIT_S)
    assert there.llm.killed.is_set()
    pipe = there.exchange.pipe(there.llm.init_info["master_port"])
    assert await asyncio.to_thread(pipe.destroyed.wait, WAIT_S)


async def never(*args: Any) -> None:
    await asyncio.sleep(4 * WAIT_S)


async def at_once(*args: Any) -> None:
    pass


async def test_a_meeting_to_which_vllm_does_not_come_is_told_in_rank_zeros_words(direct: MakeDirect) -> None:
    there = direct("nccl")
    there.end.timeout_s = 0.5
    there.llm.init_weight_transfer_engine = never  # type: ignore[method-assign]
    with pytest.raises(ExecutorFailed) as caught:
        await there.connect()
    assert str(caught.value) == (
        "the meeting by NCCL at in-process:1 failed: rank 0 waited for rollout-0's vLLM processes to meet it "
        "by NCCL: longer than weights.timeout_s = 0.5 s"
    )
    assert there.llm.killed.is_set()


@pytest.mark.parametrize(
    ("rank_zero", "vllm", "missing"),
    [(never, never, "rank 0"), (never, at_once, "rank 0"), (at_once, never, "vLLM's processes")],
)
async def test_a_meeting_that_rank_zero_says_nothing_of_names_who_is_missing(
    rank_zero: Any, vllm: Any, missing: str, direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither end comes: it is rank 0, which would have said that it waits."""
    monkeypatch.setattr(worker_transports, "WORKER_MARGIN_S", 0.0)
    monkeypatch.setattr(InProcessRankZero, "join", rank_zero)

    there = direct("nccl", timeout_s=0.5)
    there.llm.init_weight_transfer_engine = vllm  # type: ignore[method-assign]
    with pytest.raises(ExecutorFailed) as caught:
        await there.connect()
    late = "the meeting by NCCL at in-process:1 took longer than weights.timeout_s = 0.5 s"
    assert str(caught.value) == f"{late}: still waiting for {missing}"
    assert there.llm.killed.is_set()


@pytest.mark.parametrize(
    ("export", "update", "missing"), [(never, at_once, "rank 0"), (None, never, "vLLM's processes")]
)
async def test_a_part_that_does_not_come_through_names_who_is_missing(
    export: Any, update: Any, missing: str, direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def a_part(*args: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(InProcessRankZero, "export", export or a_part)

    there = direct("ipc", timeout_s=0.5)
    there.llm.update_weights = update  # type: ignore[method-assign]
    await there.connect()
    with pytest.raises(ExecutorFailed) as caught:
        await there.load(1)
    late = "the transfer of version 1 by CUDA IPC took longer than weights.timeout_s = 0.5 s"
    why = f"loading version 1 into vLLM failed half-way: {late}: still waiting for {missing}"
    assert str(caught.value) == why


async def test_a_load_that_has_ended_well_stays_so_when_rank_zero_answers_late(
    direct: MakeDirect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def late(self: Any) -> None:
        raise ExecutorLost("trainer-0 failed: the leave of rollout-0 took longer than 10 s")

    monkeypatch.setattr(InProcessRankZero, "leave", late)

    there = await direct("ipc").connected()
    for version in (1, 2):
        await there.load(version)
        assert there.holds(version)
    assert not there.llm.killed.is_set()
    assert caplog.text.count("the leave of rollout-0 took longer than 10 s") == 2


async def test_a_turn_that_does_not_come_fails_the_load_and_the_old_version_goes_on(
    direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: Any) -> None:
        raise AsyncrlError("trainer-0: rank 0 has no NCCL group with rollout-0")

    there = await direct("nccl").connected()
    with monkeypatch.context() as patch:
        patch.setattr(InProcessRankZero, "turn", refused)
        waits = "the wait until rank 0 sends to this worker failed: trainer-0: rank 0 has no"
        with pytest.raises(ExecutorFailed, match=waits):
            await there.load(1)
    assert there.llm.calls == []
    assert there.engine.gate.is_open
    await there.load(2)
    assert there.holds(2)


def test_real_processes_of_vllm_are_ended_when_the_bytes_do_not_come(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    """vLLM itself, on a CPU: its generation fails at once with the transfer's error, and so does every later
    load."""

    class Absent(InProcessRankZero):
        async def turn(self) -> None:
            """At once."""

        async def broadcast(self, version: int, names: Any) -> None:
            raise ExecutorFailed("trainer-0 failed: broadcast for rollout-0: out of memory")

    with world(model, model_dir) as there:

        async def body() -> None:
            held = HeldVersions()
            layouts = layouts_of(held, 1, tiny.weights_after(model, 1))
            links = NcclLinks(held, lambda meeting: InProcessGroup(Exchange(), meeting), timeout_s=WAIT_S)
            absent = Absent(links, Exchange(), "rollout-0")
            there.engine.transport = Nccl(absent, WeightsSection(timeout_s=WAIT_S))
            running = asyncio.create_task(there.generate([5, 6, 7], sampling(256, temperature=0.1)))
            await there.sampled(20)
            began_s = time.monotonic()
            with pytest.raises(
                ExecutorFailed, match=r"version 1 by NCCL failed: trainer-0 failed: .*out of memory"
            ):
                await there.engine.load(AnnouncedWeights(layouts), 1, "keep-kv")
            with pytest.raises(ExecutorFailed, match="version 1 by NCCL failed: trainer-0 failed"):
                await running
            print(f"ended in {time.monotonic() - began_s:.2f} s")
            assert time.monotonic() - began_s < WAIT_S

        there.run(body)

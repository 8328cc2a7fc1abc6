"""Prefetch and load in the actor itself, without Ray: stalls with an engine that only takes time, every bit
with a real one."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl_cli.engines.port import Engine, PauseReport, Scores
from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.job import host_process
from asyncrl_cli.job.host_process import GETS_AHEAD
from asyncrl_cli.job.rollout_weights import Loader, Received
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.measure.states import State
from asyncrl_cli.profile.schema import Interrupt, WeightsSection
from asyncrl_cli.weights.buckets import Bucket, DamagedWeights
from asyncrl_cli.weights.versions import Manifest
from tests.engines import tiny
from tests.engines.made import made_for
from tests.packed import pack

WAIT_S = 30.0
"""A bound on what takes milliseconds."""
FIRST_VERSION = 3


class SlowEngine(Engine):
    """Copying takes 1 s, interrupting 0.5 s, half of them not counted as a stop."""

    stops_to_score = True

    def __init__(self) -> None:
        self.now_s = 0.0

    async def load(self, weights: Any, version: int, interrupt: Interrupt) -> PauseReport:
        self.now_s += 2.0
        return PauseReport(load_s=1.0, pause_s=1.5)

    async def load_in_place(
        self, fetch: Callable[[], Sequence[Bucket]], version: int, interrupt: Interrupt
    ) -> PauseReport:
        began_s = self.now_s
        fetch()
        fetch_s = self.now_s - began_s
        self.now_s += 2.0
        return PauseReport(load_s=1.0, pause_s=1.5 + fetch_s, fetch_s=fetch_s)

    async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
        self.now_s += 0.5
        return Scores(logprobs=[[-1.0, -3.0]], pause_s=0.25)


class Worker(Loader):
    """A rollout worker without Ray: its buckets come from a list."""

    def __init__(self, engine: Any, *, dual_buffer: bool = True, overlap: bool = True) -> None:
        self.now_s: Callable[[], float] = lambda: getattr(engine, "now_s", 0.0)
        self.meter = RolloutMeter("rollout-0", 8, lambda: self.now_s(), lambda: None)
        weights = WeightsSection(dual_buffer=dual_buffer, overlap=overlap)
        super().__init__(engine, weights, self.meter, FIRST_VERSION - 1, Slots(8, hold=True))


@dataclass
class Sent:
    """A ref to a bucket, or to what makes it."""

    bucket: Bucket | Callable[[], Bucket]

    def read(self) -> Bucket:
        return self.bucket() if callable(self.bucket) else self.bucket


def received(manifest: Any) -> Received:
    return Received(manifest=manifest, refs=(), weights={})


def manifest_of(buckets: Sequence[Bucket], version: int) -> Manifest:
    fingerprints = tuple(bucket.fingerprint for bucket in buckets)
    return Manifest(version=version, num_bytes=0, fingerprints=fingerprints, temperature=1.0)


def sent(
    weights: dict[str, torch.Tensor], version: int, bucket_bytes: int = 2**17
) -> tuple[Manifest, list[Sent]]:
    """As it comes out of an object store: read-only."""
    buckets = pack(weights, bucket_bytes)
    for bucket in buckets:
        bucket.data.flags.writeable = False
    return manifest_of(buckets, version), [Sent(bucket) for bucket in buckets]


@pytest.mark.parametrize("interrupt", ["keep-kv", "drain"])
def test_generation_stands_still_for_the_load_and_its_probe(interrupt):
    manifest: Any = SimpleNamespace(
        version=3,
        fingerprint="",
        probe_tokens=((1, 2, 3),),
        probe_logprobs=((-1.0, -2.0),),
        previous_logprobs=(),
        temperature=1.0,
    )
    engine = SlowEngine()
    actor = Worker(engine)
    actor.received = received(manifest)
    actor.meter.running(4)

    report = asyncio.run(actor.load(3, interrupt))

    assert (report.send_s, report.load_s, report.pause_s, report.logprob_abs_diff) == (
        0.0,
        1.0,
        1.75,
        pytest.approx(0.5),
    )
    assert report.logprob_abs_diff_median == pytest.approx(0.5)
    state_s = actor.meter.report(version=3, sampled_tokens=0, decode_steps=0, running_tokens=0).state_s
    drained_s = 2.0 if interrupt == "drain" else 0.0  # sequences that a drain waits for are busy
    assert state_s.get(State.BUSY, 0.0) == drained_s
    assert state_s[State.LOADING] == 2.5 - drained_s


def test_an_engine_that_scores_beside_generation_is_not_called_loading_meanwhile():
    engine = SlowEngine()
    engine.stops_to_score = False
    actor = Worker(engine)
    manifest = replace(manifest_of([], 3), probe_tokens=((1, 2, 3),), probe_logprobs=((-1.0, -2.0),))
    actor.received = received(manifest)
    actor.meter.running(4)

    asyncio.run(actor.load(3, "keep-kv"))

    report = actor.meter.report(version=3, sampled_tokens=0, decode_steps=0, running_tokens=0)
    # the load, and the probes
    assert (report.state_s[State.LOADING], report.state_s[State.BUSY]) == (2.0, 0.5)
    assert report.sums["idle_s"] == 2.0


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_load_tells_whether_the_engine_computes_with_the_new_weights(is_loaded):
    """The version moves each logprob by some 1e-4, far below any limit of the difference itself."""
    old = [-2.0 - index / 10 for index in range(20)]
    new = [logprob + 1e-4 * (-1) ** index for index, logprob in enumerate(old)]

    class Engine(SlowEngine):
        async def score(self, sequences: list[list[int]], temperature: float) -> Scores:
            return Scores(logprobs=[new if is_loaded else old], pause_s=0.0)

    actor = Worker(Engine())
    manifest = Manifest(
        version=4,
        num_bytes=0,
        fingerprints=(),
        temperature=1.0,
        probe_tokens=(tuple(range(21)),),
        probe_logprobs=(tuple(new),),
        previous_logprobs=(tuple(old),),
    )
    actor.received = received(manifest)
    report = asyncio.run(actor.load(4, "keep-kv"))
    assert (report.verdict, report.loaded_share) == (("loaded", 1.0) if is_loaded else ("not loaded", 0.0))
    assert report.logprob_abs_diff == (0.0 if is_loaded else pytest.approx(1e-4))


def test_without_a_second_buffer_the_fetch_is_a_part_of_the_stall():
    engine = SlowEngine()
    actor = Worker(engine, dual_buffer=False)
    manifest, buckets = sent({"a": torch.ones(4), "b": torch.zeros(4)}, 3, 16)

    def comes_late(sent_bucket: Sent) -> Sent:
        def get() -> Bucket:
            engine.now_s += 4.0
            return sent_bucket.read()

        return Sent(get)

    async def main() -> tuple[float, Any]:
        actor.meter.running(4)
        return await actor.prefetch(manifest, [comes_late(bucket) for bucket in buckets]), await actor.load(
            3, "keep-kv"
        )

    _, report = asyncio.run(main())
    assert len(buckets) == 2
    assert (report.send_s, report.load_s, report.pause_s) == (8.0, 1.0, 9.5)
    state_s = actor.meter.report(version=3, sampled_tokens=0, decode_steps=0, running_tokens=0).state_s
    assert state_s[State.LOADING] == 10.0
    assert State.BUSY not in {state for state, seconds in state_s.items() if seconds}


def test_a_taker_that_stops_at_a_bucket_has_only_the_next_ones_fetched(monkeypatch):
    begun: list[int] = []

    class Counting(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            begun.append(len(begun))
            return super().submit(*args, **kwargs)

    monkeypatch.setattr(host_process, "ThreadPoolExecutor", Counting)
    manifest, buckets = sent({name: torch.ones(4) for name in "abcdefgh"}, 3, 16)
    arriving = host_process.arriving(manifest, buckets)
    taken = [next(arriving)]
    assert len(begun) == 1 + GETS_AHEAD < len(buckets) == 8
    taken += arriving
    assert [bucket.entries[0].spec.name for bucket in taken] == list("abcdefgh")
    assert len(begun) == 8


def test_late_and_repeated_manifests_are_refused():
    async def main() -> None:
        weights = {"a": torch.ones(4)}
        actor = Worker(SlowEngine())
        with pytest.raises(ValueError, match="version 2 of the weights is not newer than version 2"):
            await actor.prefetch(*sent(weights, FIRST_VERSION - 1))
        # the very version of the first weights: it verifies them
        await actor.prefetch(*sent(weights, FIRST_VERSION))
        with pytest.raises(ValueError, match="version 3 of the weights is not newer than version 3"):
            await actor.prefetch(*sent(weights, FIRST_VERSION))
        await actor.load(FIRST_VERSION, "keep-kv")
        with pytest.raises(ValueError, match="version 3 of the weights is not newer than version 3"):
            await actor.prefetch(*sent(weights, FIRST_VERSION))
        await actor.prefetch(*sent(weights, 7))  # who missed 4, 5 and 6 takes the newest
        with pytest.raises(ValueError, match="asked to load version 6, which was not received"):
            await actor.load(6, "keep-kv")
        assert (await actor.load(7, "keep-kv")).version == 7

    asyncio.run(main())


def test_a_version_that_arrives_after_a_newer_one_does_not_replace_it():
    async def main() -> None:
        actor, newer_is_here = Worker(SlowEngine()), threading.Event()
        manifest, (one,) = sent({"a": torch.ones(4)}, 5)

        def get() -> Bucket:
            assert newer_is_here.wait(WAIT_S)
            return one.read()

        older = asyncio.create_task(actor.prefetch(manifest, [Sent(get)]))
        await asyncio.sleep(0)
        newer = sent({"a": torch.zeros(4)}, 6)
        await actor.prefetch(*newer)
        newer_is_here.set()
        with pytest.raises(ValueError, match="version 5 of the weights is not newer than version 6"):
            await older
        assert actor.received is not None
        assert actor.received.manifest.version == 6
        assert actor.received.weights is not None
        assert torch.equal(actor.received.weights["a"], torch.zeros(4))

    asyncio.run(main())


# --- a real engine


@asynccontextmanager
async def started(model_dir: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(*made_for(model_dir, slots=4, max_prompt_tokens=16, max_response_tokens=64))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def bits(engine: TransformersEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def assert_holds(engine: TransformersEngine, weights: dict[str, torch.Tensor]) -> None:
    held = bits(engine)
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())


KNOBS = list(itertools.product((True, False), (True, False), (2**17, 2**24)))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_same_bits_arrive_whatever_the_knobs(tied, tmp_path):
    """One engine loads a version per combination: dual_buffer, overlap, gather bucket."""
    model = tiny.make_model(tied=tied)
    model_dir = tiny.save(model, tmp_path)

    async def main() -> None:
        async with started(model_dir) as engine:
            held = FIRST_VERSION - 1
            for version, (dual_buffer, overlap, gather_bytes) in enumerate(KNOBS, FIRST_VERSION):
                actor = Worker(engine, dual_buffer=dual_buffer, overlap=overlap)
                actor.held = held
                weights = tiny.weights_after(model, version)
                interrupts: list[Interrupt] = ["keep-kv", "recompute-kv", "drain"]
                await actor.prefetch(*sent(weights, version, gather_bytes))
                report = await actor.load(version, interrupts[version % 3])
                assert_holds(engine, weights)
                assert engine.version == report.version == actor.held == version
                assert (report.send_s > 0) == (not dual_buffer)
                assert report.pause_s >= report.send_s + report.load_s > 0
                held = version

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dual_buffer", [True, False])
def test_a_damaged_last_bucket_leaves_the_old_version_serving(dual_buffer, overlap, tmp_path):
    model = tiny.make_model()
    model_dir = tiny.save(model, tmp_path)
    manifest, buckets = sent(tiny.weights_after(model, 1), 4)
    assert len(buckets) > 2
    last = buckets[-1].read().data
    last.flags.writeable = True
    last[5] ^= 1

    async def main() -> None:
        async with started(model_dir) as engine:
            actor, before = Worker(engine, dual_buffer=dual_buffer, overlap=overlap), bits(engine)
            if not dual_buffer:
                await actor.prefetch(manifest, buckets)
            arrives = actor.prefetch(manifest, buckets) if dual_buffer else actor.load(4, "recompute-kv")
            with pytest.raises(DamagedWeights, match=f"bucket {len(buckets) - 1} of {len(buckets)}"):
                await arrives
            assert_holds(engine, before)
            assert engine.version == 0
            [answer] = (await engine.score([[2, 3, 4]], 1.0)).logprobs
            assert answer == pytest.approx(
                tiny.plain_logprobs(model, dict(model.state_dict()), [2, 3, 4]), abs=1e-4
            )
            last[5] ^= 1
            await actor.prefetch(manifest, buckets)  # what was refused as damaged may come again whole
            await actor.load(4, "drain")
            assert_holds(engine, tiny.weights_after(model, 1))

    asyncio.run(main())


def test_without_a_second_buffer_weights_that_do_not_fit_change_nothing(tmp_path):
    model = tiny.make_model()
    model_dir = tiny.save(model, tmp_path)
    weights = tiny.weights_after(model, 1)
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]

    async def main() -> None:
        async with started(model_dir) as engine:
            actor, before = Worker(engine, dual_buffer=False), bits(engine)
            await actor.prefetch(*sent(weights, 4))
            with pytest.raises(
                ValueError, match=r"do not fit the engine's model: wrong shape model\.norm\.weight"
            ):
                await actor.load(4, "keep-kv")
            assert_holds(engine, before)
            assert engine.version == 0

    asyncio.run(main())

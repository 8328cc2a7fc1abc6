"""The times of syncs with `[links]`, against a version that travels bucket by bucket over links of nodes."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.costs import Costs
from asyncrl_cli.simulate.simulated_trainer import SharedMachine
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.sync_costs import SyncTimes, sync_times
from asyncrl_cli.simulate.workload import Links
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import run_virtual, simulate
from tests.simulate.test_world import workload

RATES = {"device": 50e6, "node": 10e6, "group": 40e6, "copy": 4e6, "compare": 1e6, "apply": 2e6}
LINKS = Links(**{f"{name}_bytes_per_s": rate for name, rate in RATES.items()}, changed_ratio=0.05)
SIZE = 1e6


def shaped(*sets: str, links: Links | None = LINKS) -> Profile:
    work = workload(links=links and links.model_dump())
    return profile_for(work, "partial-rollout", ["model.dtype=bfloat16", *sets], environ={}).profile


def times(*sets: str, ranks: int = 1, workers: int = 1, gpus: int = 1, links: Links = LINKS) -> SyncTimes:
    syncing = workload().syncing.model_copy(update={"parameter_bytes": SIZE})
    return sync_times(syncing, links, shaped(*sets), ranks=ranks, workers=workers, worker_gpus=gpus)


def sent_over_links(sources: int, targets: int, node: float, arrival: float, buckets: int = 4000) -> float:
    """When the last target has all buckets. Each is at one source; each link and each target's thread handles
    one bucket at a time. A target takes from the source that is free first."""
    bucket = SIZE / buckets
    out, into, done = [0.0] * sources, [0.0] * targets, [0.0] * targets
    left = {target: [list(range(s, buckets, sources)) for s in range(sources)] for target in range(targets)}
    while any(itertools.chain.from_iterable(left.values())):
        target = min((t for t in left if any(left[t])), key=lambda t: into[t])
        source = min((s for s in range(sources) if left[target][s]), key=lambda s: out[s])
        left[target][source].pop()
        begin = max(into[target], out[source])
        out[source] = into[target] = begin + bucket / node
        done[target] = max(done[target], into[target]) + bucket / arrival
    return max(done)


@pytest.mark.parametrize("seed", range(12))
def test_a_send_takes_as_long_as_buckets_over_the_nodes_links(seed: int) -> None:
    rng = random.Random(seed)
    sources, targets = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4, 6])
    copy = rng.choice([1e6, 8e6, 1e9])
    links = LINKS.model_copy(update={"copy_bytes_per_s": copy})
    found = times(ranks=8 * sources, workers=4 * targets, gpus=2, links=links)
    expected = sent_over_links(sources, targets, RATES["node"], copy)
    assert found.send_s == pytest.approx(expected, rel=0.1)


def test_ranks_share_gather_and_publish_and_gpus_share_a_load() -> None:
    assert times(ranks=4, workers=2, gpus=2)[:2] == pytest.approx((SIZE / 4 / 50e6, SIZE / 4 / 4e6))
    assert times(ranks=4, workers=2, gpus=2).load_s == pytest.approx(SIZE / 2 / 50e6)
    # rank 0 of sixteen, on two nodes, gathers over the network and then sends all
    alone = times("weights.transport=disk", ranks=16, workers=2, gpus=2)
    assert alone[:2] == pytest.approx((SIZE / 40e6 + SIZE / 50e6, SIZE / 4e6))


def test_a_delta_travels_in_its_share_of_the_bytes_and_costs_a_comparison() -> None:
    links = LINKS.model_copy(update={"apply_bytes_per_s": 1e12, "copy_bytes_per_s": 1e9})
    full, delta = (
        times(*sets, ranks=8, workers=32, gpus=1, links=links) for sets in ((), ("weights.encoding=delta",))
    )
    assert full.send_s == pytest.approx(SIZE * 4 / 10e6)
    assert delta.send_s == pytest.approx(0.05 * SIZE * 4 / 10e6)
    assert delta.publish_s - full.publish_s == pytest.approx(SIZE / 8 / 1e6)
    assert (delta.gather_s, delta.load_s) == (full.gather_s, full.load_s)
    assert times("weights.encoding=delta", workers=4).send_s == pytest.approx(SIZE / 2e6)  # one node


def test_more_workers_of_a_node_cost_nothing_and_without_overlap_the_parts_add_up() -> None:
    one, eight = times(ranks=8, workers=1), times(ranks=8, workers=8)
    assert one == eight
    apart = times("weights.overlap=false", ranks=8, workers=8)
    assert apart.send_s == pytest.approx(SIZE / 10e6 + SIZE / 4e6)


@pytest.mark.parametrize("transport", ["nccl", "object-store"])
def test_by_nccl_workers_load_one_after_another_and_wait_while_they_generate(transport: str) -> None:
    sets = [f"weights.transport={transport}", "rollout.engine=vllm", "placement.ratio=1:4"]
    work = workload(links=LINKS.model_dump() | {"gpus_per_node": 1}, profile=FIVE_GPUS)
    shape = profile_for(work, "partial-rollout", sets, groups=40, environ={}).profile
    assert simulate(shape, work).error is None
    load_s = work.syncing.parameter_bytes / (40e6 if transport == "nccl" else 50e6)

    async def all_load() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        shared = Costs(workload=work, profile=shape, ranks=1, workers=4).worker_times()
        workers = [SimulatedWorker(f"rollout-{i}", 8, shared, 0, SharedMachine()) for i in range(4)]

        async def load(worker: SimulatedWorker) -> tuple[float, float]:
            await worker.prefetch(Published(version=1, num_bytes=0, publish_s=0.0, handle=None))
            began_s = loop.time()
            report = await worker.load(1, "keep-kv")
            return loop.time() - began_s, report.pause_s

        return await asyncio.gather(*map(load, workers))

    in_turns = [1, 2, 3, 4] if transport == "nccl" else [1, 1, 1, 1]
    ended, paused = zip(*run_virtual(all_load()), strict=True)
    assert ended == pytest.approx([number * load_s for number in in_turns])
    assert paused == pytest.approx([load_s] * 4)


FIVE_GPUS = workload().profile | {"placement": {"device": "cuda", "gpus": 5}}


def test_colocated_phases_hand_over_as_before() -> None:
    work = workload(links=LINKS.model_dump())
    shape = profile_for(work, "colocate", [], groups=4, environ={}).profile
    costs = Costs(workload=work, profile=shape, ranks=4, workers=4)
    trainer, worker = costs.trainer_times(), costs.worker_times()
    assert (trainer.gather_s, trainer.publish_s) == (work.syncing.colocated_s, 0.0)
    assert worker.prefetch_s(random.Random()) == worker.load_s(random.Random()) == 0.0

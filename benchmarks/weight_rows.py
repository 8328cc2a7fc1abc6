"""What a weight sync costs each trainer rank, by the number of ranks.

    python benchmarks/weight_rows.py [--mb 100] [--ranks 1 2 4] [--encoding full delta] [--syncs 4] [--json]

Ranks (gloo) are processes of their own and make the calls of a run: PolicyTrainer.gather and, in its thread,
Sending with the sender of the object store. Ray's store itself is left out: an object is its own ref. Before
each sync 2% of the elements change. There are no probes: their forward passes would be most of a small
model's stall on a CPU.

    stall   the gather: the longest of any rank, in seconds, and the most CPU time that it took a rank
    send    CPU time of the rank that needed most for fingerprints and differences, beside training
    sent    bytes that the busiest rank, and all ranks, sent to workers that had the version before
    rank 0  the most memory that rank 0 took beyond what it had before the first sync: its buffers of the new
            and the previous version, with `delta` also those that it compares with

Medians over the syncs after the first one, which touches fresh memory and always sends everything. With fewer
cores than ranks, ranks wait for each other: seconds say little then, CPU time, bytes and memory hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import ray
import torch
from engine_kit import MB, make_random_model, table

from asyncrl_cli.job.rank_sending import ObjectStoreSender, Sending
from asyncrl_cli.profile.schema import ModelSection, ProcessPlace, Profile, WeightsSection
from asyncrl_cli.train.policy_trainer import PolicyTrainer
from asyncrl_cli.weights.deltas import DeltaRef

CHANGED = 50
"""One element of so many changes between two versions."""
Figures = dict[str, float]


class TimedSender(ObjectStoreSender):
    """Counts what it puts into the store, and the CPU time of its thread."""

    sent_bytes, began_s, cpu_s = 0, 0.0, 0.0

    def begin(self, version: int, num_buckets: int) -> None:
        super().begin(version, num_buckets)
        self.sent_bytes, self.began_s = 0, time.thread_time()

    def put(self, bucket: Any) -> Any:
        ref = super().put(bucket)
        self.sent_bytes += ref.delta.sent_bytes if isinstance(ref, DeltaRef) else len(bucket.data)
        return ref

    def finish(self, manifest: Any) -> None:
        super().finish(manifest)
        self.cpu_s = time.thread_time() - self.began_s


def rank(
    number: int, ranks: int, model_dir: str, meeting: str, encoding: str, syncs: int, found: Any
) -> None:
    """One rank, to its end. Puts the figures of its syncs into `found`."""
    torch.set_num_threads(1)
    ray.put = lambda value: value
    weights = WeightsSection(encoding=encoding, gather_bucket_size_mb=32, probe_sequences=0)
    profile = Profile(model=ModelSection(dtype="bfloat16"), weights=weights)
    place = ProcessPlace(model_dir=model_dir, threads=1, workers=ranks)
    trainer = PolicyTrainer(profile, place, rank=number, init_method=meeting, total_optimizer_steps=1)
    sender = TimedSender(deltas=encoding == "delta")
    sending = Sending(sender, overlap=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, figures = memory_bytes("VmRSS"), list[Figures]()
    for version in range(syncs):
        for shard in trainer.model.locals().values():
            shard.view(-1)[version % CHANGED :: CHANGED] *= 1.05
        began_s = time.thread_time()
        stall_s = trainer.gather(version, sending.of(version, [version - 1]))
        stall_cpu_s = time.thread_time() - began_s
        if trainer.publication is not None:  # before ranks sent rows, rank 0 alone had one
            sending.sent(*trainer.published(version))
        figures.append(
            {"stall": stall_s, "stall CPU": stall_cpu_s, "send CPU": sender.cpu_s, "sent": sender.sent_bytes}
        )
    found.put((number, figures[1:], memory_bytes("VmHWM") - before))
    trainer.close()


def memory_bytes(line: str) -> int:
    text = Path("/proc/self/status").read_text().partition(f"{line}:")[2]
    return 1024 * int(text.split()[0])


def measured(ranks: int, model_dir: str, encoding: str, syncs: int) -> Figures:
    fork = multiprocessing.get_context("fork")  # the imports are made once
    found = fork.SimpleQueue()
    given = ranks, model_dir, f"file://{model_dir}/meet-{time.monotonic_ns()}", encoding, syncs, found
    processes = [fork.Process(target=rank, args=(number, *given)) for number in range(ranks)]
    for process in processes:
        process.start()
    answers = [found.get() for _ in processes]
    for process in processes:
        process.join()
    of_rank = {
        number: {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        for number, figures, _ in answers
    }
    most = {key: max(figures[key] for figures in of_rank.values()) for key in of_rank[0]}
    (peak_bytes,) = (num_bytes for number, _, num_bytes in answers if number == 0)
    every = sum(figures["sent"] for figures in of_rank.values())
    return most | {"sent by all": every, "rank 0": peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[100], help="of the model in bfloat16")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--encoding", nargs="+", choices=["full", "delta"], default=["full", "delta"])
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, results = [], []
    for mb in options.mb:
        with tempfile.TemporaryDirectory() as directory:
            make_random_model(Path(directory), mb * MB // 2)
            for encoding, ranks in product(options.encoding, options.ranks):
                figures = measured(ranks, directory, encoding, options.syncs)
                results.append({"model MB": mb, "encoding": encoding, "ranks": ranks} | figures)
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(results))
        return
    for one in results:
        shown = [str(one[key]) for key in ("model MB", "encoding", "ranks")]
        shown += [f"{1e3 * one[key]:.0f}" for key in ("stall", "stall CPU", "send CPU")]
        rows.append([*shown, *(f"{one[key] / MB:.1f}" for key in ("sent", "sent by all", "rank 0"))])
    times = ["stall ms", "stall CPU ms", "send CPU ms"]
    sizes = ["MB sent by a rank", "by all", "rank 0 MB"]
    print(table(["model MB", "encoding", "ranks", *times, *sizes], rows))


if __name__ == "__main__":
    main()

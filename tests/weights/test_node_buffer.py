"""A node's workers hold a version once: one fetches, all map the same sealed memory, and nothing else is
believed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from asyncrl_cli.weights.buckets import Bucket, DamagedWeights
from asyncrl_cli.weights.node_buffer import NodeBuffer
from asyncrl_cli.weights.receivers import FILE_NAME, SharedWeights, manifest_of, verified
from asyncrl_cli.weights.versions import Manifest
from tests.packed import pack, pack_rows


def published(version: int) -> tuple[dict[str, torch.Tensor], Manifest, list[Bucket]]:
    draw = torch.Generator().manual_seed(version)
    tied = torch.randn(33, 7, generator=draw)
    tensors = {"a": tied, "b": torch.randn(1001, generator=draw).bfloat16(), "head": tied}
    buckets = pack(tensors, 1000)
    return tensors, manifest_of(buckets, version), buckets


class Source:
    """Counts fetches of a version."""

    def __init__(self, manifest: Manifest, buckets: list[Bucket]) -> None:
        self.manifest, self.buckets, self.fetches = manifest, buckets, 0

    def __call__(self, base: object) -> Iterator[Bucket]:
        self.fetches += 1
        return verified(self.buckets, self.manifest)


def on(path: Path, *, keeps: bool = False) -> NodeBuffer:
    return NodeBuffer(path, keeps=keeps, wait_s=30.0)


def inode(weights: SharedWeights) -> int:
    return os.stat(weights.place.path).st_ino


def same(weights: SharedWeights, tensors: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == tensors.keys() and all(
        torch.equal(weights[name].view(torch.uint8), one.view(torch.uint8)) for name, one in tensors.items()
    )


def test_one_of_eight_workers_fetches_and_all_hold_the_same_memory(tmp_path):
    tensors, manifest, buckets = published(3)
    source, together = Source(manifest, buckets), Barrier(8)

    def worker(number: int) -> SharedWeights:
        together.wait(30.0)
        return on(tmp_path / "node.json").weights(manifest, source)

    with ThreadPoolExecutor(8) as workers:
        held = list(workers.map(worker, range(8)))
    assert source.fetches == 1
    assert len({inode(one) for one in held}) == 1
    assert all(same(one, tensors) for one in held)
    assert (tmp_path / "node.json").stat().st_mode & 0o777 == 0o600


def test_the_kernel_refuses_writes_to_what_was_verified():
    tensors, _, buckets = published(3)
    weights = SharedWeights(buckets)
    file = os.open(weights.place.path, os.O_RDWR)
    for change in (lambda: os.pwrite(file, b"x", 0), lambda: os.ftruncate(file, 0)):
        with pytest.raises(PermissionError):
            change()
    os.close(file)
    assert same(weights, tensors)


def test_a_buffer_lives_while_any_worker_holds_it_and_goes_with_the_last(tmp_path):
    tensors, manifest, buckets = published(3)
    source = Source(manifest, buckets)
    first = on(tmp_path / "node.json").weights(manifest, source)
    second = on(tmp_path / "node.json").weights(manifest, source)
    del first
    assert same(second, tensors)
    del second
    on(tmp_path / "node.json").weights(manifest, source)
    assert source.fetches == 2


def test_a_worker_that_is_killed_over_its_fetch_costs_only_itself(tmp_path):
    tensors, manifest, buckets = published(3)

    def dies(base: object) -> Iterator[Bucket]:
        yield buckets[0]
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        on(tmp_path / "node.json").weights(manifest, dies)
        os._exit(0)
    source = Source(manifest, buckets)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert same(on(tmp_path / "node.json").weights(manifest, source), tensors)
    assert source.fetches == 1


def test_what_a_killed_worker_has_fetched_stays_with_those_that_hold_it(tmp_path):
    """The other way round: the parent opens what the child has fetched, and the child is killed."""
    tensors, manifest, buckets = published(3)
    done, tell = os.pipe()
    if (child := os.fork()) == 0:
        held = on(tmp_path / "node.json").weights(manifest, Source(manifest, buckets))
        os.write(tell, b"x")
        signal.pause()
        del held
    os.read(done, 1)
    source = Source(manifest, buckets)
    held = on(tmp_path / "node.json").weights(manifest, source)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert same(held, tensors)
    assert source.fetches == 0
    on(tmp_path / "node.json").weights(manifest, source)  # the note names the killed one
    assert source.fetches == 1


@pytest.mark.parametrize("is_held", [True, False])
def test_others_find_the_newest_version_that_is_held(is_held, tmp_path):
    path, (_, newer, buckets), (_, older, older_buckets) = tmp_path / "node.json", published(4), published(3)
    sources = {4: Source(newer, buckets), 3: Source(older, older_buckets)}
    held = [on(path).weights(newer, sources[4])]
    if not is_held:  # as after a trainer's restart: its versions begin again at an older one
        held.clear()
    held.append(on(path).weights(older, sources[3]))
    sought = newer if is_held else older
    held.append(on(path).weights(sought, sources[sought.version]))
    assert [source.fetches for source in sources.values()] == [1, 1]


def test_pages_are_mapped_when_the_next_worker_may_have_the_lock(monkeypatch, tmp_path):
    """Else the workers would map a version one after another, and the last ones might find it gone."""
    buckets, path, before = pack({"a": torch.ones(2**20)}, 2**23), tmp_path / "node.json", []
    touch = SharedWeights.touch

    def touches(weights: SharedWeights) -> None:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before.append(mapped_bytes(weights))
        touch(weights)

    monkeypatch.setattr(SharedWeights, "touch", touches)
    manifest = manifest_of(buckets, 3)
    fetched = on(path).weights(manifest, Source(manifest, buckets))
    assert mapped_bytes(fetched) == 2**22
    opened = on(path).weights(manifest, Source(manifest, buckets))
    assert before == [0, 2**22]  # of both, of which one is mapped
    assert mapped_bytes(opened) == 2**23


def mapped_bytes(weights: SharedWeights) -> int:
    """Of all this process's mappings of the buffer, the pages that are there (proc_pid_smaps(5))."""
    mappings = re.split(r"^(?=[\da-f]+-[\da-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    of_buffer = [one for one in mappings if f" {inode(weights)} " in one.partition("\n")[0]]
    assert of_buffer
    return sum(1024 * int(re.search(r"^Rss: +(\d+) kB", one, flags=re.M)[1]) for one in of_buffer)


def test_after_a_damaged_fetch_the_next_worker_fetches(tmp_path):
    tensors, manifest, buckets = published(3)
    damaged = [replace(one, data=one.data.copy()) for one in buckets]
    damaged[-1].data[5] ^= 1
    with pytest.raises(DamagedWeights):
        on(tmp_path / "node.json").weights(manifest, Source(manifest, damaged))
    assert same(on(tmp_path / "node.json").weights(manifest, Source(manifest, buckets)), tensors)


def test_a_worker_that_waits_too_long_fetches_for_itself(tmp_path):
    tensors, manifest, buckets = published(3)
    source, path = Source(manifest, buckets), tmp_path / "node.json"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert same(NodeBuffer(path, keeps=False, wait_s=0.0).weights(manifest, source), tensors)
    assert (source.fetches, path.read_text()) == (1, "")


@pytest.mark.parametrize("path", ["missing/node.json", "."])
def test_without_a_file_to_lock_a_worker_fetches_for_itself(tmp_path, path):
    tensors, manifest, buckets = published(3)
    assert same(on(tmp_path / path).weights(manifest, Source(manifest, buckets)), tensors)


def other_version(note: dict[str, Any], held: SharedWeights) -> None:
    note["version"] -= 1


def other_fingerprint(note: dict[str, Any], held: SharedWeights) -> None:
    note["fingerprint"] = "0" * 16


def other_size(note: dict[str, Any], held: SharedWeights) -> None:
    note["num_bytes"] -= 1


def tensor_outside(note: dict[str, Any], held: SharedWeights) -> None:
    note["entries"][0]["offset_bytes"] += 2**20


def unsealed(note: dict[str, Any], held: SharedWeights) -> None:
    """Another file of the same name and size, whose bytes may still change."""
    file = os.memfd_create(FILE_NAME + note["fingerprint"])
    os.truncate(file, note["num_bytes"])
    note["path"] = f"/proc/self/fd/{file}"


def another_file(note: dict[str, Any], held: SharedWeights) -> None:
    """As if a process of the same number had opened something else."""
    note["path"] = "/etc/hostname"


def other_weights(note: dict[str, Any], held: SharedWeights) -> None:
    """A sealed buffer of another version."""
    SHOWN.append(SharedWeights(published(2)[2], 2, "f" * 16))
    note["path"] = SHOWN[-1].place.path


SHOWN: list[SharedWeights] = []
WRONG = [other_version, other_fingerprint, other_size, tensor_outside, unsealed, another_file, other_weights]


@pytest.mark.parametrize("mistake", WRONG, ids=lambda one: one.__name__)
def test_a_note_that_does_not_fit_is_not_believed(mistake: Callable[..., None], tmp_path):
    tensors, manifest, buckets = published(3)
    path, source = tmp_path / "node.json", Source(manifest, buckets)
    held = on(path).weights(manifest, source)
    note = json.loads(path.read_text())
    mistake(note, held)
    path.write_text(json.dumps(note))
    assert same(on(path).weights(manifest, source), tensors)
    assert source.fetches == 2


@pytest.mark.parametrize("note", ["", "{", "[]", '{"version": 3}', "\0"])
def test_a_note_that_cannot_be_read_is_none(note, tmp_path):
    tensors, manifest, buckets = published(3)
    (tmp_path / "node.json").write_text(note)
    assert same(on(tmp_path / "node.json").weights(manifest, Source(manifest, buckets)), tensors)


def test_the_base_of_a_delta_is_the_newest_version_that_the_node_or_the_worker_holds(tmp_path):
    path, seen = tmp_path / "node.json", []

    def takes(worker: NodeBuffer, version: int) -> SharedWeights:
        _, manifest, buckets = published(version)

        def fetch(base: Any) -> Iterator[Bucket]:
            seen.append(base and base.version)
            return verified(buckets, manifest)

        return worker.weights(manifest, fetch)

    first, second = on(path, keeps=True), on(path, keeps=True)
    takes(first, 3)
    takes(second, 4)
    assert seen == [None, 3]  # which the first one holds
    path.unlink()
    takes(second, 5)
    assert seen == [None, 3, 4]


def test_rows_are_read_back_as_they_were_sent():
    """A base is needed in the layout of the sender's buckets, whatever rows these have."""
    tensors, _, _ = published(3)
    sent = [bucket for rank in pack_rows(tensors, 500, ranks=3) for bucket in rank]
    shared = SharedWeights(sent)
    assert same(shared, tensors)
    assert all(bytes(shared.bucket(one.entries).data) == bytes(one.data) for one in sent)

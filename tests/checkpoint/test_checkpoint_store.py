"""Checkpoints are whole or not there: order of writing, kills at every moment of it, retention,
replacement."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from asyncrl_cli.base.storage import sync_files
from asyncrl_cli.checkpoint.reader import checkpoints_in, load_checkpoint, newest_intact
from asyncrl_cli.checkpoint.writer import CheckpointStore
from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.weights.versions import kept_versions


def snapshot(step, **loop_state):
    return LoopSnapshot(step=step, version=step, at_window_boundary=True, loop_state=loop_state)


async def write_trainer(directory: Path, snapshot: LoopSnapshot) -> None:
    (directory / "trainer").mkdir()
    (directory / "trainer" / "rank-0.bin").write_bytes(bytes(range(256)) * 64)


def store_in(run_dir, keep=3, writer=write_trainer):
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "profile.toml").write_text('name = "p"\n')
    (run_dir / "config.resolved.json").write_text("{}")
    return CheckpointStore(run_dir, keep=keep, profile="p", write_trainer=writer)


def write(store, step, **loop_state):
    return asyncio.run(store.write(snapshot(step, **loop_state)))


def test_a_checkpoint_holds_everything_and_is_linked_as_latest(tmp_path):
    directory = write(store_in(tmp_path / "otter"), 40, feed={"cursor": 17})
    assert directory == tmp_path / "otter" / "checkpoints" / "step-000040"
    assert os.readlink(directory.parent / "latest") == "step-000040"
    manifest = json.loads((directory / "manifest.json").read_text())
    names = {"trainer/rank-0.bin", "loop_state.json", "profile.toml", "config.resolved.json"}
    assert set(manifest["files"]) == names
    assert manifest["files"]["trainer/rank-0.bin"]["bytes"] == 16384
    loaded = load_checkpoint(directory)
    assert (loaded.step, loaded.version, loaded.at_window_boundary) == (40, 40, True)
    assert (loaded.run, loaded.loop_state) == ("otter", {"feed": {"cursor": 17}})


def test_checksums_are_those_of_sha256sum(tmp_path):
    directory = write(store_in(tmp_path / "otter"), 1)
    manifest = json.loads((directory / "manifest.json").read_text())
    told = subprocess.run(
        ["sha256sum", directory / "trainer" / "rank-0.bin"], capture_output=True, text=True, check=True
    )
    assert manifest["files"]["trainer/rank-0.bin"]["sha256"] == told.stdout.split()[0]


def test_the_newest_stay_and_older_ones_go(tmp_path):
    store = store_in(tmp_path / "otter", keep=2)
    for step in (0, 20, 40, 60):
        write(store, step)
    assert [path.name for path in checkpoints_in(store.directory)] == ["step-000060", "step-000040"]
    assert not list(store.directory.glob(".*"))


def test_a_damaged_directory_is_neither_counted_nor_deleted(tmp_path):
    store = store_in(tmp_path / "otter", keep=1)
    write(store, 20)
    (write(store_in(tmp_path / "otter", keep=9), 40) / "manifest.json").unlink()
    write(store, 30)
    assert [path.name for path in checkpoints_in(store.directory)] == ["step-000040", "step-000030"]
    assert newest_intact(store.directory) == store.directory / "step-000030"


def test_a_failed_write_leaves_the_older_checkpoints_as_they_were(tmp_path):
    store = store_in(tmp_path / "otter")
    older = write(store, 20)

    async def fails(directory, snapshot):
        await write_trainer(directory, snapshot)
        raise RuntimeError("trainer rank 1 is gone")

    with pytest.raises(RuntimeError, match="rank 1"):
        write(store_in(tmp_path / "otter", writer=fails), 40)
    assert newest_intact(store.directory) == older
    assert os.readlink(store.directory / "latest") == "step-000020"
    write(store, 40)
    assert newest_intact(store.directory) == store.directory / "step-000040"


def test_resuming_at_an_older_step_sets_the_later_ones_aside(tmp_path):
    store = store_in(tmp_path / "otter", keep=9)
    for step in (20, 40, 60):
        write(store, step)
    abandoned = [path.name for path in store.abandon_newer(20, 20)]
    assert abandoned == ["abandoned-step-000040", "abandoned-step-000060"]
    assert newest_intact(store.directory) == store.directory / "step-000020"
    assert os.readlink(store.directory / "latest") == "step-000020"


def test_samples_and_kept_versions_of_abandoned_steps_are_set_aside_too(tmp_path):
    store = store_in(tmp_path / "otter")
    write(store, 20)
    samples = tmp_path / "otter" / "samples"
    samples.mkdir()
    for step in (1, 20, 30):
        (samples / f"step-{step:06d}.jsonl").write_text("{}\n")
    for version in (9, 10, 11):
        (tmp_path / "otter" / "versions" / f"version-{version:06d}").mkdir(parents=True)
    for _ in range(2):
        store.abandon_newer(20, 10)
        assert Recorded(tmp_path / "otter").sampled_steps == [1, 20]
        assert kept_versions(tmp_path / "otter" / "versions") == [9, 10]
        assert (samples / "abandoned-step-000030.jsonl").exists()
        # the next attempt writes it, and is abandoned as well
        (samples / "step-000030.jsonl").write_text("{}\n")


def test_the_event_loop_goes_on_while_files_are_written(tmp_path, monkeypatch):
    """Writing happens in a thread: here it waits for a task of the loop that goes on only once files are
    being written."""
    store, gone_on, fsync = store_in(tmp_path / "otter"), threading.Event(), os.fsync

    async def both():
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def slow_fsync(file):
            loop.call_soon_threadsafe(begun.set)
            assert gone_on.wait(30), "the loop stands still"
            fsync(file)

        async def beside():
            await begun.wait()
            gone_on.set()

        monkeypatch.setattr(os, "fsync", slow_fsync)
        other = asyncio.create_task(beside())
        await store.write(snapshot(1))
        other.cancel()

    asyncio.run(both())
    assert gone_on.is_set()


KILLED_WRITERS = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_checkpoint_store as t

root, step = Path(sys.argv[2]), int(sys.argv[3])

def write_until(kill_at):
    calls = 0
    def dying(original):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return call
    store = t.store_in(root / str(kill_at), keep=1)
    names = {Path: ("rename", "replace", "mkdir", "symlink_to"), os: ("fsync", "rmdir")}
    for owner, name in ((owner, name) for owner in names for name in names[owner]):
        setattr(owner, name, dying(getattr(owner, name)))
    t.write(store, step, mark="new")

for kill_at in range(1, 100):
    t.write(t.store_in(root / str(kill_at)), 20, mark="old")
    child = os.fork()
    if child == 0:
        write_until(kill_at)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [40, 20])
def test_a_kill_at_any_moment_of_writing_leaves_a_whole_checkpoint(tmp_path, step):
    """Step 40 beside an old 20; and a second 20 that replaces the old one. keep = 1, so one is deleted as
    well."""
    here = str(Path(__file__).parent)
    subprocess.run(
        [sys.executable, "-c", KILLED_WRITERS, here, str(tmp_path), str(step)], check=True, timeout=120
    )
    run_dirs = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(run_dirs) > 20
    seen = set()
    for run_dir in run_dirs:
        store = store_in(run_dir, keep=1)
        newest = newest_intact(store.directory)
        assert newest is not None, run_dir
        seen.add((newest.name, load_checkpoint(newest).loop_state["mark"]))
        assert not list(store.directory.glob(".writing*")), run_dir
        write(store, 60)
        assert newest_intact(store.directory) == store.directory / "step-000060"
    assert seen == {("step-000020", "old"), (f"step-{step:06d}", "new")}


def test_files_are_synced_while_others_write_beside_them(tmp_path):
    """As a critic of its own and the trainer do, whose writer makes temporary files and renames them."""
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            (tmp_path / ".temporary").write_bytes(b"x")
            (tmp_path / ".temporary").replace(tmp_path / "whole")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            sync_files(tmp_path)
    finally:
        is_over.set()
        writer.join()

"""Versions on disk: they arrive as they were, or are refused; they appear whole, and go when nobody holds
them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.base.errors import AsyncrlError
from asyncrl_cli.job.host_process import arriving
from asyncrl_cli.weights.buckets import DamagedWeights, Unpacked
from asyncrl_cli.weights.directory import Directory
from asyncrl_cli.weights.directory_buckets import DirectorySender
from asyncrl_cli.weights.receivers import manifest_of, read_version
from asyncrl_cli.weights.senders import keep_version, write_manifest
from asyncrl_cli.weights.versions import Manifest, kept_versions, send
from tests.packed import pack
from tests.train.train_samples import save_tiny_model

BUCKET_BYTES = 400_000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def receive(manifest, refs):
    return list(arriving(manifest, refs))


def published(model_dir: Path, version: int, bucket_bytes: int = BUCKET_BYTES):
    """The version's tensors by all their names, their buckets and manifest: other weights for each
    version."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + version)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    buckets = pack(tensors, bucket_bytes)
    manifest = Manifest(
        version=version,
        num_bytes=sum(len(bucket.data) for bucket in buckets),
        fingerprints=tuple(bucket.fingerprint for bucket in buckets),
        temperature=0.7,
        probe_tokens=((1, 2, 3),),
        probe_logprobs=((-0.1, -2.0 / 3.0),),
        previous_logprobs=((-0.2, -1.0 / 3.0),),
    )
    return tensors, buckets, manifest


def sender_at(root: Path) -> DirectorySender:
    return DirectorySender(Directory(f"file://{root}"))


def test_the_same_tensors_have_one_fingerprint_in_whatever_order_and_buckets_they_come():
    tensors = {name: torch.arange(8.0) + at for at, name in enumerate("abc")}
    in_one, backwards = pack(tensors, 1000), pack(dict(reversed(tensors.items())), 40)
    changed = pack({**tensors, "b": tensors["a"]}, 1000)
    assert (len(in_one), len(backwards)) == (1, 3)
    first, second, third = (manifest_of(one, 1).fingerprint for one in (in_one, backwards, changed))
    assert first == second != third


@pytest.mark.parametrize(
    ("bucket_bytes", "tied"), [(BUCKET_BYTES, False), (BUCKET_BYTES, True), (10**9, True)]
)
def test_a_kept_version_opens_with_transformers(tmp_path, model_dir, bucket_bytes, tied):
    if tied:
        model_dir = save_tiny_model(tmp_path / "tied", tied=True)
    tensors, buckets, manifest = published(model_dir, 12, bucket_bytes)
    keep_version(tmp_path, manifest, buckets, model_dir, 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "version-000012")
    opened = dict(model.named_parameters(remove_duplicate=False))
    assert set(tensors) == set(opened)
    for name, tensor in tensors.items():
        assert torch.equal(opened[name], tensor), name


def test_a_version_arrives_as_it_was_once_its_manifest_is_there(tmp_path, model_dir):
    tensors, buckets, manifest = published(model_dir, 3)
    sender = sender_at(tmp_path)
    sender.begin(3, len(buckets))
    refs = [sender.put(bucket) for bucket in buckets]
    directory = tmp_path / "version-000003"
    assert sorted(path.suffix for path in directory.iterdir()) == [".safetensors"] * len(buckets)
    sender.finish(manifest)
    assert (directory / "manifest.json").exists()
    # readable for whoever may read the directory
    modes = {path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes == {directory.stat().st_mode & 0o666}
    received = dict(Unpacked(receive(manifest, refs)))
    assert set(received) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(received[name], tensor), name


def test_a_publish_that_was_cut_off_is_forgotten_by_the_next(tmp_path, model_dir):
    _, buckets, manifest = published(model_dir, 3)
    sender = sender_at(tmp_path)
    sender.begin(3, len(buckets))
    sender.put(buckets[0])
    send(sender_at(tmp_path), manifest, buckets)
    assert [path.name for path in tmp_path.iterdir()] == ["version-000003"]
    receive(manifest, send(sender, manifest, buckets))


def flip_a_bit(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def cut_a_file(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-64])


def remove_a_file(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[0].unlink()


def put_a_pipe_there(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    put_a_pipe_there: r"it is a pipe, not a file",
    flip_a_bit: r"bucket 1 of \d+ .* arrived damaged",
    cut_a_file: r"it ends early",
    remove_a_file: r"cannot be read: FileNotFoundError",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_version_is_refused_with_the_old_one_still_loaded(tmp_path, model_dir, damage):
    _, buckets, manifest = published(model_dir, 7)
    refs = send(sender_at(tmp_path), manifest, buckets)
    receive(manifest, refs)
    damage(tmp_path / "version-000007")
    with pytest.raises(AsyncrlError, match=DAMAGES[damage]):
        receive(manifest, refs)


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_weights_is_refused_when_a_path_is_loaded(tmp_path):
    write_manifest(tmp_path, 3)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"] = {"model.safetensors": "0" * 16}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(AsyncrlError, match="it is a pipe, not a file"):
        read_version(Directory(f"file://{tmp_path}"))


def test_another_version_in_a_versions_place_is_refused(tmp_path, model_dir):
    _, buckets, manifest = published(model_dir, 7)
    refs = send(sender_at(tmp_path), manifest, buckets)
    _, others, other = published(model_dir, 8)
    send(sender_at(tmp_path / "other"), other, others)
    shutil.rmtree(tmp_path / "version-000007")
    (tmp_path / "other" / "version-000008").rename(tmp_path / "version-000007")
    with pytest.raises(DamagedWeights, match=r"bucket 0 of \d+ .* arrived damaged"):
        receive(manifest, refs)


def test_versions_live_until_the_driver_wants_them_no_more(tmp_path, model_dir):
    sender = sender_at(tmp_path)
    for version in (1, 2, 3):
        _, buckets, manifest = published(model_dir, version)
        send(sender, manifest, buckets)
    sender.keep([1, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000001", "version-000003"]
    shutil.rmtree(tmp_path / "version-000001")  # gone by other hands: nothing to complain of
    sender.keep([])
    assert not tmp_path.exists()


def test_of_kept_versions_the_newest_stay(tmp_path, model_dir):
    root, (_, buckets, manifest) = tmp_path / "weights", published(model_dir, 0)
    assert kept_versions(root) == []
    for version in (0, 1, 2, 2, 3):
        keep_version(root, replace(manifest, version=version), buckets, model_dir, 2)
    assert sorted(path.name for path in root.iterdir()) == ["version-000002", "version-000003"]
    keep_version(root, replace(manifest, version=4), buckets, model_dir, "all")
    assert kept_versions(root) == [2, 3, 4]


def test_a_disk_that_cannot_be_written_is_told_with_a_way_out(tmp_path, model_dir):
    _, buckets, manifest = published(model_dir, 1)
    (tmp_path / "weights").write_text("a file in the way")
    with pytest.raises(AsyncrlError, match="a version cannot be written") as told:
        keep_version(tmp_path / "weights", manifest, buckets, model_dir, 1)
    assert "weights.keep_versions=0" in told.value.hint

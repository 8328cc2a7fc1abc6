"""Versions at a URL: they arrive as they were, appear whole, and go; a store that fails, is slow or loses an
object is a clear error, or is tried again."""

from __future__ import annotations

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load as load_tensors

from asyncrl_cli.base.errors import AsyncrlError, PreflightError
from asyncrl_cli.job.host_process import arriving
from asyncrl_cli.profile.schema import WeightsSection
from asyncrl_cli.weights import directory as directory_module
from asyncrl_cli.weights import directory_buckets
from asyncrl_cli.weights.buckets import DamagedWeights, Unpacked
from asyncrl_cli.weights.directory import Directory, check_url, packages_of, versions_at
from asyncrl_cli.weights.directory_buckets import DirectorySender, file_pieces
from asyncrl_cli.weights.receivers import packed, read_version
from asyncrl_cli.weights.versions import Manifest, send
from tests.packed import pack

SECRET = "wJalrXUtnFEMI-K7MDENG"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(directory_module, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(directory_buckets, "CHUNK_BYTES", 1000)  # many calls for a bucket
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["memory", "file"])
def here(request, tmp_path) -> Directory:
    return Directory(
        f"memory://bucket/{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/b"
    )


def published(version: int):
    """Tensors of three dtypes and odd sizes, so that buckets have gaps; other values for each version."""
    draw = torch.Generator().manual_seed(version)
    tensors = {
        "a.weight": torch.randn(33, 7, generator=draw),
        "b.weight": torch.randn(1001, generator=draw).bfloat16(),
        "c.steps": torch.arange(version, version + 3),
        "d.bias": torch.randn(5, generator=draw),
        "e.empty": torch.empty(0),
    }
    buckets = pack(tensors, 3000)
    assert len(buckets) > 1
    manifest = Manifest(
        version=version,
        num_bytes=sum(len(bucket.data) for bucket in buckets),
        fingerprints=tuple(bucket.fingerprint for bucket in buckets),
        temperature=0.7,
        probe_tokens=((1, 2, 3),),
        probe_logprobs=((-0.1, -2.0 / 3.0),),
    )
    return tensors, buckets, manifest


def test_a_version_arrives_as_it_was_by_its_refs_and_by_its_manifest(here):
    tensors, buckets, manifest = published(12)
    refs = send(DirectorySender(here), manifest, buckets)
    by_refs = dict(Unpacked(arriving(manifest, refs)))
    read, found = read_version(Directory(f"{here.url}/version-000012"))
    by_manifest = dict(Unpacked(found))
    for arrived in (by_refs, by_manifest):
        assert set(arrived) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(arrived[name], tensor), name
            assert arrived[name].dtype == tensor.dtype
    assert (read.version, read.temperature, read.probe_tokens) == (12, 0.7, ((1, 2, 3),))
    assert read.probe_logprobs == manifest.probe_logprobs


def test_a_file_is_what_the_safetensors_library_reads():
    tensors, buckets, _ = published(3)
    read = {}
    for bucket in buckets:
        read |= load_tensors(b"".join(map(bytes, file_pieces(bucket))))
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64", "float16"])
def test_every_dtype_has_the_librarys_name(dtype):
    bucket = packed({"x": torch.zeros(3, dtype=getattr(torch, dtype))})
    assert load_tensors(b"".join(map(bytes, file_pieces(bucket))))["x"].dtype == getattr(torch, dtype)


def test_a_version_without_its_manifest_does_not_exist(here):
    _, buckets, manifest = published(3)
    sender, there = DirectorySender(here), Directory(f"{here.url}/version-000003")
    sender.begin(3, len(buckets))
    for bucket in buckets:
        sender.put(bucket)
        with pytest.raises(AsyncrlError, match=r"manifest\.json cannot be read: FileNotFoundError"):
            read_version(there)
    sender.finish(manifest)
    read_version(there)
    sender.begin(3, len(buckets))  # a resumed run publishes it again: first the old one goes
    with pytest.raises(AsyncrlError, match="cannot be read"):
        read_version(there)


def test_the_manifest_is_written_last_and_removed_first(here, monkeypatch):
    calls = []
    for name in ("write", "remove"):
        real = getattr(Directory, name)

        def noted(self, path, *args, _real=real, _name=name, **more):
            calls.append((_name, path.rpartition("/")[2], more.get("first", "")))
            return _real(self, path, *args, **more)

        monkeypatch.setattr(Directory, name, noted)
    _, buckets, manifest = published(3)
    sender = DirectorySender(here)
    send(sender, manifest, buckets)
    assert calls[-1] == ("write", "manifest.json", "")
    sender.keep([])
    assert calls[-1] == ("remove", "version-000003", "manifest.json")


def test_versions_live_until_the_driver_wants_them_no_more(here):
    sender = DirectorySender(here)
    for version in (1, 2, 3):
        _, buckets, manifest = published(version)
        send(sender, manifest, buckets)
    sender.keep([1, 3])
    assert here.versions() == [1, 3]
    here.remove("")
    assert here.versions() == []
    here.remove("")  # gone by other hands: nothing to complain of


def test_what_else_lies_beside_the_versions_stays(here):
    _, buckets, manifest = published(3)
    sender = DirectorySender(here)
    send(sender, manifest, buckets)
    here.write("checkpoints/step-000001/model", lambda: iter([b"mine"]))
    here.keep(())
    assert (here.versions(), here.read("checkpoints/step-000001/model")) == ([], b"mine")


@pytest.mark.parametrize("inside", ["runs", "runs/one", "."])
def test_a_url_that_leads_to_the_runs_own_directory_is_refused(tmp_path, inside):
    weights = WeightsSection(transport="directory", url=f"file://{tmp_path}/{inside}")
    run_dir = tmp_path / "runs" / ("runs" if inside == "." else "one")
    with pytest.raises(PreflightError, match=r"run's own directory, .* would be in one place"):
        versions_at(weights, run_dir)
    assert versions_at(weights, tmp_path / "elsewhere" / "one").url.endswith(f"{inside}/one")


def files_of(here: Directory):
    files, root = directory_module._opened(here.url)
    return files, sorted(
        f"/{name}".replace("//", "/") for name in files.find(root) if name.endswith("tensors")
    )


def flip_a_bit(files, names):
    content = bytearray(files.cat_file(names[1]))
    content[-3] ^= 1
    files.pipe_file(names[1], bytes(content))


def cut_a_file(files, names):
    files.pipe_file(names[0], files.cat_file(names[0])[:-1])


def lose_an_object(files, names):
    files.rm_file(names[0])


def swap_two_objects(files, names):
    one, other = files.cat_file(names[0]), files.cat_file(names[1])
    files.pipe_file(names[0], other)
    files.pipe_file(names[1], one)


DAMAGES = {
    flip_a_bit: (DamagedWeights, r"bucket 1 of \d+ .* arrived damaged"),
    cut_a_file: (DamagedWeights, "it ends early"),
    lose_an_object: (AsyncrlError, r"model-00001-of-\d+\.safetensors cannot be read: FileNotFoundError"),
    swap_two_objects: (DamagedWeights, "it holds other tensors than were published"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_version_is_refused(here, damage):
    _, buckets, manifest = published(7)
    refs = send(DirectorySender(here), manifest, buckets)
    damage(*files_of(here))
    kind, why = DAMAGES[damage]
    with pytest.raises(kind, match=why):
        list(arriving(manifest, refs))
    with pytest.raises(AsyncrlError):
        read_version(Directory(f"{here.url}/version-000007"))


def test_another_version_in_a_versions_place_is_refused(here):
    _, buckets, manifest = published(7)
    refs = send(DirectorySender(here), manifest, buckets)
    _, others, _ = published(8)
    send(DirectorySender(here), manifest, others)
    with pytest.raises(DamagedWeights, match=r"bucket 0 of \d+ .* arrived damaged"):
        list(arriving(manifest, refs))


class Failing:
    """A store whose calls fail `times` times in a row, from now on."""

    def __init__(self, monkeypatch, times: int, error: Exception) -> None:
        self.left, self.calls, self.error = times, 0, error
        for name in ("open", "cat_file", "ls", "rm"):
            real = getattr(MemoryFileSystem, name)

            def call(files, *args, _real=real, **more):
                self.calls += 1
                if self.left > 0:
                    self.left -= 1
                    raise self.error
                return _real(files, *args, **more)

            monkeypatch.setattr(MemoryFileSystem, name, call)


def test_a_call_that_fails_three_times_is_tried_a_fourth_time(monkeypatch):
    tensors, buckets, manifest = published(5)
    here = Directory("memory://bucket/run")
    store = Failing(monkeypatch, 3, ConnectionError("reset by peer"))
    refs = send(DirectorySender(here), manifest, buckets)
    store.left = 3
    arrived = dict(Unpacked(arriving(manifest, refs)))
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())


def test_a_store_that_goes_on_failing_is_a_clear_error_after_the_last_try(monkeypatch):
    store = Failing(monkeypatch, 10**9, ConnectionError("reset by peer"))
    with pytest.raises(AsyncrlError, match=r"memory://bucket/run/x cannot be read: ConnectionError: reset"):
        Directory("memory://bucket/run").read("x")
    assert store.calls == 4


def test_what_another_try_would_only_repeat_is_tried_once(monkeypatch):
    store = Failing(monkeypatch, 10**9, PermissionError("Access Denied"))
    with pytest.raises(AsyncrlError, match="Access Denied") as refused:
        Directory("memory://bucket/run").read("x")
    assert (store.calls, "permissions" in refused.value.hint) == (1, True)


def test_a_slow_store_is_not_tried_again_after_its_time(monkeypatch):
    store = Failing(monkeypatch, 10**9, TimeoutError("read timed out"))
    clock = iter(range(0, 10**6, 61))
    monkeypatch.setattr(directory_module.time, "monotonic", lambda: next(clock))
    with pytest.raises(AsyncrlError, match="read timed out"):
        Directory("memory://bucket/run").read("x")
    assert store.calls == 1


def test_errors_and_logs_show_no_secret(monkeypatch, caplog):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    Failing(monkeypatch, 10**9, ConnectionError(f"signed with {SECRET}"))
    with pytest.raises(AsyncrlError, match=r"signed with \*\*\*") as shown:
        Directory("memory://bucket/run").read("x")
    assert (shown.value.__cause__, shown.value.__suppress_context__) == (None, True)
    assert caplog.text.count("signed with ***") == 3
    assert SECRET not in caplog.text


def test_a_url_is_tried_before_anything_starts_and_left_as_it_was(tmp_path, monkeypatch):
    check_url(WeightsSection())
    check_url(WeightsSection(transport="directory", url=f"file://{tmp_path}/new"))
    assert [*tmp_path.rglob("*.*")] == []
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=r"weights\.url: file://.* cannot be written: ") as refused:
        check_url(WeightsSection(transport="directory", url=f"file://{tmp_path}/file"))
    assert "check the path" in refused.value.hint
    with pytest.raises(PreflightError, match="Protocol not known: s4") as refused:
        check_url(WeightsSection(transport="directory", url="s4://bucket"))
    assert "s3://bucket/path" in refused.value.hint


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "adlfs", None)
    with pytest.raises(PreflightError, match=r"weights\.url: abfs://box/x") as refused:
        check_url(WeightsSection(transport="directory", url="abfs://box/x"))
    assert refused.value.hint == "pip install 'adlfs', on every node"
    assert packages_of("s3://bucket") == ("s3fs",)
    assert packages_of("file:///x") == packages_of(None) == ()


def test_a_url_that_does_not_answer_is_given_up(monkeypatch):
    hang = __import__("threading").Event()
    monkeypatch.setattr(Directory, "write", lambda *args: hang.wait(20))
    with pytest.raises(PreflightError, match=r"memory://x: it did not answer within 0\.01 s"):
        check_url(WeightsSection(transport="directory", url="memory://x"), 0.01)
    hang.set()

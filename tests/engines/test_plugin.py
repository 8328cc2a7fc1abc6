"""An engine of another package: found by its entry point, made from the profile, and checked by what it says
of itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.engines.port import Sampling, check_engine, make_engine
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import ProcessPlace

MODULE = '''
from asyncrl_cli.engines.port import Completion, Engine, EngineKind
from asyncrl_cli.base.errors import ConfigError, PreflightError


class Parrot(Engine):
    """Says its prompt again."""

    stops_to_score = False
    version = running = sampled_tokens = decode_steps = 0

    def __init__(self, profile, place, on_running):
        self.slots, self.word = profile.rollout.slots, profile.rollout.engine_args.get("word")

    async def generate(self, request_id, prompt_tokens, sampling, seed, *, first_version=None):
        tokens = prompt_tokens[: sampling.max_response_tokens]
        zeros = [0] * len(tokens)
        return Completion(tokens=tokens, logprobs=zeros, versions=zeros, finish_reason="length")


def conflicts(profile):
    if profile.rollout.engine_args.get("word") == "no":
        yield ConfigError("a parrot says no no")


def check_here(device):
    if device != "cpu":
        raise PreflightError("a parrot sits on CPUs")


KIND = EngineKind(make=Parrot, keys=frozenset({"engine_args"}), conflicts=conflicts, check_here=check_here)
'''


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, as far as Python can tell."""
    (tmp_path / "parrot_engine.py").write_text(MODULE, encoding="utf-8")
    info = tmp_path / "parrot_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[asyncrl.engines]\nparrot = parrot_engine:KIND\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("parrot")
def test_an_engine_of_another_package_is_made_from_the_profile() -> None:
    profile = load(
        "base", ["rollout.engine=parrot", 'rollout.engine_args={word="hi"}', "rollout.slots=9"], environ={}
    ).profile
    check_engine(profile, "cpu")
    engine = make_engine(profile, ProcessPlace(model_dir="x"), lambda running: None)
    completion = asyncio.run(engine.generate("r", [4, 5, 6], Sampling.of(profile.rollout, 1.0), 0))
    assert (engine.slots, engine.word, completion.tokens) == (9, "hi", [4, 5, 6])  # type: ignore[attr-defined]
    assert dict(engine.counters().sums) == {}


@pytest.mark.usefixtures("parrot")
def test_what_it_says_of_itself_is_checked() -> None:
    nccl = ["weights.transport=nccl", "placement.device=cuda"]
    for sets, message in (
        (['rollout.engine_args={word="no"}'], "says no no"),
        (["rollout.max_model_len=600"], "rollout.max_model_len = 600 with rollout.engine"),
        (["weights.dual_buffer=false"], "weights.dual_buffer = false with rollout.engine"),
        (nccl, 'weights.transport = "nccl" with rollout.engine'),
    ):
        with pytest.raises(ConfigError, match=message):
            load("base", ["rollout.engine=parrot", *sets], environ={})
    with pytest.raises(PreflightError, match="sits on CPUs"):
        check_engine(load("base", ["rollout.engine=parrot"], environ={}).profile, "cuda")


def test_an_engine_that_nobody_has_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r'rollout\.engine = "parrot" is not known') as refused:
        load("base", ["rollout.engine=parrot"], environ={})
    assert refused.value.hint.startswith("known: remote, transformers, vllm;")

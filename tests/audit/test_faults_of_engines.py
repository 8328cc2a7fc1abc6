"""What an engine stamps on a token, and the logprob that it returns, are computed again by the audit: faults
of the sampler are noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl_cli.audit.run_files import Sample, SampledGroup
from asyncrl_cli.audit.weights import logprob_claims
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.engines.transformers.token_sampler import TokenSampler
from tests.engines import tiny
from tests.engines.made import prompts, sampling, transformers_engine

pytestmark = pytest.mark.slow
SECTIONS = {
    "model": {"dtype": "float32"},
    "rollout": {"top_p": 1.0, "top_k": 0, "temperature": 0.8},
    "trainer": {},
    "async_training": {"max_staleness": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of the weights; engines hold the first."""
    directory, model = tmp_path_factory.mktemp("run"), tiny.make_model()
    tiny.save(model, directory / "versions" / "version-000000")
    model.load_state_dict(tiny.weights_after(model, 1))
    tiny.save(model, directory / "versions" / "version-000001")
    return directory


def stamps_a_version_too_new(patch: pytest.MonkeyPatch) -> None:
    record = TokenSampler.record

    def wrong(self, track, token, logprob, kept=()):
        record(self, track, token, logprob, kept)
        track.versions[-1] += 1

    patch.setattr(TokenSampler, "record", wrong)


def forgets_the_temperature(patch: pytest.MonkeyPatch) -> None:
    prepare = TokenSampler.prepare_tensor_args

    def wrong(self, requests):
        made = prepare(self, requests)
        for track in self._rows:
            track.sampling = replace(track.sampling, temperature=1.0)
        return made

    patch.setattr(TokenSampler, "prepare_tensor_args", wrong)


def sample_of(prompt: list[int], one: Completion) -> Sample:
    versions = np.array([-1] * len(prompt) + one.versions)
    return Sample(
        reward=0.0,
        finish_reason=one.finish_reason,
        advantage=0.0,
        segment_lengths=[len(versions)],
        tokens=np.array(prompt + one.tokens),
        logprobs=np.array([0.0] * len(prompt) + one.logprobs, np.float32),
        versions=versions,
        mask=versions >= 0,
    )


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (lambda patch: None, "holds"),
        (stamps_a_version_too_new, "fails"),
        (forgets_the_temperature, "fails"),
    ],
    ids=["none", "a version too new", "another temperature"],
)
def test_a_fault_of_the_sampler_is_noticed(
    run: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], verdict: str
) -> None:
    async def sampled() -> list[Sample]:
        async with transformers_engine(run / "versions" / "version-000000") as engine:
            fault(monkeypatch)
            how = sampling(24, temperature=0.8)
            return [sample_of(one, await engine.generate(f"{one}", one, how, 0)) for one in prompts(2)]

    groups = [SampledGroup("p@0.0", 1, 1, asyncio.run(sampled()))]
    files = SimpleNamespace(section=SECTIONS.get, path=run, groups=lambda: groups)
    (claim,) = logprob_claims(files, 2, check_all=True, progress=lambda *_: None)
    assert (claim.verdict, claim.cases) == (verdict, 2)

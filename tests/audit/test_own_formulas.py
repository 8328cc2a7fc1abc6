"""The audit's advantages are by formulas of its own: on random rewards both they and the trainer's agree."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl_cli.audit.run_files import Sample, SampledGroup
from asyncrl_cli.audit.samples import _estimated
from asyncrl_cli.audit.weights import logprob_claims
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.step_plan import advantages_of

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "none")


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_audit_and_the_trainer_agree_on_advantages(estimator, normalizes):
    random = np.random.default_rng(0)
    groups = [random.normal(size=size) for size in (2, 5, 8)]
    groups += [np.full(4, 0.3), np.array([0.0, 1.0]), (random.random(8) > 0.5).astype(float)]
    algorithm = AlgorithmSection(adv_estimator=estimator, normalize_advantages=normalizes)
    expected = advantages_of([row.tolist() for row in groups], algorithm)
    for own, row in zip(_estimated(groups, estimator, algorithm.model_dump()), expected, strict=True):
        np.testing.assert_allclose(own, row, atol=1e-12)


@pytest.mark.parametrize(
    ("top_p", "replays", "lacking"), [(0.9, False, "sampling masks"), (1, True, "experts")]
)
def test_logprobs_among_kept_tokens_or_of_recorded_experts_are_not_checked_without_these(
    top_p, replays, lacking, tmp_path
):
    (tmp_path / "versions" / "version-0").mkdir(parents=True)
    rollout = {"top_p": top_p, "top_k": 0, "sampling_mask": True, "temperature": 1.0}
    sections = {"model": {"dtype": "float32"}, "rollout": rollout, "trainer": {"router_replay": replays}}
    sample = Sample(
        reward=0.0,
        finish_reason="stop",
        advantage=0.0,
        segment_lengths=[2],
        tokens=np.array([1, 2]),
        logprobs=np.array([0.0, -1.0], np.float32),
        versions=np.array([-1, 0]),
        mask=np.array([False, True]),
        kept=None,
    )
    files = SimpleNamespace(
        section=sections.get, path=tmp_path, groups=lambda: [SampledGroup("a@0.0", 1, 0, [sample])]
    )
    (claim,) = logprob_claims(files, 1, check_all=True, progress=str)
    assert claim.verdict == "not checked"
    assert claim.unchecked.startswith(f"1 trajectories: their {lacking} are not")

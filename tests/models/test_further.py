"""The directories of a run's reference and critic."""

from __future__ import annotations

import shutil

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.models.model_directory import further_here, further_models
from asyncrl_cli.profile.schema import Profile
from tests.train.train_samples import save_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = save_tiny_model(tmp_path_factory.mktemp("model"))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def profile(**sections) -> Profile:
    return Profile.model_validate(sections)


def test_without_a_reference_or_a_critic_there_is_no_further_model(model_dir):
    assert further_models(profile(), model_dir) == {}


def test_they_begin_as_the_policy_unless_a_path_is_given(model_dir, tmp_path):
    other = shutil.copytree(model_dir, tmp_path / "other")
    algorithm = {"use_kl_loss": True, "adv_estimator": "gae"}
    assert further_models(profile(algorithm=algorithm), model_dir) == {
        "ref_dir": str(model_dir),
        "critic_dir": str(model_dir),
    }
    found = further_models(profile(algorithm=algorithm, ref={"path": str(other)}), model_dir)
    assert found == {"ref_dir": str(other), "critic_dir": str(model_dir)}
    several = {"path": {"math": str(other), "code": str(model_dir)}, "column": "kind"}
    teachers = further_models(profile(teacher=several), model_dir)["teacher_dirs"]
    assert teachers == {"math": str(other), "code": str(model_dir)}


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/no/such/model", "ref.path: directory /no/such/model does not exist"),
        ("builtin:tiny", "ref.path: it must be a directory or a hub name"),
        ("smaller", "has 32 tokens, the policy 64"),
    ],
)
def test_what_cannot_be_a_reference_is_refused_by_its_key(model_dir, tmp_path, path, why):
    if path == "smaller":
        path = str(shutil.copytree(model_dir, tmp_path / "smaller"))
        config = tmp_path / "smaller" / "config.json"
        config.write_text(config.read_text().replace('"vocab_size": 64', '"vocab_size": 32'))
    with pytest.raises(PreflightError, match=why) as refused:
        further_models(profile(algorithm={"use_kl_in_reward": True}, ref={"path": path}), model_dir)
    assert refused.value.hint
    teachers = {"path": {"math": path, "code": str(model_dir)}, "column": "kind"}
    with pytest.raises(PreflightError, match=why.replace("ref.path", "teacher.path.math")):
        further_models(profile(teacher=teachers), model_dir)


def test_a_local_path_that_is_missing_is_refused_before_anything_is_made(model_dir):
    there, missing = {"path": str(model_dir)}, {"path": "/no/such/model"}
    assert further_here(profile(ref=there, teacher=there)) == {"teacher.path": model_dir}
    judged = {"task": {"reward": "none"}, "reward_model": missing}
    learnt = {"algorithm": {"adv_estimator": "gae"}, "critic": missing}
    for sections in (judged, learnt, {"teacher": missing}):
        (key,) = (f"{name}.path" for name, section in sections.items() if section is missing)
        with pytest.raises(PreflightError, match=f"{key}: directory /no/such/model does not exist"):
            further_here(profile(**sections))
        assert further_here(profile(**sections), is_elsewhere=True) == {}

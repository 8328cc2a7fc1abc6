from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.profile.loaded import Loaded, load
from asyncrl_cli.profile.resolved import from_document, read_document, to_document, to_toml
from asyncrl_cli.profile.schema import Profile

SETS = [
    "async_training.staleness_threshold=0.15",
    "task.params.max_value=9",
    'task.params."odd name"={a=[1, 0.5]}',
    "rollout.stop=['a\"b', '\\n']",
    "run.name=first",
    "trainer.betas=[0.8, 0.9]",
]


@pytest.fixture
def loaded() -> Loaded:
    return load("partial-rollout", SETS, environ={})


def test_the_resolved_document_round_trips_through_json(loaded: Loaded) -> None:
    text = json.dumps(to_document(loaded.profile, loaded.origins))
    again = from_document(json.loads(text))
    assert again.profile == loaded.profile
    assert again.origins == loaded.origins


def test_the_resolved_document_holds_every_key_and_eta_as_a_string(loaded: Loaded) -> None:
    document = to_document(loaded.profile, loaded.origins)
    assert document["schema_version"] == 1
    assert document["profile"]["async_training"]["staleness_threshold"] == "0.15"
    assert document["profile"]["weights"]["probe_sequences"] == 4


@pytest.mark.slow
@settings(max_examples=20)
@given(percent=st.integers(0, 10_000))
def test_any_eta_survives_the_round_trip_exactly(percent: int) -> None:
    loaded = load("stale-samples", [f"async_training.staleness_threshold={percent / 100 or 0.5}"], environ={})
    again = from_document(json.loads(json.dumps(to_document(loaded.profile, loaded.origins))))
    assert (
        again.profile.async_training.staleness_threshold == loaded.profile.async_training.staleness_threshold
    )


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 99},
        {"profile": {"async_training": {"staleness_threshold": "x"}}},
        {"profile": {"async_training": {"staleness_threshold": "0"}, "unknown": 1}},
        {"origins": None},
    ],
)
def test_a_foreign_document_is_refused(loaded: Loaded, change: dict[str, object]) -> None:
    with pytest.raises(RefusedError) as caught:
        from_document({**to_document(loaded.profile, loaded.origins), **change})
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("beside", "hint"), [("checkpoints", "each checkpoint of the run has"), ("x", "another")]
)
def test_a_damaged_document_of_a_run_has_copies_in_its_checkpoints(
    tmp_path: Path, beside: str, hint: str
) -> None:
    (tmp_path / beside).mkdir()
    (tmp_path / "config.resolved.json").write_text("junk", encoding="utf-8")
    with pytest.raises(RefusedError) as caught:
        read_document(tmp_path / "config.resolved.json")
    assert hint in caught.value.hint


@pytest.mark.parametrize("only_given", [True, False])
def test_the_toml_of_a_profile_is_a_profile_with_the_same_values(
    loaded: Loaded, tmp_path: Path, only_given: bool
) -> None:
    path = tmp_path / "again.toml"
    path.write_text(to_toml(loaded.profile, loaded.origins, only_given=only_given), encoding="utf-8")
    assert load(str(path), environ={}).profile == loaded.profile


def test_the_toml_says_of_every_value_where_it_comes_from(loaded: Loaded) -> None:
    text = to_toml(loaded.profile, loaded.origins, only_given=False, with_origins=True)
    line = next(line for line in text.splitlines() if line.startswith("staleness_threshold"))
    assert line.split("#")[1].strip() == "--set"
    assert tomli.loads(text)["async_training"]["staleness_threshold"] == 0.15


def test_the_default_profile_needs_nobody_to_fill_it_in() -> None:
    assert Profile().rollout.n == 8

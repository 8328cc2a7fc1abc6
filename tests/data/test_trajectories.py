"""Fields of trajectories against a row-by-row model in plain Python."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.contracts.prompt_group import AttemptKey
from asyncrl_cli.data.ragged import Ragged
from asyncrl_cli.data.sample_fields import FIELDS, Field, Schema
from asyncrl_cli.data.trajectories import (
    Trajectory,
    joined_by_index,
    packed,
    segment_of,
    trajectory_of,
    unpacked,
)

PLUGGED = Schema(
    [
        *FIELDS,
        Field(name="entropy", per="sampled", by="trainer"),
        Field(name="kinds", per="token", by="environment", dtype="int16", fill=-7),
        Field(name="experts", per="sampled", by="engine", dtype="uint8", shape=(2, 3)),
        Field(name="chosen", per="sampled", by="engine", dtype="int32", is_ragged=True),
    ]
)

Rows = list[list[dict[str, Any]]]
"""Trajectories as lists of segments, which are lists of values by field."""


def drawn(rng: random.Random) -> tuple[list[Trajectory], Rows]:
    """Random trajectories, and the same as plain lists."""
    trajectories, model = list[Trajectory](), []
    for _ in range(rng.randint(0, 5)):
        segments, rows = [], []
        for _ in range(rng.randint(1, 3)):
            length = rng.randint(1, 6)
            versions = [rng.choice([-1, 0, 3]) for _ in range(length)]
            sampled = [i for i, version in enumerate(versions) if version >= 0]
            row: dict[str, Any] = {
                "tokens": [rng.randint(0, 99) for _ in range(length)],
                "logprobs": [-rng.random() if version >= 0 else 0.0 for version in versions],
                "versions": versions,
                "mask": [version >= 0 for version in versions],
            }
            segment = dict(segment_of(row["tokens"], row["logprobs"], row["versions"]))
            if rng.random() < 0.6:
                row["kinds"] = [rng.randint(0, 9) for _ in range(length)]
                segment["kinds"] = np.array(row["kinds"], dtype=np.int16)
            if rng.random() < 0.6:
                row["experts"] = [[[rng.randint(0, 9)] * 3] * 2 for _ in sampled]
                segment["experts"] = np.array(row["experts"], dtype=np.uint8).reshape(-1, 2, 3)
            if rng.random() < 0.6:
                row["chosen"] = [[rng.randint(0, 10**6) for _ in range(rng.randint(0, 4))] for _ in sampled]
                segment["chosen"] = Ragged.of(row["chosen"])
            segments.append(segment)
            rows.append(row)
        reward = rng.random()
        trajectories.append(trajectory_of(segments, PLUGGED, reward=reward, finish_reason="stop"))
        model.append([{**row, "reward": reward} for row in rows])
    return trajectories, model


def filled(model: Rows, name: str, fill: Any, per: str) -> list[list[Any]]:
    """Each segment's values of a field, with `fill` where it has none."""
    return [
        row.get(name, [fill] * (len(row["tokens"]) if per == "token" else sum(row["mask"])))
        for rows in model
        for row in rows
    ]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_packed_comes_back_segment_by_segment(seed: int) -> None:
    trajectories, model = drawn(random.Random(seed))
    back = unpacked(pickle.loads(pickle.dumps(packed(trajectories, PLUGGED), protocol=5)))
    assert [one.values["reward"] for one in back] == [rows[0]["reward"] for rows in model]
    segments = [segment for one in back for segment in one.segments()]
    for name, fill, per in (("tokens", 0, "token"), ("kinds", -7, "token")):
        if any(name in row for rows in model for row in rows):
            assert [one[name].tolist() for one in segments] == filled(model, name, fill, per)
    if any("experts" in row for rows in model for row in rows):
        expected = filled(model, "experts", [[0] * 3] * 2, "sampled")
        assert [one["experts"].tolist() for one in segments] == expected
    if any("chosen" in row for rows in model for row in rows):
        assert [one["chosen"].tolist() for one in segments] == filled(model, "chosen", [], "sampled")
    for segment, row in zip(segments, [row for rows in model for row in rows], strict=True):
        assert segment["versions"].tolist() == row["versions"]
        np.testing.assert_allclose(segment["logprobs"], row["logprobs"], rtol=1e-6)


def test_unpacked_trajectories_are_views() -> None:
    trajectories, _ = drawn(random.Random(4))
    columns = packed(trajectories, PLUGGED)
    for one in unpacked(columns):
        for segment in one.segments():
            assert np.shares_memory(segment["tokens"], columns["token/tokens"])


def test_an_array_of_another_length_is_refused() -> None:
    segment = {**segment_of([1, 2, 3], [0, 0, -1], [-1, -1, 0]), "experts": np.zeros((2, 2, 3), np.uint8)}
    with pytest.raises(ValueError, match="field experts has 2 values for 1 sampled tokens"):
        trajectory_of([segment], PLUGGED)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"name": "a b"}, "not an identifier"),
        ({"dtype": "object"}, "no number of numpy's"),
        ({"dtype": "elephant"}, "no number of numpy's"),
        ({"per": "trajectory", "in_losses": True}, "only a field per token"),
        ({"shape": (2,), "in_losses": True}, "one number per token"),
        ({"is_ragged": True, "dtype": "int32"}, "int32 values per sampled token"),
        ({"is_ragged": True, "per": "sampled"}, "int32 values per sampled token"),
        ({"is_ragged": True, "per": "sampled", "dtype": "int32", "in_losses": True}, "neither losses"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Field(**{"name": "x", "per": "token", "by": "engine", **wrong})


def test_two_declarations_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens is declared twice"):
        Schema([*FIELDS, Field(name="tokens", per="token", by="engine", dtype="int64")])


@pytest.mark.parametrize("array", [[1], [2, 1, 5], [-1, 3, 5, 6], [1, 1, 5]])
def test_an_array_that_is_not_of_two_rows_is_refused(array: list[int]) -> None:
    with pytest.raises(ValueError, match="not 2 rows"):
        Ragged.decoded(np.array(array, np.int32), 2)


def test_begun_responses_are_joined_by_whose_data_is_the_newest() -> None:
    """Response 0 was recalled with response 1, and began again: what it had then is longer."""
    earlier = [trajectory_of([segment_of([i] * 5, [0.0] * 5, [2] * 5)], PLUGGED) for i in (10, 11)]
    now = [trajectory_of([segment_of([20], [0.0], [2])], PLUGGED)]
    (joined,) = joined_by_index(
        {AttemptKey("p", 0, 0): {0: "now", 1: "earlier"}}, {"earlier": earlier, "now": now}
    )
    assert [one.per_token["tokens"].tolist() for one in joined.trajectories] == [[20], [11] * 5]
    (late,) = joined_by_index({AttemptKey("p", 0, 0): {1: "earlier"}}, {"earlier": earlier})
    assert [one.num_tokens for one in late.trajectories] == [0, 5]

"""Payloads come back from a checkpoint bit for bit, in their order."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.checkpoint.payloads import read_payloads, write_payloads
from asyncrl_cli.data.sample_fields import BUILT_IN, FIELDS, Field, Schema
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of


def payload(uid, lengths, seed=0):
    rng = np.random.default_rng(seed)
    trajectories = tuple(
        trajectory_of(
            tuple(
                dict(
                    tokens=rng.integers(0, 60, length).astype(np.int32),
                    logprobs=rng.normal(size=length).astype(np.float32),
                    versions=rng.integers(-1, 9, length).astype(np.int32),
                    mask=rng.random(length) < 0.5,
                )
                for length in segments
            ),
            BUILT_IN,
            reward=float(rng.random()),
            finish_reason="stop",
            teacher_name="math",
        )
        for segments in lengths
    )
    return GroupPayload(uid=uid, epoch=seed, attempt=1, trajectories=trajectories)


def assert_same(left: GroupPayload, right: GroupPayload):
    assert (left.uid, left.epoch, left.attempt) == (right.uid, right.epoch, right.attempt)
    for one, other in zip(left.trajectories, right.trajectories, strict=True):
        assert one.values == other.values
        for mine, yours in zip(one.segments(), other.segments(), strict=True):
            for name in ("tokens", "logprobs", "versions", "mask"):
                assert mine[name].dtype == yours[name].dtype
                assert mine[name].tobytes() == yours[name].tobytes()


@pytest.mark.slow
@given(st.lists(st.lists(st.lists(st.integers(0, 6), max_size=3), max_size=4), max_size=4))
def test_groups_come_back_bit_for_bit(groups):
    payloads = [payload(f"p{index}", lengths, index) for index, lengths in enumerate(groups)]
    with tempfile.TemporaryDirectory() as directory:
        write_payloads(Path(directory), payloads)
        found = read_payloads(Path(directory))
    assert len(found) == len(payloads)
    for one, other in zip(payloads, found, strict=True):
        assert_same(one, other)


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    write_payloads(tmp_path, [payload("p", [[5], [3, 2]])])
    structure = json.loads((tmp_path / "payloads.json").read_text())
    structure["groups"][0]["trajectories"].pop()
    (tmp_path / "payloads.json").write_text(json.dumps(structure))
    with pytest.raises(RefusedError, match="5 tokens expected"):
        read_payloads(tmp_path)


def test_files_with_no_more_than_the_engines_arrays_are_read(tmp_path):
    arrays = {
        "tokens": np.array([5, 6, 7, 8, 9], np.int32),
        "logprobs": np.array([0, -0.5, 0, -0.25, -1], np.float32),
        "versions": np.array([-1, 3, -1, 3, 4], np.int32),
        "mask": np.array([False, True, False, True, True]),
    }
    save_file(arrays, tmp_path / "payloads.safetensors")
    done = {"reward": 1.0, "finish_reason": "stop", "segment_lengths": [2, 3], "turn_rewards": [0.25, 0.75]}
    begun = {"reward": 0.0, "finish_reason": "abort", "segment_lengths": []}
    group = {"uid": "p", "epoch": 2, "attempt": 1, "trajectories": [done, begun]}
    structure = {"schema_version": 2, "groups": [group]}
    (tmp_path / "payloads.json").write_text(json.dumps(structure))
    (read,) = read_payloads(tmp_path, Schema([*FIELDS, Field(name="more", per="token", by="engine")]))
    assert (read.uid, read.epoch, read.attempt) == ("p", 2, 1)
    first, second = read.trajectories
    assert first.values == {"reward": 1.0, "finish_reason": "stop", "turn_rewards": [0.25, 0.75]}
    assert first.counts == ((2, 1), (3, 2))
    assert [segment["tokens"].tolist() for segment in first.segments()] == [[5, 6], [7, 8, 9]]
    assert [segment["versions"].tolist() for segment in first.segments()] == [[-1, 3], [-1, 3, 4]]
    assert (second.counts, second.values["finish_reason"]) == ((), "abort")


def test_fields_of_the_users_come_back_and_one_that_is_declared_anew_is_refused(tmp_path):
    def schema(dtype="int16", *more: Field) -> Schema:
        marks = Field(name="marks", per="sampled", by="environment", dtype=dtype, fill=-1)
        return Schema([*FIELDS, marks, Field(name="level", per="trajectory", by="environment"), *more])

    segment = segment_of([1, 2, 3], [0, -1, -1], [-1, 0, 0])
    one = trajectory_of([{**segment, "marks": np.array([7, -9], np.int16)}], schema(), reward=0.0, level="a")
    other = trajectory_of([segment], schema(), reward=1.0)
    group = GroupPayload(uid="p", epoch=0, attempt=0, trajectories=(one, other))
    write_payloads(tmp_path, [group], schema())
    added = Field(name="added", per="token", by="engine")
    (read,) = read_payloads(tmp_path, schema("int16", added))
    assert [next(iter(t.segments()))["marks"].tolist() for t in read.trajectories] == [[7, -9], [-1, -1]]
    assert [t.values.get("level") for t in read.trajectories] == ["a", None]
    (read,) = read_payloads(tmp_path)  # they are declared no more
    assert [(set(t.per_sampled), "level" in t.values) for t in read.trajectories] == [(set(), False)] * 2
    with pytest.raises(RefusedError, match="marks is not as the profile declares it"):
        read_payloads(tmp_path, schema("int32"))


def test_a_reward_that_is_no_finite_number_is_refused(tmp_path):
    group = payload("p", [[5]])
    spoilt = replace(group.trajectories[0], values={"reward": math.nan, "finish_reason": "stop"})
    write_payloads(tmp_path, [replace(group, trajectories=(spoilt,))])
    with pytest.raises(RefusedError, match=r"groups\.0\.trajectories\.0\.reward: .*isfinite"):
        read_payloads(tmp_path)

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

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.checkpoint.payloads import read_payloads, write_payloads
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of


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


def test_a_reward_that_is_no_finite_number_is_refused(tmp_path):
    group = payload("p", [[5]])
    spoilt = replace(group.trajectories[0], values={"reward": math.nan, "finish_reason": "stop"})
    write_payloads(tmp_path, [replace(group, trajectories=(spoilt,))])
    with pytest.raises(RefusedError, match=r"groups\.0\.trajectories\.0\.reward: .*isfinite"):
        read_payloads(tmp_path)

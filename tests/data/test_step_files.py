"""The arrays of a train step on disk: what is read is what was written; a damaged file is refused."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, TrainBatch, TrajectoryMeta
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.step_files import read_step, step_file, write_step
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of


def made(uid: str, lengths: tuple[int, ...]) -> tuple[GroupResult, GroupPayload]:
    trajectories, metas = [], []
    for length in lengths:
        versions = [-1, -1, *range(length)]
        segment = segment_of(range(length + 2), [0.0, 0.0, *(-0.1 * i for i in range(length))], versions)
        segment = {**segment, "ref": np.arange(length, dtype=np.float32)}
        values = {"reward": float(length), "finish_reason": "stop"}
        trajectories.append(trajectory_of([segment, segment], BUILT_IN, **values))
        metas.append(
            TrajectoryMeta(
                prompt_tokens=2,
                response_tokens=2 * length,
                reward=float(length),
                finish_reason="stop",
                version_tokens=tuple((version, 2) for version in range(length)),
                facts=(("calls", 1.5),),
            )
        )
    result = GroupResult(
        key=AttemptKey(uid, 1, 0), trajectories=tuple(metas), failures=(), failed_tokens=3, payload=("a/0",)
    )
    return result, GroupPayload(uid=uid, epoch=1, attempt=0, trajectories=tuple(trajectories))


def test_a_step_is_read_as_it_was_written(tmp_path):
    groups = [made("a", (1, 3)), made("b", (2,))]
    batch = TrainBatch(
        step=7, window=3, step_in_window=1, groups=tuple(one for one, _ in groups), columns=("ref",)
    )
    write_step(tmp_path, batch, [payload for _, payload in groups], [[0.5, None], [0.0]], BUILT_IN)
    found, payloads, advantages = read_step(step_file(tmp_path, 7))
    assert found.groups[0].payload is None
    assert [one.trajectories for one in found.groups] == [one.trajectories for one, _ in groups]
    assert (found.step, found.window, found.step_in_window, found.columns) == (7, 3, 1, ("ref",))
    assert advantages == [[0.5, None], [0.0]]
    for read, (_, written) in zip(payloads, groups, strict=True):
        assert (read.uid, read.epoch, read.attempt) == (written.uid, 1, 0)
        for one, other in zip(read.trajectories, written.trajectories, strict=True):
            assert (one.counts, one.values) == (other.counts, other.values)
            for name in ("tokens", "logprobs", "versions", "mask"):
                np.testing.assert_array_equal(one.per_token[name], other.per_token[name])
            np.testing.assert_array_equal(one.per_sampled["ref"], other.per_sampled["ref"])


@pytest.mark.parametrize("damage", [lambda whole: whole[:-5], lambda whole: b"no arrays", None])
def test_a_file_that_is_damaged_or_missing_is_refused(damage, tmp_path):
    group, payload = made("a", (1, 3))
    batch = TrainBatch(step=1, window=0, step_in_window=0, groups=(group,))
    write_step(tmp_path, batch, [payload], [[0.5, 0.5]], BUILT_IN)
    path = step_file(tmp_path, 1)
    whole = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(whole))
    with pytest.raises(RefusedError, match=r"step-000001.safetensors cannot be read") as refused:
        read_step(path)
    assert "logging.samples" in refused.value.hint

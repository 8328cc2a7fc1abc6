"""A simulated run with files as a real one writes them, arrays of its trajectories included."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asyncrl_cli.bench.simulated_runs import recorded
from asyncrl_cli.contracts.events import Observer, StepRecord
from asyncrl_cli.contracts.prompt_group import GroupResult, TrainBatch
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.step_files import write_step
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for
from asyncrl_cli.simulate.world import simulate
from asyncrl_cli.train.step_plan import advantages_of
from tests.simulate.small_workload import COSTS

PROMPT = (7, 8, 9)
WORKLOAD = Workload.model_validate(
    {
        "name": "small",
        "windows": 5,
        "profile": {
            "placement": {"gpus": 2},
            "trainer": {"ppo_mini_batch_size": 2},
            "rollout": {"n": 4, "slots": 16},
        },
        **tomllib.loads(COSTS),
    }
)


def made_run(directory: Path, profile: str, sets: Sequence[str] = ()) -> None:
    loaded = profile_for(WORKLOAD, profile, sets, groups=96)
    with recorded(loaded, directory) as recorder:
        observers = [recorder, Arrays(directory / "samples", loaded.profile)]
        made = simulate(loaded.profile, WORKLOAD, observers=observers)
    assert made.error is None


class Arrays(Observer):
    """Writes made-up tokens and logprobs, with the versions and rewards of the run."""

    def __init__(self, directory: Path, profile: Profile) -> None:
        self._directory, self._algorithm = directory, profile.algorithm

    def step(self, record: StepRecord) -> None:
        rewards = [[meta.reward for meta in group.trajectories] for group in record.groups]
        batch = TrainBatch(
            step=record.step,
            window=record.window,
            step_in_window=record.step_in_window,
            groups=record.groups,
        )
        payloads = [_payload(group) for group in record.groups]
        advantages = advantages_of(rewards, self._algorithm)
        write_step(self._directory, batch, payloads, advantages, BUILT_IN)


def _payload(group: GroupResult) -> GroupPayload:
    trajectories = []
    for meta in group.trajectories:
        versions = [version for version, count in meta.version_tokens for _ in range(count)]
        tokens = [*PROMPT, *range(len(versions))]
        logprobs = [*[0.0] * len(PROMPT), *np.linspace(-2, -0.1, len(versions))]
        segment = segment_of(tokens, logprobs, [*[-1] * len(PROMPT), *versions])
        values = {"reward": meta.reward, "finish_reason": meta.finish_reason}
        trajectories.append(trajectory_of([segment], BUILT_IN, **values))
    uid, epoch, attempt = group.key
    return GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=tuple(trajectories))

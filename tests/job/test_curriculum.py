"""The curriculum: which prompts come less often, and the same ones after a resume."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.contracts.item import make_item
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.job.driver_curriculum import distance
from asyncrl_cli.job.driver_prompts import PromptFeed
from asyncrl_cli.loop.ledger import Stage
from tests.loop.proof.memory import resume_from
from tests.loop.worlds import run_world, settings


def items_of(num):
    return [make_item(f"prompt {index}", "1", {}) for index in range(num)]


def group_of(uid, *rewards):
    metas = [
        TrajectoryMeta(
            prompt_tokens=1, response_tokens=1, reward=reward, finish_reason="stop", version_tokens=((0, 1),)
        )
        for reward in rewards
    ]
    return GroupResult(
        key=AttemptKey(uid, 0, 0), trajectories=tuple(metas), failures=(), failed_tokens=0, payload=None
    )


def rewards_of(uid):
    """A third of the prompts is always solved, a third never."""
    return {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (1.0, 0.0)}[int(uid, 16) % 3]


def taken(feed, num):
    """Each prompt's group ends at once."""
    prompts = []
    for _ in range(num):
        prompts.append(feed.next())
        feed.ended(group_of(prompts[-1].uid, *rewards_of(prompts[-1].uid)))
    return [(prompt.uid, prompt.epoch) for prompt in prompts]


def test_a_state_stays_as_it_was_when_further_groups_end():
    feed = PromptFeed(items_of(2), seed=3, curriculum=0.25)
    taken(feed, 1)
    state = feed.state()
    before = json.dumps(state)
    taken(feed, 1)
    assert json.dumps(state) == before != json.dumps(feed.state())


def test_prompts_with_equal_rewards_come_in_their_share_of_the_epochs():
    feed, epochs = PromptFeed(items_of(60), seed=3, curriculum=0.25), 40
    found = Counter[str]()
    while True:
        uid, epoch = taken(feed, 1)[0]
        if epoch > epochs:
            break
        found[uid] += 1
    mixed = [number for uid, number in found.items() if len(set(rewards_of(uid))) > 1]
    equal = [number for uid, number in found.items() if len(set(rewards_of(uid))) == 1]
    assert mixed == [epochs + 1] * len(mixed)  # once per epoch, as ever
    # all come in the first epoch; later the number is binomial, within four standard deviations
    deviation = math.sqrt(epochs * 0.25 * 0.75 / len(equal))
    assert np.mean(equal) == pytest.approx(1 + epochs * 0.25, abs=4 * deviation)
    figures = feed.figures()
    assert figures["curriculum/passed"] >= (epochs + 1) * len(equal) - sum(equal)
    assert figures["curriculum/equal_ratio"] == pytest.approx(len(equal) / 60)
    assert figures["curriculum/sampled_equal_ratio"] < figures["curriculum/equal_ratio"] / 1.5


def test_a_prompt_that_is_solved_now_and_then_comes_in_every_epoch_again():
    items = items_of(2)
    feed = PromptFeed(items, seed=1, curriculum=0.01)
    stuck, other = (item["uid"] for item in items)
    feed.ended(group_of(stuck, 0.0, 0.0))
    feed.ended(group_of(other, 0.5, 0.25))
    assert {feed.next().uid for _ in range(10)} == {other}
    feed.ended(group_of(stuck, 0.0, 1.0))
    following = [feed.next() for _ in range(20)]
    whole = Counter(
        prompt.uid for prompt in following if following[0].epoch < prompt.epoch < following[-1].epoch
    )
    assert whole[stuck] == whole[other] >= 8


@given(pieces=st.lists(st.integers(0, 25), max_size=6), share=st.floats(0.05, 1.0), seed=st.integers(0, 99))
def test_any_split_by_state_and_restore_gives_the_same_sequence_and_figures(pieces, share, seed):
    items = items_of(9)
    whole = PromptFeed(items, seed=seed, curriculum=share)
    expected, found, state = taken(whole, sum(pieces)), [], None
    for num in [0, *pieces]:
        feed = PromptFeed(items, seed=seed, curriculum=share)
        if state is not None:
            feed.restore(json.loads(json.dumps(state)))
        found += taken(feed, num)
        state = feed.state()
    assert found == expected
    assert feed.figures() == whole.figures()


def test_a_damaged_state_is_refused():
    items = items_of(3)
    feed = PromptFeed(items, seed=0, curriculum=0.5)
    taken(feed, 4)
    state = feed.state()
    with pytest.raises(RefusedError, match=r"feed's state is damaged: curriculum\.groups"):
        feed.restore(
            {**state, "curriculum": {"groups": {"x": [float("nan"), True]}, "recent": [], "passed": 0}}
        )
    with pytest.raises(RefusedError, match="feed's state is damaged: curriculum"):
        feed.restore({name: value for name, value in state.items() if name != "curriculum"})


values = st.lists(st.sampled_from([0.0, 0.125, 0.5, 1.0, 2.5]), min_size=1, max_size=8)


@given(values, values)
def test_the_distance_is_how_far_sorted_copies_are_apart(some, others):
    """Repeated to the same length: the mean difference of the sorted values."""
    one, other = sorted(some * len(others)), sorted(others * len(some))
    assert distance(some, others) == pytest.approx(np.abs(np.subtract(one, other)).mean(), abs=1e-12)


@pytest.mark.parametrize("mode", ["partial-rollout", "colocate"])
def test_a_run_with_a_curriculum_resumes_with_what_it_knew(mode):
    items, loop_settings = items_of(12), settings(mode, train_steps=14)
    times = {"equal_ratio": 0.6}

    def feed():
        return PromptFeed(items, seed=0, curriculum=0.2)

    first = run_world(loop_settings, feed=feed(), times=times)
    assert first.error is None
    figures = first.recorder.steps[-1].feed
    assert figures["curriculum/passed"] > 0
    frozen, state = first.checkpoints.snapshots[3]
    assert state["groups"]["feed"]["curriculum"]["groups"]
    again = run_world(loop_settings, feed=feed(), times=times, resume_from=resume_from(frozen, state))
    assert again.error is None
    ledger = again.recorder.steps[-1].ledger
    assert ledger[Stage.TRAINED] == 14 * 4

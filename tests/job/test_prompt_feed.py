"""The feed's order: every prompt once per epoch, another order in each, and the same whatever a resume cuts
it into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.contracts.item import fingerprint, make_item
from asyncrl_cli.job.driver_prompts import PromptFeed


def items_named(*names: str) -> list:
    return [make_item(f"prompt {name}", f"answer {name}", {}) for name in names]


def numbered_items(num: int) -> list:
    return items_named(*map(str, range(num)))


def take(feed: PromptFeed, num: int) -> list[tuple[str, int, str]]:
    prompts = [feed.next() for _ in range(num)]
    return [(prompt.uid, prompt.epoch, prompt.item["prompt"]) for prompt in prompts]


@given(num_items=st.integers(1, 30), seed=st.integers(0, 2**40), num_epochs=st.integers(1, 4))
def test_each_epoch_holds_every_prompt_exactly_once(num_items, seed, num_epochs):
    items = numbered_items(num_items)
    taken = take(PromptFeed(items, seed=seed), num_items * num_epochs)
    for epoch in range(num_epochs):
        part = taken[epoch * num_items : (epoch + 1) * num_items]
        assert {found for _, found, _ in part} == {epoch}
        assert sorted(text for _, _, text in part) == sorted(item["prompt"] for item in items)


@given(
    num_items=st.integers(1, 12), seed=st.integers(0, 1000), pieces=st.lists(st.integers(0, 17), max_size=8)
)
def test_any_split_by_state_and_restore_gives_the_same_sequence(num_items, seed, pieces):
    items = numbered_items(num_items)
    whole = take(PromptFeed(items, seed=seed), sum(pieces))
    pieced, state = [], PromptFeed(items, seed=seed).state()
    for num in pieces:
        feed = PromptFeed(items, seed=seed)
        feed.restore(json.loads(json.dumps(state)))
        pieced += take(feed, num)
        state = feed.state()
    assert pieced == whole


def test_epochs_are_shuffled_differently_and_so_are_seeds():
    items = numbered_items(50)
    feed = PromptFeed(items, seed=3)
    first, second = ([text for _, _, text in take(feed, 50)] for _ in range(2))
    other = [text for _, _, text in take(PromptFeed(items, seed=4), 50)]
    unshuffled = [item["prompt"] for item in items]
    assert len({tuple(order) for order in (first, second, other, unshuffled)}) == 4


def test_the_first_prompt_is_equally_often_any_of_them():
    items = numbered_items(4)
    firsts = [take(PromptFeed(items, seed=seed), 1)[0][2] for seed in range(2000)]
    assert all(400 < firsts.count(item["prompt"]) < 600 for item in items)


def test_the_order_is_pinned_for_checkpoints_of_older_versions():
    # random.Random("prompts 7 0").random() gives 0.3437 0.5949 0.5102 0.1660 0.2334 for a b c d e.
    taken = take(PromptFeed(items_named(*"abcde"), seed=7), 5)
    assert [text[-1] for _, _, text in taken] == list("deacb")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (items_named("a", "b"), items_named("a", "b", "c")),
        (items_named("a", "b"), items_named("b", "a")),
        ([make_item("1+1", "2", {})], [make_item("1+1", "3", {})]),
        ([make_item("1+1", "2", {"cases": [1, 2]})], [make_item("1+1", "2", {"cases": [1, 3]})]),
    ],
    ids=["more", "another order", "another answer", "other metadata"],
)
def test_a_foreign_item_list_is_refused(before, now):
    state = PromptFeed(before, seed=0).state()
    with pytest.raises(
        RefusedError, match=f"other prompts: {len(before)} items .* now {len(now)}"
    ) as refused:
        PromptFeed(now, seed=0).restore(state)
    assert "task.source" in refused.value.hint


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"": items_named("x"), "hard": items_named("z")}, "eval.sets.hard changed"),
        ({"": items_named("x", "x2"), "hard": items_named("y")}, "the eval prompts changed"),
        ({"": items_named("x")}, "eval.sets.hard changed"),
    ],
)
def test_other_items_of_evals_are_foreign(changed, named):
    items = items_named("a", "b")
    state = PromptFeed(items, seed=0, eval_sets={"": items_named("x"), "hard": items_named("y")}).state()
    with pytest.raises(RefusedError, match=named) as refused:
        PromptFeed(items, seed=0, eval_sets=changed).restore(state)
    assert "eval_path" in refused.value.hint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        (1, 1.0),
        ("1", 1),
        (Decimal("1.0"), Decimal("1.00")),
        (b"a", "a"),
        (True, 1),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_values_that_a_reward_can_tell_apart_have_different_fingerprints(one, other):
    assert fingerprint([make_item("p", "a", {"x": one})]) != fingerprint([make_item("p", "a", {"x": other})])


def test_the_fingerprint_is_the_same_in_another_process():
    """Strings hash, and so sets are ordered, and objects are addressed, differently in each."""
    script = (
        "from datetime import datetime, timezone; from decimal import Decimal\n"
        "from asyncrl_cli.contracts.item import fingerprint, make_item\n"
        "when = datetime(2026, 1, 2, tzinfo=timezone.utc)\n"
        "values = [{'a', 'b', 'c', 'd'}, object(), 10 ** 5000, when, Decimal('1.50'), b'x', None]\n"
        "print(fingerprint([make_item('p', 'a', {'x': values})]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    run = [
        subprocess.check_output([sys.executable, "-c", script], env={**env, "PYTHONHASHSEED": seed})
        for seed in "12"
    ]
    assert run[0] == run[1]


def test_a_prompt_is_found_again_by_its_uid():
    items = numbered_items(20)
    feed = PromptFeed(items, seed=1)
    given = [feed.next() for _ in range(30)]
    resumed = PromptFeed(items, seed=1)
    resumed.restore(feed.state())
    assert [resumed.find(prompt.uid, prompt.epoch) for prompt in given] == given


def test_a_prompt_that_was_not_given_yet_is_not_found():
    items = numbered_items(20)
    given, later = (PromptFeed(items, seed=1) for _ in range(2))
    take(given, 30)
    take(later, 30)
    with pytest.raises(RefusedError, match="of epoch 1, which the feed never reached"):
        given.find(later.next().uid, 1)
    with pytest.raises(RefusedError, match="of epoch 2, which the feed never reached"):
        given.find(given.next().uid, 2)


def test_a_uid_that_the_task_does_not_have_is_refused():
    with pytest.raises(
        RefusedError, match="names prompt 0123456789abcdef, which is not among the 20 of the task"
    ) as refused:
        PromptFeed(numbered_items(20), seed=1).find("0123456789abcdef", 0)
    assert "task.source" in refused.value.hint


def test_another_seed_is_refused_with_the_one_that_fits():
    state = PromptFeed(items_named("a", "b"), seed=5).state()
    with pytest.raises(RefusedError, match="seed 5, now 6") as refused:
        PromptFeed(items_named("a", "b"), seed=6).restore(state)
    assert "run.seed = 5" in refused.value.hint


@pytest.mark.parametrize(
    "damage", [{"cursor": 3}, {"cursor": -1}, {"cursor": "1"}, {"epoch": -1}, {"fingerprint": None}]
)
def test_a_damaged_state_is_refused(damage):
    feed = PromptFeed(items_named("a", "b"), seed=0)
    with pytest.raises(RefusedError, match="damaged"):
        feed.restore({**feed.state(), **damage})


def test_a_refused_state_leaves_the_feed_as_it_was():
    feed, same = (PromptFeed(numbered_items(9), seed=0) for _ in range(2))
    take(feed, 4)
    take(same, 4)
    with pytest.raises(RefusedError):
        feed.restore({**feed.state(), "cursor": 99})
    assert take(feed, 20) == take(same, 20)


def test_two_items_with_one_uid_are_refused():
    with pytest.raises(ValueError, match="only 1 different uids"):
        PromptFeed(items_named("a", "a"), seed=0)

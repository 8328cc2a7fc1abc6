"""The split of a train step over optimizer steps, ranks and microbatches."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.train.batch import cut_packed, cut_padded
from asyncrl_cli.train.step_plan import split_by_tokens, split_groups, training_order, unique_tokens
from tests.train.train_samples import make_step
from tests.trainers import planned

groups_lists = st.lists(
    st.tuples(st.integers(0, 100), st.lists(st.integers(1, 60), min_size=1, max_size=9)),
    min_size=1,
    max_size=12,
)
lengths_lists = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(lengths_lists, st.integers(1, 5))
def test_split_gives_every_row_to_one_rank_and_balances_tokens(lengths, ranks):
    shares = split_by_tokens(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


@given(groups_lists, st.integers(1, 5))
def test_groups_are_split_so_that_ranks_compute_no_more_than_whole_groups_or_single_trajectories_would(
    groups, ranks
):
    shared, own = zip(*groups, strict=True)
    shares = split_groups(own, shared, ranks)
    group_of = [number for number, lengths in enumerate(own) for _ in lengths]
    flat = [length for lengths in own for length in lengths]
    assert sorted(i for share in shares for i in share) == list(range(len(flat)))

    def most(shares):
        return max(sum(flat[i] for i in s) + sum(shared[g] for g in {group_of[i] for i in s}) for s in shares)

    whole = split_by_tokens([prompt + sum(lengths) for prompt, lengths in groups], ranks)
    by_group = [[i for i, group in enumerate(group_of) if group in share] for share in whole]
    apart = split_by_tokens([shared[g] + flat[i] for i, g in enumerate(group_of)], ranks)
    assert most(shares) <= most(by_group)
    assert most(shares) <= most(apart) or max(map(len, own)) not in (1, 2, 4, 8)


def test_an_optimizer_step_of_which_a_limit_has_cut_off_every_response_gives_each_rank_nothing():
    metas, _ = make_step(0, num_groups=2)
    cut_off = [
        replace(group, trajectories=[replace(meta, finish_reason="length") for meta in group.trajectories])
        for group in metas
    ]
    for plan in planned(cut_off, ranks=2, mask_truncated=True):
        (step,) = plan.optimizer_steps
        assert (step.trajectories, step.num_loss_tokens, step.num_trajectories) == ((), 0, 0)


def test_ranks_are_balanced_by_what_they_compute():
    """Three groups of 8 with prompts of 4000 tokens and responses of 50, on two ranks: if prompts are
    computed once, dividing a group costs more than it saves, and one rank has two. Else each has half."""
    metas, _ = make_step(0, num_groups=3, n=8)
    even = [
        replace(
            group,
            trajectories=tuple(
                replace(meta, prompt_tokens=4000, response_tokens=50) for meta in group.trajectories
            ),
        )
        for group in metas
    ]
    for shares_prefixes, numbers in ((True, [8, 16]), (False, [12, 12])):
        plans = planned(even, ranks=2, shares_prefixes=shares_prefixes)
        assert sorted(len(plan.optimizer_steps[0].trajectories) for plan in plans) == numbers


@given(lengths_lists, st.integers(50, 1000), st.integers(0, 500))
def test_microbatches_hold_every_row_once_within_the_budget(lengths, max_tokens, split_cost):
    parts = cut_padded(lengths, max_tokens, split_cost)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        assert part == sorted(part)
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= max_tokens


@given(lengths_lists, st.integers(50, 1000))
def test_rows_end_to_end_fill_the_budget_with_their_own_tokens(lengths, max_tokens):
    parts = cut_packed(lengths, max_tokens)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert all(len(part) == 1 or num <= max_tokens for part, num in zip(parts, sums, strict=True))
    # What a microbatch lacks is less than the next one's longest row.
    assert all(
        num + max(lengths[i] for i in after) > max_tokens for num, after in zip(sums, parts[1:], strict=False)
    )


def test_microbatches_stay_together_until_padding_costs_more_than_a_split():
    lengths = [100] + [10] * 9
    # Cutting the long row off saves 9 * 90 = 810 padded tokens.
    assert cut_padded(lengths, 8192, split_cost_tokens=810) == [list(range(10))]
    assert cut_padded(lengths, 8192, split_cost_tokens=809) == [[0], list(range(1, 10))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_plan_covers_every_trajectory_once_with_its_groups_advantage(ranks):
    metas, _ = make_step(0, num_groups=6, n=4)
    plans = planned(metas, ranks=ranks, num_minibatches=3)
    for step in range(3):
        trajectories = [t for plan in plans for t in plan.optimizer_steps[step].trajectories]
        expected = [(group, trajectory) for group in (2 * step, 2 * step + 1) for trajectory in range(4)]
        assert sorted((t.group, t.trajectory) for t in trajectories) == expected
        tokens = sum(
            m.response_tokens for group in metas[2 * step : 2 * step + 2] for m in group.trajectories
        )
        assert {plan.optimizer_steps[step].num_loss_tokens for plan in plans} == {tokens}
        for t in trajectories:
            rewards = [m.reward for m in metas[t.group].trajectories]
            assert (t.advantage > 0) == (len(set(rewards)) > 1 and rewards[t.trajectory] == 1.0)
    assert pickle.loads(pickle.dumps(plans)) == plans
    assert plans == planned(metas, ranks=ranks, num_minibatches=3)


def test_a_prompt_counts_once_per_group_where_that_saves_a_tenth():
    metas, _ = make_step(0, num_groups=3, n=4)
    every = sum(m.prompt_tokens + m.response_tokens for group in metas for m in group.trajectories)
    prompts = sum(group.trajectories[0].prompt_tokens for group in metas)
    assert every - 3 * prompts < 0.9 * every
    assert unique_tokens(metas, None) == every - 3 * prompts
    assert unique_tokens(metas, False) == every
    assert unique_tokens([replace(g, trajectories=g.trajectories[:1]) for g in metas], None) == sum(
        g.trajectories[0].prompt_tokens + g.trajectories[0].response_tokens for g in metas
    )


def test_groups_that_do_not_divide_into_mini_batches_are_refused():
    metas, _ = make_step(0, num_groups=3)
    with pytest.raises(ValueError, match="3 groups do not divide into 2 mini-batches"):
        planned(metas, num_minibatches=2)


def test_one_mini_batch_is_trained_in_take_order():
    metas, _ = make_step(0, num_groups=5)
    assert training_order(metas, num_minibatches=1, seed=0, step=1) == metas


def test_mini_batches_are_a_lot_of_the_steps_groups_and_not_the_order_in_which_they_finished():
    metas, _ = make_step(0, num_groups=16)
    steps = [training_order(metas, num_minibatches=4, seed=7, step=step) for step in range(1, 201)]
    positions = [[metas.index(group) for group in order] for order in steps]
    for order in positions:
        assert sorted(order) == list(range(16))
        assert all(order[i : i + 4] == sorted(order[i : i + 4]) for i in range(0, 16, 4))
    # A group is in the first mini-batch in a quarter of the steps: 50 of 200, standard deviation 6.1.
    first = [sum(group in order[:4] for order in positions) for group in range(16)]
    assert 25 < min(first) <= max(first) < 75


def test_the_lot_of_a_step_depends_on_its_seed_and_number_alone():
    """A resumed run, which is another process, draws the same."""
    code = (
        "import sys; from asyncrl_cli.train.step_plan import training_order as order;"
        "print([order(range(8), num_minibatches=2, seed=s, step=t) for s in (0, 1) for t in (1, 2)]);"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    steps = [dict(num_minibatches=2, seed=seed, step=step) for seed in (0, 1) for step in (1, 2)]
    drawn = [training_order(range(8), **step) for step in steps]
    assert len({tuple(order) for order in drawn}) == 4
    told = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert told.stdout.strip() == str(drawn)
    assert told.returncode == 0, "planning imports no torch"

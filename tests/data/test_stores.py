"""One suite for every store: what is put comes back, by field; what is cleared is gone; pins hold."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from tests.data.test_trajectories import PLUGGED, drawn

from asyncrl_cli.data import ray_store
from asyncrl_cli.data.ray_store import RayStore
from asyncrl_cli.data.store import LocalStore, Store, Stored

OTHER_FIELDS = {"versions", "mask", "logprobs", "kinds", "experts"}


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "local":
        yield LocalStore(PLUGGED)
    else:
        request.getfixturevalue("ray_session")
        yield RayStore(PLUGGED)


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
    yield
    ray.shutdown()


def put(store: Store, key: str, seed: int) -> Stored:
    """Put drawn trajectories, as a worker does, and hold them, as the driver does."""
    trajectories, _ = drawn(random.Random(seed))
    stored = arrived(store, pickle.loads(pickle.dumps(store.put(key, trajectories))))
    store.hold(stored)
    return stored


def arrived(store: Store, stored: Stored) -> Stored:
    if not isinstance(store, RayStore):
        return stored
    heads, objects = ray_store.shipped([stored], 20)
    return ray_store.received(heads, [ray.put(one) for one in objects])[0]


def test_only_the_fields_that_are_asked_for_come_back(store: Store) -> None:
    put(store, "a@0.0/0", 3)
    trajectories, _ = drawn(random.Random(3))
    (some,), (everything,) = (store.get(store.stored(["a@0.0/0"]), fields) for fields in (["tokens"], None))
    assert len(some) == len(everything) == len(trajectories)
    for one, whole, was in zip(some, everything, trajectories, strict=True):
        assert set(one.per_token) == {"tokens"}
        assert not one.per_sampled
        assert one.counts == whole.counts == was.counts
        assert one.values == was.values
        np.testing.assert_array_equal(one.per_token["tokens"], was.per_token["tokens"])
        for name, array in was.per_token.items():
            np.testing.assert_array_equal(whole.per_token[name], array)
            assert whole.per_token[name].dtype == array.dtype


def test_columns_are_added_beside_what_is_there_and_over_earlier_ones(store: Store) -> None:
    stored = put(store, "a@0.0/0", 3)
    trajectories, _ = drawn(random.Random(3))
    for value in (1.0, 2.0):
        for name in ("ref", "critic"):  # two scorers at once: each adds to what it was given
            column = [np.full(one.num_sampled, value, np.float32) for one in trajectories]
            store.hold(arrived(store, store.add(stored, name, column)))
    (found,) = store.get(store.stored(["a@0.0/0"]), ["ref", "critic", "tokens"])
    for one, was in zip(found, trajectories, strict=True):
        assert (
            one.per_sampled["ref"].tolist() == one.per_sampled["critic"].tolist() == [2.0] * was.num_sampled
        )
        np.testing.assert_array_equal(one.per_token["tokens"], was.per_token["tokens"])


def test_cleared_keys_are_gone_and_clearing_twice_is_nothing(store: Store) -> None:
    for seed in range(4):
        put(store, f"a@0.{seed}/0", seed)
    put(store, "b@0.0/0", 9)
    store.clear(["a@0.1/0", "a@0.2/0", "unknown"])
    store.clear(["a@0.1/0"])
    assert sorted(store.keys("a@")) == ["a@0.0/0", "a@0.3/0"]
    assert sorted(store.keys()) == ["a@0.0/0", "a@0.3/0", "b@0.0/0"]
    with pytest.raises(KeyError):
        store.stored(["a@0.1/0"])
    assert store.stats()["keys"] == 3


def test_pinned_data_outlives_its_clear(store: Store) -> None:
    put(store, "a@0.0/0", 3)
    put(store, "b@0.0/0", 5)
    with store.pinned(["a@0.0/0"]) as outer:
        with store.pinned(["a@0.0/0", "b@0.0/0"]):
            store.clear(["a@0.0/0", "b@0.0/0"])
        assert store.keys() == []
        assert len(store.get(outer)[0]) == len(drawn(random.Random(3))[0])
        with pytest.raises(KeyError):
            store.stored(["b@0.0/0"])
    with pytest.raises(KeyError):
        store.stored(["a@0.0/0"])


def test_traffic_counts_bytes_of_arrays(store: Store) -> None:
    put(store, "a@0.0/0", 3)
    trajectories, _ = drawn(random.Random(3))
    num_bytes = sum(
        array.nbytes for one in trajectories for array in (*one.per_token.values(), *one.per_sampled.values())
    )
    sums = store.traffic.sums
    # a field that only some trajectories have is filled in the others
    assert num_bytes <= sums["data_bytes_put"] == store.stats()["bytes"]
    store.get(store.stored(["a@0.0/0"]), ["tokens"])
    assert sums["data_bytes_fetched"] == sum(4 * one.num_tokens for one in trajectories)
    assert sums["data_fetch_s"] >= 0


@pytest.mark.slow
def test_a_large_part_on_ray_is_fetched_by_field_and_without_a_copy(ray_session: None) -> None:
    store = RayStore(PLUGGED)
    trajectories, _ = drawn(random.Random(3))
    stored = arrived(store, store.put("a@0.0/0", trajectories * 40_000))
    assert len(stored.pieces) > 4
    store.get([stored], ["tokens"])
    sums = store.traffic.sums
    assert sums["data_bytes_fetched"] == 40_000 * 4 * sum(one.num_tokens for one in trajectories)
    assert sums["data_bytes_copied"] == 0

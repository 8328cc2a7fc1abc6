"""Calls to actors that fail, hang or die: what the driver says of them."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import OutOfDiskError

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, ExecutorLost, RefusedError
from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.job.rank_host import RankHost
from asyncrl_cli.job.ray.session import ray_session
from asyncrl_cli.profile.schema import Profile

from .crew import nodes, small_profile

pytestmark = pytest.mark.slow


class Troubled:
    """A real actor that gets into every kind of trouble."""

    def __init__(self) -> None:
        self.calls = 0

    async def raises(self) -> None:
        self.calls += 1
        raise ValueError("the tokens do not fit")

    async def times_out_itself(self) -> None:
        raise TimeoutError("collective timed out")

    async def refuses(self) -> None:
        raise RefusedError("step-1 is of another model", hint="resume step-0")

    async def finds_the_disk_full(self) -> None:
        raise OutOfDiskError("Local disk is full")

    async def fails_as_executor(self) -> None:
        raise ExecutorFailed("rewards cannot start: no such function", hint="fix it")

    async def hangs(self) -> None:
        await asyncio.sleep(600)

    async def dies(self) -> None:
        os._exit(3)

    async def num_calls(self) -> int:
        return self.calls


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(small_profile(), cluster=nodes((4, 0))):
        yield


@pytest.fixture(scope="module")
def actor(session: None) -> Any:
    """For all tests. Only the last one ends it."""
    import ray

    made = ray.remote(Troubled).options(num_cpus=1, max_restarts=0, max_task_retries=0).remote()
    ray.get(made.num_calls.remote(), timeout=100)  # its process has started
    return made


def called(ref: Any, timeout_s: float = 30.0, host: str = "") -> Any:
    from asyncrl_cli.job.ray.calls import Limit, answer

    limit = Limit(timeout_s, "rollout.call_timeout_s")
    return asyncio.run(answer(ref, executor="rollout-0", call="group p@0.0", limit=limit, host=host))


def test_an_actors_own_error_is_quoted_and_its_traceback_logged(actor, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(ExecutorFailed) as failed:
        called(actor.raises.remote())
    assert str(failed.value) == "rollout-0 failed: ValueError: the tokens do not fit"
    assert not isinstance(failed.value, ExecutorLost)
    assert 'test_calls.py", line' in caplog.text
    assert "in raises" in caplog.text
    assert "\x1b" not in caplog.text
    assert called(actor.num_calls.remote()) == 1


def test_a_timeout_inside_the_actor_is_the_actors_error(actor):
    with pytest.raises(ExecutorFailed, match="rollout-0 failed: TimeoutError: collective timed out"):
        called(actor.times_out_itself.remote())


@pytest.mark.parametrize(("host", "where"), [("", ""), ("10.0.0.7", " on 10.0.0.7")])
def test_a_call_that_takes_too_long_names_the_call_its_node_and_the_key(actor, host, where):
    began_s = time.monotonic()
    with pytest.raises(ExecutorLost) as failed:
        called(actor.hangs.remote(), timeout_s=0.5, host=host)
    assert str(failed.value) == (
        f"rollout-0 failed: group p@0.0{where} took longer than rollout.call_timeout_s = 0.5 s"
    )
    assert time.monotonic() - began_s < 30.0  # of the 600 that it hangs


def test_a_call_whose_limit_has_no_key_names_none():
    from asyncrl_cli.job.ray.calls import Limit, answer

    async def main() -> None:
        await answer(asyncio.sleep(60), executor="rollout-0", call="its start", limit=Limit(0.05))

    with pytest.raises(ExecutorFailed) as failed:
        asyncio.run(main())
    assert str(failed.value) == "rollout-0 failed: its start took longer than 0.05 s"
    assert failed.value.hint == ""


def test_arrays_that_went_with_their_node_are_not_called_a_dead_process():
    from ray.exceptions import ObjectLostError

    from asyncrl_cli.job.ray.calls import Limit, answer

    async def fetch() -> None:
        raise ObjectLostError("ab" * 28, None, "")

    with pytest.raises(
        ExecutorLost, match="trainer-0 failed: arrays were lost during train step 5: "
    ) as failed:
        asyncio.run(answer(fetch(), executor="trainer-0", call="train step 5", limit=Limit(5.0)))
    assert "\n" not in str(failed.value)


def test_a_full_memory_is_named_without_rays_table_also_in_the_log(caplog):
    from ray.exceptions import OutOfMemoryError

    from asyncrl_cli.job.ray.calls import Limit, answer

    # Ray 2.60's own words, shortened
    said = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, "
        "ID: 60da90ca) was 21.20GB used / 23.54GB limit (0.900719)\nOOM kill reason: exceeded\n15722 6.10"
    )

    async def fetch() -> None:
        raise OutOfMemoryError(said)

    with pytest.raises(ExecutorLost) as failed:
        asyncio.run(answer(fetch(), executor="rollout-0", call="a report", limit=Limit(5.0)))
    full = "ray ended it because its node's memory was full, 21.20GB used / 23.54GB limit"
    assert str(failed.value) == f"rollout-0 failed: its process ended during a report: {full}"
    assert "15722" not in caplog.text


def test_a_full_disk_is_named_with_its_node(actor):
    import ray

    where = ray.util.get_node_ip_address()
    with pytest.raises(
        ExecutorFailed, match=f"rollout-0 failed: node {where} has room .* disk .* during group p@0.0"
    ) as failed:
        called(actor.finds_the_disk_full.remote())
    assert not isinstance(failed.value, ExecutorLost)
    assert "`df` there" in failed.value.hint


def test_refusals_keep_their_kind_and_hint(actor):
    with pytest.raises(RefusedError, match="rollout-0: step-1 is of another model") as refused:
        called(actor.refuses.remote())
    assert refused.value.hint == "resume step-0"
    with pytest.raises(RefusedError, match=r"rollout-0 on 10\.0\.0\.7: step-1 is of another model"):
        called(actor.refuses.remote(), host="10.0.0.7")
    with pytest.raises(ExecutorLost) as failed:
        called(actor.fails_as_executor.remote())
    assert str(failed.value) == "rollout-0 failed: rewards cannot start: no such function"
    assert failed.value.hint == "fix it"


def test_the_first_failure_of_several_calls_ends_the_wait_for_all(actor):
    from asyncrl_cli.job.ray.calls import Limit, all_of, answer

    async def main() -> None:
        refs = [actor.hangs.remote(), actor.raises.remote()]
        await all_of(
            answer(ref, executor=f"trainer-{rank}", call="train step 1", limit=Limit(60.0))
            for rank, ref in enumerate(refs)
        )

    began_s = time.monotonic()
    with pytest.raises(ExecutorFailed, match="trainer-1 failed: ValueError"):
        asyncio.run(main())
    assert time.monotonic() - began_s < 30.0  # of the 60 that trainer-0 may take


def test_an_error_keeps_its_executor_between_processes():
    lost = ExecutorLost("no answer", hint="wait", executor="rollout-10")
    there = pickle.loads(pickle.dumps(lost))
    assert (type(there), str(there)) == (ExecutorLost, "rollout-10 failed: no answer")
    assert (there.executor, there.hint) == ("rollout-10", "wait")


def test_an_actor_that_dies_is_named_with_what_ray_knows(actor):
    with pytest.raises(
        ExecutorLost, match=r"rollout-0 failed: its process ended during group p@0.0"
    ) as failed:
        called(actor.dies.remote())
    assert "\n" not in str(failed.value)
    assert str(failed.value).endswith("a signal ended it (kill -9, or too little memory), or it crashed")


def test_an_error_of_a_users_scorer_names_its_key_and_the_line_of_its_file(tmp_path, monkeypatch):
    """Also where a library raises it."""
    lines = "import json", "class Surprise:", "    def score(self, groups, items):", "        json.loads('{')"
    (tmp_path / "my_surprise.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    profile = Profile.model_validate({"task": {"scorers": {"surprise": "my_surprise:Surprise"}}})
    scorer = UserCode(name=profile.task.scorers["surprise"]).load()()
    meter = SimpleNamespace(doing=lambda state: nullcontext())
    host: Any = SimpleNamespace(_role="surprise", _profile=profile, _scorer=scorer, _meter=meter)
    host._payloads = lambda groups, fields: []
    code = r'task\.scorers\.surprise = "my_surprise:Surprise"'
    with pytest.raises(AsyncrlError, match=rf"{code} failed: JSONDecodeError: .* \(my_surprise\.py:4\)"):
        RankHost.score(host, 0, [], [], 0)

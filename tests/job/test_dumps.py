"""Dumps of samples that fail: the step goes on, the first is warned of, all are counted. And whose tokenizer
decodes them."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
from benchmarks.local_store import LocalStore

from asyncrl_cli.base.errors import ExecutorFailed, ExecutorLost
from asyncrl_cli.job import rank_host
from asyncrl_cli.job.driver_ranks import RayTrainer
from asyncrl_cli.job.rank_host import RankHost
from asyncrl_cli.profile.algorithm_section import TeacherSection
from asyncrl_cli.profile.schema import AlgorithmSection, ModelSection, ProcessPlace, Profile
from asyncrl_cli.train.step_plan import PlannedTrajectory

from .crew import made_up_group, make_model, small_profile


def test_failed_dumps_are_warned_of_once_and_counted(caplog, tmp_path):
    failures = {
        2: ExecutorFailed("trainer-0 failed: OSError: [Errno 28] No space left"),
        3: ExecutorLost("it took too long"),
    }
    written, warnings = [], []

    async def dump(step: int) -> None:
        await asyncio.sleep(0)
        if step in failures:
            raise failures[step]
        written.append(step)

    async def main() -> int:
        trainer = RayTrainer(list, small_profile(), LocalStore(), samples_dir=tmp_path, warn=warnings.append)
        for step in (1, 2, 3, 4):
            await trainer.begin_dump(step, lambda step=step: dump(step))
        await trainer.finish_dumps()
        await trainer.finish_dumps()
        return trainer.failed_dumps

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(main()) == 2
    assert written == [1, 4]
    (warning,) = warnings
    assert (
        "the samples of step 2 are lost, training goes on: trainer-0 failed: OSError: [Errno 28] No "
        "space "
        "left"
    ) in warning
    assert [record.getMessage() for record in caplog.records][-1] == (
        "the samples of step 3 are lost: it took too long"
    )


def test_a_dump_asks_for_what_the_losses_kept_before_the_next_step_begins(tmp_path):
    asked = []

    async def dump() -> None:
        asked.append("kept")
        await asyncio.sleep(0)

    async def main() -> None:
        trainer = RayTrainer(list, small_profile(), LocalStore(), samples_dir=tmp_path)
        for step in (1, 2):
            await trainer.begin_dump(step, dump)
            assert asked == ["kept"] * step
        await trainer.finish_dumps()

    asyncio.run(main())


@pytest.mark.parametrize(("coef", "advantage"), [(1.0, None), (0.0, 0.5)])
def test_samples_have_no_advantage_to_which_a_teacher_adds_for_each_token(coef, advantage, tmp_path):
    dumped = []

    class Rank:
        def __getattr__(self, method):
            return SimpleNamespace(remote=partial(self.call, method))

        def call(self, method, *args):
            return dumping(args[3]) if method == "dump" else None

    async def dumping(facts):
        dumped.append(facts)

    profile = small_profile().model_copy(
        update={
            "algorithm": AlgorithmSection(distill_coef=coef),
            "teacher": TeacherSection(path="/models/large"),
        }
    )
    store = LocalStore()
    one = PlannedTrajectory(group=0, trajectory=0, advantage=0.5, is_unfinished=False)
    plan = SimpleNamespace(optimizer_steps=[SimpleNamespace(trajectories=[one])])

    async def main() -> None:
        trainer = RayTrainer(lambda: [Rank()], profile, store, samples_dir=tmp_path)
        batch = SimpleNamespace(step=1, window=0)
        known = trainer._advantages([plan])
        _, dump = trainer.chosen_samples(batch, [made_up_group(0, 1, store)], known, ExitStack())
        await dump()

    asyncio.run(main())
    (facts,) = dumped
    assert facts[0]["advantages"] == [advantage]


@pytest.mark.parametrize("fails", ["", "train", "dump"])
def test_a_failure_loses_nothing_else_and_the_data_is_freed(fails, tmp_path, monkeypatch):
    profile, store, called = small_profile(), LocalStore(), []
    logging = profile.logging.model_copy(update={"samples": "all", "samples_every_steps": 1})
    profile = profile.model_copy(update={"logging": logging})
    groups = (made_up_group(0, 4, store), made_up_group(1, 4, store))

    class Rank:
        def __getattr__(self, method):
            return SimpleNamespace(remote=partial(self.call, method))

        def call(self, method, *args):
            called.append(method)
            return answer(method)

    def answer(method):
        future = asyncio.get_running_loop().create_future()
        report = SimpleNamespace(train_s=0.0, column_s={}, metrics={}, machines=())
        if method == fails:
            future.set_exception(ExecutorFailed(f"{method}: no space left"))
        else:
            future.set_result((report, report) if method == "train" else None)
        return future

    async def main() -> None:
        trainer = RayTrainer(lambda: [Rank()], profile, store, samples_dir=tmp_path)
        shares = groups, [SimpleNamespace(optimizer_steps=[])], [[]]
        monkeypatch.setattr(trainer, "shares", lambda *args: shares)
        monkeypatch.setattr("asyncrl_cli.job.driver_ranks.replace", lambda one, **changes: one)
        step = SimpleNamespace(step=1, step_in_window=0, window=0, groups=groups, columns={})
        try:
            await trainer.train(step)
        finally:
            store.clear([key for group in groups for key in group.payload])
            await trainer.finish_dumps()
            assert store.stats()["keys"] == 0
            assert not store._cleared
        assert trainer.failed_dumps == (fails == "dump")
        assert called[-2:] == ["dump", "record"]

    if fails == "train":
        with pytest.raises(ExecutorFailed, match="train: no space left"):
            asyncio.run(main())
    else:
        asyncio.run(main())


def test_what_is_no_failure_of_a_dump_is_not_swallowed(tmp_path):
    async def broken() -> None:
        raise AssertionError("a bug")

    async def main() -> None:
        trainer = RayTrainer(list, small_profile(), LocalStore(), samples_dir=tmp_path)
        await trainer.begin_dump(1, broken)
        await trainer.finish_dumps()

    with pytest.raises(AssertionError, match="a bug"):
        asyncio.run(main())


TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    def decode(self, *args, **kwargs):
        return "decoded by its own code"
"""


@pytest.mark.parametrize("trust", [False, True])
def test_samples_are_decoded_by_a_tokenizers_own_code_if_it_is_trusted(tmp_path, monkeypatch, trust):
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda prompt="": "n")
    directory = make_model(tmp_path / "model")
    (directory / "own_tokenizer.py").write_text(TOKENIZER)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {
        "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]},
        "tokenizer_class": "OwnTokenizer",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(rank_host, "set_up_process", lambda **_: None)  # this process is the test's
    profile = Profile(model=ModelSection(trust_remote_code=trust))
    place = ProcessPlace(model_dir=str(directory))
    trainer = RankHost(0, "trainer", profile, place, tmp_path, log_path=tmp_path / "log")
    assert (trainer.tokenizer.decode([1, 2]) == "decoded by its own code") is trust

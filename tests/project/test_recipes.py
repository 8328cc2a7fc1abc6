"""Four recipes of docs/architecture.md, by another package: a loss, an environment, an engine, a sink."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from asyncrl_cli.base.named_code import find_plugin
from asyncrl_cli.contracts.prompt_group import AttemptKey, PartKey, PartRequest
from asyncrl_cli.envs import check_environment, find_environment
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.episode import Limits, Means
from asyncrl_cli.envs.group_runner import GroupRunner
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.measure.values import Ratio
from asyncrl_cli.train.losses import check_loss
from tests.train.train_samples import make_step, save_tiny_model
from tests.trainers import planned, trainer_parts

LOSS = """
    import torch
    from asyncrl_cli.train.losses import mean_of

    def sequence_ratio(batch, algorithm):
        '''One ratio per row, as in GSPO: the geometric mean over its tokens weighs every one of them.'''
        lengths_B = torch.bincount(batch.rows_N, minlength=batch.num_rows).clamp(min=1)
        logs_N = batch.logp_theta_N - batch.logp_mu_N
        sums_B = torch.zeros(batch.num_rows, dtype=logs_N.dtype).index_add(0, batch.rows_N, logs_N)
        ratio_B = (sums_B / lengths_B).exp()
        loss_N = -ratio_B[batch.rows_N] * batch.advantages_N
        return loss_N, {"sequences/ratio": mean_of(ratio_B[lengths_B > 0])}
"""
ENVIRONMENT = """
    from asyncrl_cli.contracts.environment import End, Environment, Turn

    class Echo(Environment):
        '''Repeats what the model says and asks once more; the task's reward is of the second response.'''

        def __init__(self, rewards):
            self.rewards, self.turns = rewards, 0

        async def start(self, item):
            self.item = item
            return Turn(messages=({"role": "user", "content": item["prompt"]},))

        async def step(self, answer):
            self.turns += 1
            if self.turns == 2:
                return End(reward=await self.rewards.score(self.item, answer.text))
            return Turn(messages=({"role": "user", "content": answer.text + "?"},), is_last=True)
"""
ENGINE = """
    from asyncrl_cli.engines.port import Completion

    class Counting:
        '''Its responses count up from the prompt's last token.'''

        version, slots, sampled_tokens = 0, 8, 0

        def tokens_of(self, request_id):
            return 0

        async def abort(self, request_id):
            pass

        async def generate(self, request_id, prompt_tokens, sampling, seed, *, first_version=None):
            tokens = [(prompt_tokens[-1] + 1 + i) % 60 for i in range(4)]
            return Completion(tokens=tokens, logprobs=[-1.0] * 4, versions=[0] * 4, finish_reason="stop")
"""
SINK = """
    from asyncrl_cli.base.errors import PreflightError
    from asyncrl_cli.observe.sinks import Sink

    class Steps(Sink):
        '''A file with the number of the last step.'''

        @classmethod
        def check(cls, profile):
            if profile.run.train_steps > 99:
                raise PreflightError("it counts to 99", hint="a shorter run")

        def __init__(self, profile, run_dir):
            self.path = run_dir / "steps"

        def line(self, line):
            self.path.write_text(str(line["step"]))
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package `recipes`: a module for each, and the entry points that lead to their contents."""
    (tmp_path / "recipes").mkdir()
    sources = {"__init__": "", "loss": LOSS, "environment": ENVIRONMENT, "engine": ENGINE, "sink": SINK}
    for name, source in sources.items():
        (tmp_path / "recipes" / f"{name}.py").write_text(dedent(source))
    information = tmp_path / "recipes-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: recipes\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[asyncrl.losses]\nsequence-ratio = recipes.loss:sequence_ratio\n"
        "[asyncrl.environments]\necho = recipes.environment:Echo\n"
        "[asyncrl.engines]\ncounting = recipes.engine:Counting\n"
        "[asyncrl.sinks]\nsteps = recipes.sink:Steps\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "recipes"]:
        del sys.modules[name]


def test_a_loss_of_another_package_trains_a_step_and_its_figures_are_reduced(tmp_path):
    check_loss("sequence-ratio")
    metas, payloads = make_step(1, num_groups=2)
    (plan,) = planned(metas)
    parts = trainer_parts(
        save_tiny_model(tmp_path / "model"), loss_mode="sequence-ratio", max_tokens_per_microbatch=400
    )
    trainer = parts.made(f"file://{tmp_path}/meet")
    try:
        before = {name: local.clone() for name, local in trainer.model.locals().items()}
        report = trainer.train(step_in_window=0, plan=plan, payloads=dict(enumerate(payloads)))
        after = trainer.model.locals()
        assert any(not before[name].equal(local) for name, local in after.items())
    finally:
        trainer.close()
    ratio = report.metrics["sequences/ratio"]
    assert isinstance(ratio, Ratio)
    assert ratio.whole == 16  # the rows of both groups
    assert 0.5 < ratio.value < 2.0
    assert "correction/clipped_ratio" not in report.metrics


class Letters:
    """A tokenizer whose tokens are letters."""

    chat_template = eos_token_id = None

    def __call__(self, texts: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in texts]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, tokens))


class Lengths:
    async def score(self, item: Any, response_text: str) -> float:
        return float(len(response_text))


def test_an_environment_and_an_engine_of_another_package_make_a_group():
    from asyncrl_cli.engines.port import Sampling

    check_environment("echo")
    engine = find_plugin("rollout.engine", "counting", {}, "asyncrl.engines")()
    sampling = Sampling(temperature=1.0, max_response_tokens=32)
    make = partial(find_environment("echo"), Lengths())
    runner = GroupRunner(
        Means(engine, Chat(Letters()), make, Limits(8, 40, max_turns=2), Slots(8, hold=True)), sampling
    )
    key = PartKey(AttemptKey("a", 0, 0), 0)
    request = PartRequest(key=key, item={"uid": "a", "prompt": "!"}, indices=(0, 1), seed=0)
    result, payload = asyncio.run(runner.run(request, lambda finished: None))
    (segment,) = payload.trajectories[0].segments()
    first, second = [34, 35, 36, 37], [4, 5, 6, 7]
    assert segment["tokens"].tolist() == [33, *first, *first, 63, *second]
    assert segment["mask"].tolist() == [False, *[True] * 4, *[False] * 5, *[True] * 4]
    assert [(meta.reward, meta.response_tokens, meta.prompt_tokens) for meta in result.trajectories] == [
        (4.0, 8, 6)
    ] * 2


def test_a_sink_of_another_package_gets_the_lines_of_a_run_that_names_it(tmp_path):
    from asyncrl_cli.base.errors import ConfigError, PreflightError
    from asyncrl_cli.observe.sinks import check_sinks, make_sinks
    from asyncrl_cli.profile.loaded import load

    profile = load("base", ["logging.sinks=['steps']", "run.train_steps=9"], environ={}).profile
    check_sinks(profile)
    (sink,) = make_sinks(profile, tmp_path)
    sink.line({"step": 7})
    assert (tmp_path / "steps").read_text() == "7"
    with pytest.raises(PreflightError, match="it counts to 99"):
        check_sinks(load("base", ["logging.sinks=['steps']", "run.train_steps=100"], environ={}).profile)
    with pytest.raises(ConfigError, match=r'logging\.sinks = "step" is not known') as unknown:
        check_sinks(load("base", ["logging.sinks=['step']"], environ={}).profile)
    assert "known: mlflow, prometheus, steps, tensorboard, wandb" in unknown.value.hint

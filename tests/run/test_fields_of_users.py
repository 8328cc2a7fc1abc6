"""Fields of a user's own, one of each writer but the engine, in a real run that is killed and resumed.

`entropy` is the trainer's: its declaration in the module beside the profile, and one line in a loss. `kinds`,
an integer for every token, is the environment's: its declaration, and one line in an environment. So each
touches two files of the user's and none of asyncrl's. `digits` is the reward's, `doubled` a scorer's; both
are written by the module that declares them. (`kinds_seen` and `doubled_seen` are for the test: what the loss
was given.)
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl_cli.checkpoint.reader import load_checkpoint
from asyncrl_cli.cli.app import run as asyncrl
from tests.run.commands import (
    SMALL,
    Finished,
    descendants,
    finish,
    kill,
    start,
    suspend,
    wait_for_checkpoint,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

FIELDS = """
    from asyncrl_cli.data.sample_fields import Field

    FIELDS = [
        Field(name="entropy", per="sampled", by="trainer", in_samples=True, shown="colour", doc="in nats"),
        Field(name="kinds", per="token", by="environment", dtype="int16", fill=-1, in_samples=True,
              in_losses=True),
        Field(name="kinds_seen", per="sampled", by="trainer", dtype="int16", in_samples=True),
        Field(name="digits", per="trajectory", by="reward", in_samples=True, shown="number"),
        Field(name="doubled", per="sampled", by="scorer", dtype="int32", in_samples=True, in_losses=True),
        Field(name="doubled_seen", per="sampled", by="trainer", dtype="int32", in_samples=True),
    ]


    def score(item, response):
        reward = float(response.strip() == str(item["answer"]))
        return {"reward": reward, "digits": sum(map(str.isdigit, response))}


    class Doubled:
        def __init__(self, profile, place):
            self.threads = place.threads

        def score(self, groups, items):
            return [
                [
                    [2 * token + len(item["uid"]) for token in one.per_token["tokens"][one.per_token["mask"]]]
                    for one in group.trajectories
                ]
                for group, item in zip(groups, items)
            ]
"""
PACKAGE = """
    from dataclasses import replace

    from asyncrl_cli.contracts.environment import OneTurn
    from asyncrl_cli.train.losses.vanilla import vanilla


    def gauged(batch, algorithm):
        batch.write("entropy", batch.entropy_N)
        batch.write("kinds_seen", batch.columns["kinds"])
        batch.write("doubled_seen", batch.columns["doubled"])
        return vanilla(batch, algorithm)


    class Kinds(OneTurn):
        async def step(self, answer):
            end = await super().step(answer)
            kinds = [(7 * token + 3 * place) % 101 for place, token in enumerate(answer.tokens)]
            return replace(end, fields={"kinds": kinds})
"""
PROFILE = """
    extends = "partial-rollout"
    [task]
    fields = "my_fields:FIELDS"
    scorers = {doubled = "my_fields:Doubled"}
    reward = "my_fields:score"
    rehearsal_items = 0
    environment = "kinds"
    [algorithm]
    loss_mode = "gauged"
    [logging]
    samples_every_steps = 1
    samples_per_step = 0
"""
STEPS = 12


def kinds_of(tokens: list[int]) -> list[int]:
    return [(7 * token + 3 * place) % 101 for place, token in enumerate(tokens)]


@dataclass(frozen=True)
class Resumed:
    """The run, and of the checkpoint from which it was resumed the loop's groups, the arrays and the step."""

    run: Path
    groups: dict[str, Any]
    arrays: dict[str, np.ndarray]
    step: int

    def dumped(self, step: int) -> list[dict[str, Any]]:
        path = self.run / f"samples/step-{step:06d}.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    root = tmp_path_factory.mktemp("fields")
    site, profiles, place, elsewhere = (root / name for name in ("site", "profiles", "place", "elsewhere"))
    information = site / "gauge-1.0.dist-info"
    for directory in (information, profiles, place, elsewhere):
        directory.mkdir(parents=True)
    (site / "gauge.py").write_text(dedent(PACKAGE))
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gauge\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[asyncrl.losses]\ngauged = gauge:gauged\n[asyncrl.environments]\nkinds = gauge:Kinds\n"
    )
    (profiles / "my_fields.py").write_text(dedent(FIELDS))
    (profiles / "mine.toml").write_text(dedent(PROFILE))
    variables = {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}

    words = ("--profile", str(profiles / "mine.toml"), "--name", "gauged", "--ui", "plain")
    sets = (*SMALL, f"run.train_steps={STEPS}", "checkpoint.keep=9")
    process = start(place, "train", *words, sets=sets, **variables)
    run = place / "runs" / "gauged"
    wait_for_checkpoint(process, run)
    newest = run / "checkpoints" / "latest"
    family = descendants(process.pid)
    while True:  # until the newest checkpoint has whole groups that are not trained, and begun responses
        suspend(process.pid)
        checkpoint = load_checkpoint(newest.resolve())
        groups = checkpoint.loop_state["groups"]
        is_fit = bool(groups["finished"]) and any(entry.get("kept") for entry in groups["running"])
        kill(process, signal.SIGKILL if is_fit else signal.SIGCONT)
        if is_fit:
            break
        seen = checkpoint.directory
        wait_until(process, lambda seen=seen: newest.resolve() != seen, "the next checkpoint")
    process.communicate()
    assert not wait_until_gone(family)
    arrays = load_file(checkpoint.directory / "payloads.safetensors")
    code, _, err = finish(start(elsewhere, "resume", str(run), "--ui", "plain", **variables))
    assert code == 0, err
    return Resumed(run, groups, arrays, checkpoint.step)


def test_an_environments_field_arrives_in_the_loss_after_a_kill_element_for_element(resumed):
    places = (resumed.run / "logs").glob("attempt-*")
    assert len(list(places)) == 2
    trained = set()
    for step in range(1, STEPS + 1):
        for line in resumed.dumped(step):
            mask = line["mask"]
            sampled = [token for token, is_sampled in zip(line["tokens"], mask, strict=True) if is_sampled]
            expected = iter(kinds_of(sampled))
            where = [next(expected) if is_sampled else None for is_sampled in mask]
            assert line["fields"]["kinds_seen"]["values"] == where
            assert line["fields"]["kinds"]["values"] == [-1 if kind is None else kind for kind in where]
            if step > resumed.step:
                trained.add(line["group"])
    finished = [entry["result"]["key"] for entry in resumed.groups["finished"]]
    begun = [entry["key"] for entry in resumed.groups["running"] if entry.get("kept")]
    assert {"{}@{}.{}".format(*key) for key in finished} <= trained
    assert {"{}@{}.{}".format(*key) for key in begun} & trained
    assert (resumed.arrays["kinds"] >= 0).any(), "whole groups have it"
    assert (resumed.arrays["kinds"][resumed.arrays["mask"]] == -1).any(), "begun responses have it not yet"


def test_a_rewards_field_and_a_scorers_are_in_the_samples_and_the_scorers_arrives_in_the_loss(resumed):
    for step in range(1, STEPS + 1):
        for line in resumed.dumped(step):
            assert line["fields"]["digits"]["values"] == sum(map(str.isdigit, line["sampled_text"]))
            pairs = zip(line["tokens"], line["mask"], strict=True)
            expected = [2 * token + len(line["uid"]) if is_sampled else None for token, is_sampled in pairs]
            assert line["fields"]["doubled"]["values"] == expected
            assert line["fields"]["doubled_seen"]["values"] == expected


def test_what_the_loss_writes_is_the_entropy_of_the_weights_at_the_steps_start(resumed, capsys):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resumed.run / "model"))
    step = 2
    saved = load_file(resumed.run / f"checkpoints/step-{step:06d}" / "rank-00000.safetensors")
    named = ((kind.partition("/"), tensor) for kind, tensor in saved.items())
    weights = {name: torch.from_numpy(tensor) for (kind, _, name), tensor in named if kind == "weight"}
    model.load_state_dict(weights)
    kept = []
    for line in resumed.dumped(step + 1):
        with torch.no_grad():
            logits_TV = model(torch.tensor([line["tokens"]])).logits[0].float()
        entropies_T = torch.distributions.Categorical(logits=logits_TV).entropy()
        values = line["fields"]["entropy"]["values"]
        assert [value is not None for value in values] == [bool(one) for one in line["mask"]]
        for place, value in enumerate(values):
            if value is not None:
                kept.append(value)
                assert value == pytest.approx(entropies_T[place - 1].item(), abs=1e-4)
    (mean,) = [one["fields/entropy"] for one in Finished.of(resumed.run).steps if one["step"] == step + 1]
    assert mean == pytest.approx(sum(kept) / len(kept), rel=1e-4)

    assert asyncrl(["samples", str(resumed.run), "--field", "entropy"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("entropy (in nats): (0) ")
    assert "(4)" in shown.partition("\n")[2]
    assert asyncrl(["report", str(resumed.run)]) == 0
    page = (resumed.run / "report.html").read_text()
    assert '"title":"Field entropy"' in page
    assert "fields/entropy" in page

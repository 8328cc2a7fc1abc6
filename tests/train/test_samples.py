"""The dump of a step: one line per trajectory, exact figures, whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from asyncrl_cli.data.ragged import Ragged
from asyncrl_cli.data.sample_fields import BUILT_IN, FIELDS, Field, Schema
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of
from asyncrl_cli.train.sample_dump import SampledGroup, choose_samples, dump_samples, is_dump_step, pieces


def segment(tokens, logprobs, versions, mask):
    return dict(
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
        mask=np.array(mask, np.bool_),
    )


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def payloads():
    first = segment([7, 8, 1, 2], [0, 0, -0.1, -0.2], [-1, -1, 3, 4], [0, 0, 1, 1])
    second = segment([7, 9], [0, -0.3], [-1, 4], [0, 1])
    one = trajectory_of((first,), BUILT_IN, reward=1.0, finish_reason="stop")
    two = trajectory_of((first, second), BUILT_IN, reward=0.0, finish_reason="length")
    return [GroupPayload(uid="p7", epoch=1, attempt=2, trajectories=(one, two))]


@pytest.fixture
def samples(payloads):
    """With what the trainer gives to the 2 and 3 sampled tokens."""
    logprobs = [np.array([-0.5, -0.25], np.float32), np.array([-0.125, -1, -2], np.float32)]
    return [SampledGroup(payload=payloads[0], advantages=[0.5, None], logprobs=logprobs)]


def test_every_trajectory_is_a_line_with_all_its_arrays(tmp_path, samples):
    path = dump_samples(
        tmp_path / "samples", 40, samples, window=4, decode=lambda ids: "".join(f"<{i}>" for i in ids)
    )
    assert path == tmp_path / "samples" / "step-000040.jsonl"
    first, second = read_lines(path)
    assert (first["step"], first["window"], first["group"], first["trajectory"]) == (40, 4, "p7@1.2", 0)
    assert (first["uid"], first["epoch"], first["attempt"], first["reward"]) == ("p7", 1, 2, 1.0)
    assert (first["tokens"], first["versions"], first["mask"]) == ([7, 8, 1, 2], [-1, -1, 3, 4], [0, 0, 1, 1])
    assert (first["advantage"], second["advantage"]) == (0.5, None)
    assert first["trainer_logprobs"] == [0, 0, -0.5, -0.25]
    assert second["trainer_logprobs"] == [0, 0, -0.125, -1, 0, -2]
    assert second["pieces"] == ["<7>", "<8>", "<1>", "<2>", "<7>", "<9>"]
    assert (first["text"], first["sampled_text"]) == ("<7><8><1><2>", "<1><2>")
    assert second["segment_lengths"] == [4, 2]
    assert [(span["segment"], span["by"], span["text"]) for span in second["spans"]] == [
        (0, "environment", "<7><8>"),
        (0, "model", "<1><2>"),
        (1, "environment", "<7>"),
        (1, "model", "<9>"),
    ]
    assert {len(second[name]) for name in ("tokens", "logprobs", "versions", "mask")} == {6}


def test_the_parts_of_a_reward_are_in_its_line(tmp_path, payloads):
    group = SampledGroup(
        payload=payloads[0], advantages=[0.5, None], parts=[{"right": 1.0, "short": 0.25}, {}]
    )
    first, second = read_lines(dump_samples(tmp_path, 1, [group], window=0, decode=str))
    assert first["reward_parts"] == {"right": 1.0, "short": 0.25}
    assert "reward_parts" not in second


def test_logprobs_come_back_bit_for_bit(tmp_path, payloads, samples):
    line = read_lines(dump_samples(tmp_path, 1, samples, window=0, decode=str))[0]
    expected = next(payloads[0].trajectories[0].segments())["logprobs"]
    assert np.array(line["logprobs"], np.float32).tobytes() == expected.tobytes()


def test_any_number_of_values_per_token_is_a_list(tmp_path, payloads):
    chosen = Field(name="chosen", per="sampled", by="engine", dtype="int32", is_ragged=True, in_samples=True)
    (first, _) = payloads[0].trajectories
    one = replace(first, per_sampled={"chosen": Ragged.of([[5], [6, 7]])})
    group = SampledGroup(payload=replace(payloads[0], trajectories=(one,)), advantages=[None])
    path = dump_samples(
        tmp_path, 3, [group], window=4, decode=lambda ids: "", schema=Schema([*FIELDS, chosen])
    )
    (line,) = read_lines(path)
    assert line["fields"]["chosen"]["values"] == [None, None, [5], [6, 7]]


def test_text_that_is_no_unicode_is_written_and_comes_back(tmp_path, samples):
    lines = read_lines(dump_samples(tmp_path, 1, samples, window=0, decode=lambda ids: "é\ud800\0"))
    assert lines[0]["text"] == "é\ud800\0"


def test_a_dump_that_fails_leaves_no_half_file(tmp_path, samples):
    def broken(ids):
        raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        dump_samples(tmp_path, 1, samples, window=0, decode=broken)
    assert not list(tmp_path.iterdir())


def test_every_so_many_steps_the_first_and_the_last_are_dumped_and_zero_is_never():
    assert [step for step in range(1, 13) if is_dump_step(step, 5, 12)] == [1, 5, 10, 12]
    assert not any(is_dump_step(step, 0, 19) for step in range(20))


def test_a_dump_takes_an_eighth_and_the_oldest_make_room(tmp_path, samples):
    for step in range(1, 30):
        path = dump_samples(
            tmp_path, step, samples * 9, window=0, decode=lambda ids: f"é{ids}", max_bytes=16_000
        )
        assert 0 < path.stat().st_size <= 2_000
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 16_000
    kept = sorted(tmp_path.iterdir())
    assert kept[-1] == path
    assert 8 <= len(kept) < 29


def test_groups_are_chosen_at_random_and_whole_but_for_the_last():
    chosen = choose_samples([8] * 20, 20, "samples 0/40")
    assert sorted(chosen.values()) == [4, 8, 8]
    assert list(chosen) == sorted(chosen)
    assert chosen == choose_samples([8] * 20, 20, "samples 0/40")
    assert {tuple(choose_samples([8] * 20, 20, f"samples 0/{step}")) for step in range(9)} != {(0, 1, 2)}
    assert choose_samples([3, 0, 2], 0, "") == {0: 3, 1: 0, 2: 2}


def test_every_token_has_its_text_also_bytes_of_one_character_and_words_behind_a_space():
    smile = "☺".encode()
    words = {1: b" hello", 2: b" world", **{10 + index: bytes([byte]) for index, byte in enumerate(smile)}}

    def decode(ids):
        """Like SentencePiece: a text's first space is dropped."""
        return b"".join(words[i] for i in ids).decode(errors="replace").removeprefix(" ")

    assert pieces([1, 10, 11, 12, 2], decode) == ["hello", "", "", "☺", " world"]
    assert pieces([], decode) == []

"""The sampler alone, on logits of a known distribution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.engines.transformers.token_sampler import SampledTrack, TokenSampler

PROBABILITIES = [0.05, 0.4, 0.0, 0.3, 0.15, 0.1]


def sampled(num_rows: int, num_steps: int, **changes: float) -> list[list[int]]:
    """Responses of rows with seeds 0, 1, ...; every step has the same logits."""
    loop = asyncio.new_event_loop()
    sampler = TokenSampler(version=3, call_soon=lambda *call: None)
    how = Sampling(**{"temperature": 1.0, "max_response_tokens": num_steps, **changes})  # type: ignore[arg-type]
    requests = []
    for row in range(num_rows):
        track = SampledTrack(
            request_id=str(row), prompt_tokens=[0], sampling=how, seed=row, done=loop.create_future()
        )
        sampler.tracks[str(row)] = track
        requests.append(SimpleNamespace(state=SimpleNamespace(request_id=str(row))))
    logits = torch.tensor(PROBABILITIES).log().repeat(num_rows, 1)
    for _ in range(num_steps):
        sampler.prepare_tensor_args(requests)  # type: ignore[arg-type]
        chosen = sampler(logits.clone(), torch.zeros(num_rows, dtype=torch.int32))  # type: ignore[arg-type]
        assert chosen.argmax(dim=-1).tolist() == [track.tokens[-1] for track in sampler.tracks.values()]
    loop.close()
    assert sampler.sampled_tokens == num_rows * num_steps
    assert sampler.decode_steps == num_steps
    assert all(track.finished == "length" for track in sampler.tracks.values())
    return [track.tokens for track in sampler.tracks.values()]


class Watched(list[Any]):
    """Calls `look` before and after each append."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def append(self, entry: Any) -> None:
        self._look()
        super().append(entry)
        self._look()


@pytest.mark.parametrize("how", [{"max_response_tokens": 3}, {"stop": ("2",)}, {}])
def test_a_look_between_any_two_steps_of_the_thread_never_sees_an_ended_response_as_running(
    how: dict[str, Any],
) -> None:
    """It ends with its third token: at its limit, at a stop string, or at the end token."""
    loop, seen, ends = asyncio.new_event_loop(), list[Any](), list[Any]()
    sampling = Sampling(**{"temperature": 1.0, "max_response_tokens": 9, **how})
    track = SampledTrack(
        request_id="a", prompt_tokens=[0], sampling=sampling, seed=0, done=loop.create_future()
    )
    sampler = TokenSampler(version=3, call_soon=lambda *call: ends.append(track.completion("stop").tokens))
    sampler.tail_text, sampler.eos_tokens = (
        lambda tokens: "".join(map(str, tokens)),
        frozenset() if how else frozenset({2}),
    )

    def look() -> None:
        completion = track.so_far()
        seen.append((completion.tokens, completion.finish_reason == "abort"))

    track.tokens, track.logprobs, track.versions = Watched(look), Watched(look), Watched(look)
    for token in range(3):
        sampler.record(track, token, 0.0)
    loop.close()
    assert [0, 1] in [tokens for tokens, _ in seen]
    assert all(is_running == (tokens != [0, 1, 2]) for tokens, is_running in seen)
    assert seen[-1] == ([0, 1, 2], False)
    assert ends in ([], [[0, 1, 2]])


def frequencies(responses: list[list[int]]) -> list[float]:
    flat = torch.tensor(responses).flatten()
    return (torch.bincount(flat, minlength=len(PROBABILITIES)) / len(flat)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, [p * p / 0.285 for p in PROBABILITIES]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85, 0]),
        ({"top_k": 4, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0, 0]),
    ],
)
def test_tokens_come_with_the_frequencies_asked_for(changes: dict[str, float], expected: list[float]) -> None:
    responses = sampled(100, 400, **changes)
    assert frequencies(responses) == pytest.approx(expected, abs=0.01)  # 4 standard errors of 40,000 draws
    for token, probability in enumerate(expected):
        if probability == 0:
            assert all(token not in response for response in responses)


def test_neighbouring_seeds_and_positions_share_nothing() -> None:
    responses = torch.tensor(sampled(50, 400))
    same_as_next_row = (responses[1:] == responses[:-1]).float().mean().item()
    same_as_next_position = (responses[:, 1:] == responses[:, :-1]).float().mean().item()
    by_chance = sum(p * p for p in PROBABILITIES)
    assert same_as_next_row == pytest.approx(by_chance, abs=0.02)
    assert same_as_next_position == pytest.approx(by_chance, abs=0.02)

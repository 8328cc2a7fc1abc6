"""One trajectory while it is made: what the model has seen, what it has sampled, and the arrays that this becomes.

Messages are rendered with the tokenizer's chat template if it has one; the driver checks prompt lengths with the same functions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncrl_cli.engines.port import Completion
from asyncrl_cli.envs.port import End, EpisodeFailed, Message, Turn, prompt_of
from asyncrl_cli.loop.attempts import Failure, TrajectoryMeta
from asyncrl_cli.samples import NOT_SAMPLED, Segment, Trajectory

NOTHING = Completion(tokens=[], logprobs=[], versions=[], finish_reason="abort")


@dataclass(slots=True, eq=False)
class Episode:
    """One trajectory of a group or eval. `completion` holds all tokens after the first prompt: sampled ones, and between them the
    environment's messages (version -1).

    `end` and `failure` are None until the episode has ended; then one of them is set. `needs_slot`: the trajectory may generate
    again. `tool_s`: waiting for the environment between turns.
    """

    id: str
    item: Mapping[str, Any]
    seed: int
    prompt_tokens: list[int] = field(default_factory=list)
    completion: Completion = NOTHING
    end: End | None = None
    failure: Failure | None = None
    needs_slot: bool = True
    num_turns: int = 0
    tool_s: float = 0.0
    _messages: list[Message] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        return sum(version != NOT_SAMPLED for version in self.completion.versions)

    def open(self, tokenizer: PreTrainedTokenizerBase, turn: Turn, max_prompt_tokens: int) -> None:
        """Render the first turn as the prompt. Raises EpisodeFailed if it is empty or too long."""
        self._messages = list(turn.messages)
        self.prompt_tokens = render(tokenizer, [turn.messages])[0]
        uid, count = self.item["uid"], len(self.prompt_tokens)
        if count > max_prompt_tokens:
            raise EpisodeFailed("prompt", f"prompt {uid} has {count} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}")
        if not count:
            raise EpisodeFailed("prompt", f"prompt {uid} has no tokens")

    def turn_seed(self) -> int:
        """Seed of the next response's random numbers."""
        return derived_seed(self.seed, str(self.num_turns)) if self.num_turns else self.seed

    def add(self, more: Completion) -> None:
        """Append a response, or the environment's messages, to all tokens so far."""
        done = self.completion
        self.completion = Completion(
            tokens=done.tokens + more.tokens,
            logprobs=done.logprobs + more.logprobs,
            versions=done.versions + more.versions,
            finish_reason=more.finish_reason,
        )

    def go_on(self, tokenizer: PreTrainedTokenizerBase, response: str, turn: Turn, max_response_tokens: int) -> None:
        """Append a further turn's messages after the response. Raises EpisodeFailed if no tokens are left for an answer."""
        added = render_more(tokenizer, self._messages, response, self.completion.tokens[-1], turn.messages)
        self._messages += [{"role": "assistant", "content": response}, *turn.messages]
        num = len(added)
        self.add(replace(self.completion, tokens=added, logprobs=[0.0] * num, versions=[NOT_SAMPLED] * num))
        if len(self.completion.tokens) >= max_response_tokens:
            limit = f"rollout.max_response_tokens = {max_response_tokens}"
            raise EpisodeFailed("context", f"{self.id}: its turns take all {limit} tokens")

    def trajectory(self) -> Trajectory:
        assert self.end is not None
        segment = segment_of(self.prompt_tokens, self.completion)
        return Trajectory(segments=(segment,), reward=self.end.reward, finish_reason=self.completion.finish_reason)

    def meta(self) -> TrajectoryMeta:
        assert self.end is not None
        num_tokens = len(self.prompt_tokens) + len(self.completion.tokens)
        versions = Counter(version for version in self.completion.versions if version != NOT_SAMPLED)
        return TrajectoryMeta(
            prompt_tokens=num_tokens - self.num_sampled,
            response_tokens=self.num_sampled,
            reward=self.end.reward,
            finish_reason=self.completion.finish_reason,
            version_tokens=tuple(sorted(versions.items())),
            num_turns=self.num_turns,
            tool_s=self.tool_s,
            facts=tuple(sorted(self.end.facts.items())),
        )


def derived_seed(seed: int, name: str) -> int:
    """Seed of an eval's item, independent of how items are divided among workers and calls; or of a trajectory's later turn."""
    return random.Random(f"{seed}/{name}").getrandbits(63)


def segment_of(prompt_tokens: list[int], completion: Completion) -> Segment:
    """The segment of one token sequence. Tokens that were not sampled have mask 0, version -1 and logprob 0."""
    num_prompt = len(prompt_tokens)
    versions_T = np.array([NOT_SAMPLED] * num_prompt + completion.versions, dtype=np.int32)
    return Segment(
        tokens_T=np.array(prompt_tokens + completion.tokens, dtype=np.int32),
        logprobs_T=np.array([0.0] * num_prompt + completion.logprobs, dtype=np.float32),
        versions_T=versions_T,
        mask_T=versions_T != NOT_SAMPLED,
    )


def load_tokenizer(model_dir: str | Path, *, trust_remote_code: bool) -> Any:
    return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)


def render_prompts(tokenizer: PreTrainedTokenizerBase, items: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return render(tokenizer, [prompt_of(item) for item in items])


def render(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Tokens of each conversation, up to where the model's answer begins."""
    if not conversations:
        return []
    if tokenizer.chat_template is not None:
        chats = [list(messages) for messages in conversations]
        rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    else:
        rendered = tokenizer(["".join(message["content"] for message in messages) for messages in conversations])["input_ids"]
    return [list(tokens) for tokens in rendered]


def render_more(
    tokenizer: PreTrainedTokenizerBase, seen: Sequence[Message], response: str, last_token: int, new: Sequence[Message]
) -> list[int]:
    """Tokens that `new` messages add after the response to `seen`. Sampled tokens, of which `last_token` is the last, are never
    tokenized again.

    Raises EpisodeFailed if the chat template would change what the model has seen already.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer("".join(message["content"] for message in new), add_special_tokens=False)["input_ids"])
    begun = _text(tokenizer, seen) + response
    whole = _text(tokenizer, [*seen, {"role": "assistant", "content": response}, *new])
    if not whole.startswith(begun):
        raise EpisodeFailed("context", "the model's chat template rewrites earlier turns, so that no further turn can be added")
    added = list(tokenizer(whole.removeprefix(begun), add_special_tokens=False)["input_ids"])
    return added[1:] if added[:1] == [tokenizer.eos_token_id] == [last_token] else added


def _text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))

"""The reward model: a sequence classifier. Each of its processes holds the whole model and works on its own.

    tokens ─policy's tokenizer─> response ─its own tokenizer─> ids ─classifier─> first logit = score

The prompt's messages and the response, as the assistant's message, are rendered with the model's own chat
template. A model without a template gets prompt and response joined end to end, with its tokenizer's special
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from asyncrl_cli.base.errors import AsyncrlError, PreflightError, first_names
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.data.sample_fields import MASK, TOKENS
from asyncrl_cli.data.trajectories import GroupPayload, Trajectory
from asyncrl_cli.models.model_files import positions_of
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train.batch import SPLIT_COST_TOKENS, cut_padded
from asyncrl_cli.train.ranks import device_of
from asyncrl_cli.weights.buckets import torch_dtype

ANOTHER = "use a reward model with a longer context, or lower rollout.max_response_tokens"


class RewardModel:
    """`decode`: the policy tokenizer's, without special tokens. Raises PreflightError if the directory holds
    no classifier."""

    def __init__(self, profile: Profile, place: ProcessPlace, decode: Callable[[list[int]], str]) -> None:
        directory, trusts = place.reward_model_dir, profile.model.trust_remote_code
        self._device = device_of(place)
        self._decode = decode
        self._max_tokens = profile.trainer.max_tokens_per_microbatch
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusts)
        how = {"dtype": torch_dtype(profile.model.dtype), "trust_remote_code": trusts}
        model, info = AutoModelForSequenceClassification.from_pretrained(
            directory, output_loading_info=True, **how
        )
        if missing := sorted(info["missing_keys"]):  # transformers would initialize them at random
            why = f"{directory} is not a sequence classifier: it lacks {first_names(missing)}"
            hint = "use a model with a trained classification head"
            raise PreflightError(f"reward_model.path: {why}", hint=hint)
        self._model: PreTrainedModel = model.eval().to(self._device)
        # Classifiers find a row's last token by the configuration's padding token.
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            why = f"{tokenizer.name_or_path} has neither a padding token nor an end of sequence"
            hint = "set tokenizer.pad_token, and save the tokenizer beside the model"
            raise PreflightError(f"reward_model.path: the tokenizer in {why}", hint=hint)
        self._tokenizer: PreTrainedTokenizerBase = tokenizer
        self._model.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    def score(self, groups: Sequence[GroupPayload], items: Sequence[Item]) -> list[tuple[float, ...]]:
        """The scores of each group's trajectories. `items`: the groups' prompts. AsyncrlError if one is too
        long or not finite."""
        pairs = zip(groups, items, strict=True)
        texts = [self._text(item, one) for group, item in pairs for one in group.trajectories]
        has_template = self._tokenizer.chat_template is not None
        ids = self._tokenizer(texts, add_special_tokens=not has_template)["input_ids"] if texts else []
        scores, lengths = [math.nan] * len(ids), [len(tokens) for tokens in ids]
        longest, limit = max(lengths, default=0), positions_of(self._model.config.get_text_config())
        if limit is not None and longest > limit:
            why = f"a prompt and its response have {longest} tokens, but the reward model takes {limit}"
            raise AsyncrlError(why, hint=ANOTHER)
        for batch in cut_padded(lengths, self._max_tokens, SPLIT_COST_TOKENS[self._device.type]):
            for index, found in zip(batch, self._logits([ids[index] for index in batch]), strict=True):
                scores[index] = found
        if wrong := [found for found in scores if not math.isfinite(found)]:
            why = f"the reward model's score for a response is {wrong[0]}"
            raise AsyncrlError(why, hint="check its weights and model.dtype")
        left = iter(scores)
        return [tuple(next(left) for _ in group.trajectories) for group in groups]

    def _text(self, item: Item, trajectory: Trajectory) -> str:
        sampled = trajectory.per_token[TOKENS][trajectory.per_token[MASK]].tolist()
        messages = [*messages_of(item["prompt"]), {"role": "assistant", "content": self._decode(sampled)}]
        if self._tokenizer.chat_template is None:
            return "".join(message["content"] for message in messages)
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))

    def _logits(self, ids: Sequence[Sequence[int]]) -> list[float]:
        padded = self._tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            logits = self._model(**padded.to(self._device)).logits
            found: list[float] = logits[:, 0].float().tolist()
        return found

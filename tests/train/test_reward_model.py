"""The reward model, against plain transformers on each text by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from asyncrl_cli.base.errors import AsyncrlError, PreflightError
from asyncrl_cli.builtin.tiny import tiny_tokenizer
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of
from asyncrl_cli.profile.schema import ProcessPlace, Profile, RunSection
from asyncrl_cli.train.reward_model import RewardModel
from tests.train.train_samples import save_tiny_model

TEMPLATE = "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}{% endfor %}."
RESPONSES = (("4", "four", "5"), ("blue",))
PROMPTS = ("2+2?", [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what colour?"}])


@pytest.fixture(scope="module")
def classifier_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classifier")
    tokenizer = tiny_tokenizer(sorted(set("abcdefghijklmnopqrstuvwxyz0123456789+?.[] ")))
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_labels=1, max_position_embeddings=64)
    config = LlamaConfig(**sizes, pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def payload(responses):
    segments = []
    for text in responses:
        tokens = [1, 2, *map(ord, text)]
        mask = [False, False, *[True] * len(text)]
        zeros = np.zeros(len(tokens))
        arrays = dict(logprobs=zeros.astype(np.float32), versions=zeros.astype(np.int32), mask=np.array(mask))
        segments.append(dict(tokens=np.array(tokens, np.int32), **arrays))
    trajectories = tuple(
        trajectory_of((one,), BUILT_IN, reward=0.0, finish_reason="stop") for one in segments
    )
    return GroupPayload(uid="p", epoch=0, attempt=0, trajectories=trajectories)


def reward_model(directory, max_tokens=8192):
    base = Profile(run=RunSection(train_steps=1))
    trainer = base.trainer.model_copy(update={"max_tokens_per_microbatch": max_tokens})
    profile = base.model_copy(update={"trainer": trainer})
    place = ProcessPlace(model_dir="", reward_model_dir=str(directory))
    return RewardModel(profile, place, lambda ids: "".join(map(chr, ids)))


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("max_tokens", [8192, 40, 1])
def test_its_scores_are_plain_transformers_first_logits(classifier_dir, tmp_path, template, max_tokens):
    tokenizer = AutoTokenizer.from_pretrained(classifier_dir)
    model = AutoModelForSequenceClassification.from_pretrained(classifier_dir)
    if template is None:
        texts = [["2+2?4", "2+2?four", "2+2?5"], ["be briefwhat colour?blue"]]
    else:
        texts = [["[u]2+2?[a]4.", "[u]2+2?[a]four.", "[u]2+2?[a]5."], ["[s]be brief[u]what colour?[a]blue."]]
    model.save_pretrained(tmp_path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)

    def score(text: str) -> float:
        tokens = tokenizer(text, add_special_tokens=template is None, return_tensors="pt")
        with torch.no_grad():
            return float(model(**tokens).logits[0, 0])

    plain = [[score(text) for text in of] for of in texts]
    items = [{"prompt": prompt} for prompt in PROMPTS]
    found = reward_model(tmp_path, max_tokens).score([payload(of) for of in RESPONSES], items)
    assert [len(scores) for scores in found] == [3, 1]
    for scores, expected in zip(found, plain, strict=True):
        assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for scores in found for score in scores}) == 4


def test_a_language_model_is_refused_whose_head_would_be_drawn_at_random(tmp_path, classifier_dir):
    save_tiny_model(tmp_path)
    AutoTokenizer.from_pretrained(classifier_dir).save_pretrained(tmp_path)
    with pytest.raises(PreflightError, match=r"is not a sequence classifier: it lacks score\.weight"):
        reward_model(tmp_path)


def test_rows_are_padded_with_the_tokenizers_token_whatever_the_configuration_says(classifier_dir, tmp_path):
    """The configuration's would be the first token of a text: the score of a padded row would be another
    position's."""
    AutoTokenizer.from_pretrained(classifier_dir).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(classifier_dir)
    model.config.pad_token_id = 9
    model.save_pretrained(tmp_path)
    items = [{"prompt": prompt} for prompt in PROMPTS]
    found, expected = (
        reward_model(directory).score([payload(of) for of in RESPONSES], items)
        for directory in (tmp_path, classifier_dir)
    )
    assert found == expected


def test_a_tokenizer_that_cannot_pad_is_refused(classifier_dir, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(classifier_dir).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(classifier_dir)
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PreflightError, match="neither a padding token nor an end of sequence"):
        reward_model(tmp_path)


def test_positions_that_rope_scaling_stretches_are_no_limit(classifier_dir, tmp_path):
    AutoTokenizer.from_pretrained(classifier_dir).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(classifier_dir)
    model.config.rope_parameters = dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64
    )
    model.save_pretrained(tmp_path)
    assert reward_model(tmp_path).score([payload(("4" * 80,))], [{"prompt": "2+2?"}])


def test_what_is_too_long_for_it_and_what_is_no_number_are_named(classifier_dir, tmp_path):
    long = payload(("4" * 80,))
    with pytest.raises(
        AsyncrlError, match=r"a prompt and its response have 8[0-9] tokens, but the reward model takes 64"
    ):
        reward_model(classifier_dir).score([long], [{"prompt": "2+2?"}])
    model = AutoModelForSequenceClassification.from_pretrained(classifier_dir)
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(classifier_dir).save_pretrained(tmp_path)
    with pytest.raises(AsyncrlError, match="the reward model's score for a response is nan"):
        reward_model(tmp_path).score([payload(("4",))], [{"prompt": "2+2?"}])

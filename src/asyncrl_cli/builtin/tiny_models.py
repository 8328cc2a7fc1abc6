"""Builds builtin:tiny and builtin:untaught, once each: a model's directory in the cache is named by a hash of
all inputs, and is either complete or absent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.base.storage import appearing_directory, naming, storage_error
from asyncrl_cli.builtin.tiny import (
    CHARACTERS,
    CHAT_TEMPLATE,
    IGNORED,
    Course,
    Recipe,
    chat_tokenizer,
    make_lessons,
    taught_conversation,
    tiny_model,
    tiny_sizes,
    tiny_tokenizer,
)
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

RECIPE_VERSION = 3
"""Increase this when a code change makes the same inputs give another model."""
DESCRIPTION = "asyncrl-recipe.json"
PHASE = "warm start"
SHOWN_LOSSES = 20
"""The displayed loss is a mean over this many steps, because batches of short texts have lower losses than
those of long ones."""

Progress = Callable[[str, int, int, str], None]
"""Called with (name of the phase, steps done, total steps, text to show beside them)."""


def built_tiny(profile: Profile, task: Course, cache: Path, *, progress: Progress = lambda *_: None) -> Path:
    """The directory of this profile's warm-started model, built unless it is in the cache. `progress` is
    called in either case."""
    recipe, seed = Recipe(steps=profile.model.warm_start_steps), profile.run.seed
    num_lessons = recipe.steps * recipe.batch_size
    lessons = make_lessons(task, num=num_lessons, label_noise=profile.model.warm_start_label_noise, seed=seed)
    if task.words is None:  # every character of any prompt or lesson
        texts = [item["prompt"] for split in (task.train, task.eval) for item in split]
        texts += [text for lesson in lessons for text in lesson if isinstance(text, str)]
        characters = "".join(sorted(set().union(*texts)))
    else:
        characters = CHARACTERS
    # Everything that the weights depend on. Another torch may draw other random numbers.
    description: dict[str, object] = {
        "recipe_version": RECIPE_VERSION,
        "config": tiny_sizes(len(characters)),
        "characters": characters,
        "recipe": asdict(recipe),
        "lessons": _digest(lessons),
        "seed": seed,
        **_library_versions(),
    }
    if task.words is not None:
        description |= {"words": task.words, "chat_template": CHAT_TEMPLATE}
    directory = cache / f"tiny-{_digest(description)[:16]}"
    if (directory / DESCRIPTION).is_file():
        progress(f"cached model {directory}", 0, 0, "")
        return directory
    # imported late: a cached model needs no torch, which takes seconds
    from asyncrl_cli.builtin.warm_start import warm_start

    if task.words is None:
        tokenizer = tiny_tokenizer(characters)
        taught = []
        for lesson in lessons:  # the response and its end are learned; the prompt is only input
            assert isinstance(lesson.response, str)
            prompt = tokenizer.encode(lesson.prompt)
            response = [*tokenizer.encode(lesson.response), tokenizer.eos_token_id]
            taught.append((prompt + response, [IGNORED] * len(prompt) + response))
    else:
        tokenizer = chat_tokenizer(task.words)
        responses = (lesson.response for lesson in lessons)
        taught = [taught_conversation(tokenizer, talk) for talk in responses if not isinstance(talk, str)]
    model = tiny_model(len(tokenizer), seed=seed)

    def report(losses: Sequence[float]) -> None:
        progress(PHASE, len(losses), recipe.steps, f"loss {fmean(losses[-SHOWN_LOSSES:]):.2f}")

    losses = warm_start(model, taught, recipe, seed=seed, progress=report)
    _save(directory, model, tokenizer, {**description, "losses": [round(loss, 4) for loss in losses]})
    return directory


def built_untaught(profile: Profile, cache: Path) -> Path:
    """The directory of a model of builtin:tiny's size with random weights and the tokenizer for
    conversations, made unless cached. Its responses are noise, but it works with any task, so a task can be
    tried without a network."""
    seed, tokenizer = profile.run.seed, chat_tokenizer(())
    sizes = tiny_sizes(len(tokenizer))
    description = {"config": sizes, "seed": seed, "chat_template": CHAT_TEMPLATE, **_library_versions()}
    directory = cache / f"untaught-{_digest(description)[:16]}"
    if not (directory / DESCRIPTION).is_file():
        _save(directory, tiny_model(len(tokenizer), seed=seed), tokenizer, description)
    return directory


def _library_versions() -> dict[str, str]:
    return {"torch": version("torch"), "transformers": version("transformers")}


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _save(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    description: Mapping[str, object],
) -> None:
    """Write the model to the cache. Raises PreflightError, which names the key `model.cache_dir`, if that
    fails."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    text = json.dumps(description, indent=1, default=str)
    try:
        with appearing_directory(directory) as working, naming(working):
            model.save_pretrained(working)
            tokenizer.save_pretrained(working)
            (working / DESCRIPTION).write_text(text, encoding="utf-8")
    except OSError as error:
        if (directory / DESCRIPTION).is_file():  # another run built the same model meanwhile: keep its copy
            return
        why = f"model.cache_dir: {storage_error(error).message}"
        raise PreflightError(why, hint="set model.cache_dir to a directory that you can write to") from error

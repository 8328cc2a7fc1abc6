"""Whether a run can use its task's prompts: their lengths in tokens, how often they come, and their
teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.base.errors import ConfigError, PreflightError, first_line
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.models.model_directory import further_here, naming_key, teacher_key, tokenizer_here
from asyncrl_cli.models.model_files import check_model, check_vocabulary
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import shortened
from asyncrl_cli.tasks.rows import find
from asyncrl_cli.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_curriculum(profile: Profile, num_prompts: int) -> None:
    """ConfigError if a curriculum would decide nothing, because no prompt comes a second time."""
    share, schedule = profile.task.curriculum, Schedule.of(profile)
    if share is None or schedule.groups > num_prompts:
        return
    why = f"the run trains {schedule.groups:,} groups of {num_prompts:,} prompts, so none comes a second time"
    fewer = f"--set task.train_prompts={max(schedule.groups // 4, schedule.step_groups)}"
    hint = f"make the run longer, take fewer prompts ({fewer}), or leave task.curriculum out"
    raise ConfigError(f"task.curriculum = {share:g}: {why}", hint=hint)


def check_further_here(profile: Profile, *, is_elsewhere: bool = False) -> None:
    """What can be said of reference, teachers, critic and reward model before anything is made or fetched.
    Raises as `further_here` does, and PreflightError for a teacher's other tokenizer."""
    here, policy = further_here(profile, is_elsewhere=is_elsewhere), tokenizer_here(profile)
    if policy is not None:
        keys = {name: teacher_key(name) for name in profile.teacher.paths}
        check_tokenizers(profile, policy, {name: str(here[key]) for name, key in keys.items() if key in here})


def check_tokenizers(profile: Profile, model_dir: Path, teachers: Mapping[str, str]) -> None:
    """Raises PreflightError if a teacher cannot be opened, or if one of the policy's tokens has another id
    there or none."""
    tokens_of = opened_tokenizer(profile, model_dir).get_vocab() if teachers else {}
    for name, directory in teachers.items():
        with naming_key(teacher_key(name)):
            theirs = checked_tokenizer(profile, Path(directory)).get_vocab()
        if others := [token for token, number in tokens_of.items() if theirs.get(token) != number]:
            why = f"{teacher_key(name)}: {directory} has another tokenizer than the policy"
            shown = f"{len(others)} of the policy's {len(tokens_of)} tokens have another id there or none"
            hint = "logprobs are compared token by token: use a teacher of the policy's family"
            raise PreflightError(f"{why}: {shown}, such as {others[0]!r}", hint=hint)


def check_teachers(profile: Profile, task: Task, model_dir: Path, teachers: Mapping[str, str]) -> None:
    """As `check_tokenizers`. Raises ConfigError if a prompt names none of several teachers."""
    check_tokenizers(profile, model_dir, teachers)
    if (column := profile.teacher.column) is None:
        return
    for item in task.train:
        if str(named := find(item["metadata"], column)) not in teachers:
            why = f'teacher.column = "{column}": prompt {item["uid"]} has {shortened(named)} there'
            raise ConfigError(f"{why}, which names no teacher", hint=f"teachers are {', '.join(teachers)}")


def checked_tokenizer(profile: Profile, model_dir: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises PreflightError if it or the model cannot be used."""
    vocab_size = check_model(profile, model_dir)
    tokenizer = opened_tokenizer(profile, model_dir)
    check_vocabulary(model_dir, len(tokenizer), vocab_size)
    return tokenizer


def opened_tokenizer(profile: Profile, model_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory. Raises PreflightError if it cannot be used."""
    from asyncrl_cli.envs.chat import load_tokenizer

    try:
        tokenizer = load_tokenizer(model_dir, trust_remote_code=profile.model.trust_remote_code)
        tokens(tokenizer, [{"prompt": "x"}])
    except Exception as error:  # broken tokenizer files make transformers and tokenizers raise any exception
        why = f"the tokenizer in {model_dir} cannot be loaded: {first_line(error)}"
        raise PreflightError(f"model.path: {why}", hint="save it again with save_pretrained") from error
    return tokenizer


def tokens(tokenizer: PreTrainedTokenizerBase, items: Sequence[Item]) -> list[int]:
    """Number of tokens of each prompt."""
    from asyncrl_cli.envs.chat import render_prompts

    return list(map(len, render_prompts(tokenizer, items)))


def check_prompt_lengths(
    profile: Profile, task: Task, count_tokens: Callable[[Sequence[Item]], list[int]]
) -> Task:
    """ConfigError if a prompt has more tokens than `rollout.max_prompt_tokens`, or the task without such
    prompts, as `task.overlong_prompts` says.

    A token hardly ever has less than a byte, so only prompts with more bytes than the limit are tokenized. A
    prompt that slips through (some tokenizers expand text) fails its group later, with an error that names
    it.
    """
    limit = profile.rollout.max_prompt_tokens
    (around,) = count_tokens([{"prompt": "x"}])

    def num_bytes(item: Item) -> int:
        return sum(len(message["content"].encode()) + around for message in messages_of(item["prompt"]))

    items = chain(task.train, task.eval, *task.eval_sets.values())
    suspects = [item for item in items if num_bytes(item) > limit]
    lengths = zip(suspects, count_tokens(suspects), strict=True)
    overlong = {item["uid"]: length for item, length in lengths if length > limit}
    if profile.task.overlong_prompts == "drop":
        return _without(overlong, task, limit)
    if overlong:
        longest = max(overlong.values())
        uid = next(uid for uid, length in overlong.items() if length == longest)
        others = f" ({len(overlong)} prompts are too long)" if len(overlong) > 1 else ""
        what = f"prompt {uid} has {longest} tokens, rollout.max_prompt_tokens is {limit}{others}"
        longer = f"--set rollout.max_prompt_tokens={longest}"
        raise ConfigError(what, hint=f'{longer}, or task.overlong_prompts="drop" to leave such prompts out')
    return task


def _without(overlong: Mapping[str, int], task: Task, limit: int) -> Task:
    """The task without the prompts of more than `limit` tokens, whose lengths are given by uid. ConfigError
    if none is left for training, or in an eval set."""
    splits = {"training": task.train, "evals": task.eval}
    splits |= {f"eval.sets.{name}": items for name, items in task.eval_sets.items()}
    left = {
        name: tuple(item for item in items if item["uid"] not in overlong) for name, items in splits.items()
    }
    emptied = [name for name, items in splits.items() if items and not left[name]]
    if emptied:
        what = f"all {len(splits[emptied[0]])} prompts for {emptied[0]} are longer than {limit} tokens"
        longer = f"--set rollout.max_prompt_tokens={max(overlong.values())}"
        raise ConfigError(f'task.overlong_prompts = "drop": {what}', hint=f"{longer}, or other prompts")
    if not overlong:
        return replace(task, num_overlong=0)
    uid, length = next(iter(overlong.items()))
    some = f"prompts of more than rollout.max_prompt_tokens = {limit} tokens"
    note = f"{task.name}: left out {len(overlong):,} {some}, first prompt {uid} with {length}"
    train, held_out, *sets = left.values()
    return replace(
        task,
        train=train,
        eval=held_out,
        eval_sets=dict(zip(task.eval_sets, sets, strict=True)),
        notes=(*task.notes, note),
        num_overlong=len(overlong),
    )

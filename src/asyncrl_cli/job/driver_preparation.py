"""What a run needs before Ray starts, prepared and checked: engine, task, model, prompt lengths. Runs in the
driver; the slow parts in a thread that a Ctrl-C does not wait for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl_cli.base.errors import ConfigError, Interrupted, PreflightError, first_line
from asyncrl_cli.builtin.tiny import UNTAUGHT, demonstrations_of
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.engines.port import check_engine
from asyncrl_cli.envs import check_environment
from asyncrl_cli.job.ray.session import check_reachable
from asyncrl_cli.models.model_directory import (
    fetched_tokenizer,
    further_models,
    is_builtin,
    model_here,
    resolve_model,
    teacher_key,
)
from asyncrl_cli.models.model_files import check_model, check_vocabulary
from asyncrl_cli.observe.sinks import check_sinks
from asyncrl_cli.plan.cluster import local_cluster
from asyncrl_cli.plan.compiler import compile_job, device_of
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import shortened
from asyncrl_cli.sandbox.rehearsal import rehearse
from asyncrl_cli.tasks.code_choice import check_fields, environment_of, has_tool_class
from asyncrl_cli.tasks.rows import find
from asyncrl_cli.tasks.task import Task, load_task
from asyncrl_cli.train.losses import check_loss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
ShowProgress = Callable[..., None]
"""`say(text, done=0, total=0, figures="")`: shows what is being done, its progress (if that can be counted),
and its `figures` (such as a loss)."""


async def prepare(
    profile: Profile,
    say: ShowProgress,
    address: str | None = None,
    resumed: Path | None = None,
    show: Callable[[str], None] = lambda line: None,
    log_path: Path = Path(os.devnull),
) -> tuple[Task, Path, dict[str, Any]]:
    """Returns the task, the model's directory and those of `further_models`. Raises ConfigError or
    PreflightError if the engine, task, models or prompts cannot be used.

    With `address` the engine runs on the nodes of that cluster, which this process cannot examine. `resumed`:
    the directory of the run being resumed, whose reward is not rehearsed again. `show` gets the lines of the
    rehearsal's table, `log_path` what the reward prints there.
    """

    def load(check_cancelled: Callable[[], None]) -> Task:
        say("looking for the engine")
        check_surroundings(profile, address)
        check_cancelled()
        say("loading the task")
        task = load_task(profile, resumed)
        check_cancelled()
        if task.ceiling is not None:
            say(expectation(task))
        if needs_turns(profile):  # before gigabytes of weights are downloaded
            check_chat(profile, model_here(profile) or fetched_tokenizer(profile))
        return task

    def prepare_model(check_cancelled: Callable[[], None]) -> tuple[Task, Path, dict[str, Any]]:
        def progress(text: str, *how_far: object) -> None:
            check_cancelled()
            say(text, *how_far)

        progress("preparing the model")
        model_dir = resolve_model(profile, task, progress=progress)
        further = further_models(profile, model_dir)
        check_cancelled()
        fitting = check_prompts(profile, task, model_dir)
        check_teachers(profile, fitting, model_dir, further.get("teacher_dirs", {}))
        return fitting, model_dir, further

    task = await interruptible(load)
    if resumed is None:
        say("rehearsing the reward")
        rehearsal = await rehearse(profile, task, log_path)
        for line in rehearsal.lines():
            show(line)
        rehearsal.check()
        task = replace(task, notes=(*task.notes, *rehearsal.warnings()))
    return await interruptible(prepare_model)


def expectation(task: Task) -> str:
    """The reward to compare with, for a task whose best play is known."""
    return f"the best play of {task.name} earns {task.ceiling:.3f} per episode on average"


def check_surroundings(profile: Profile, address: str | None) -> None:
    """Check that loss, fields, scorers and environment exist and fit, the job fits here (or the cluster
    answers), the engine is installed, the sinks could start, and a model in a directory is complete. Call it
    before transformers is imported: broken engine packages may break that import, too."""
    check_loss(profile.algorithm.loss_mode)
    check_fields(profile)
    if not profile.task.agent:
        check_environment(environment_of(profile.task))
    if environment_of(profile.task) != "one-turn" or profile.task.has_agent:
        # an episode may have several responses
        if (reward_model := profile.reward_model.path) is not None:
            raise ConfigError(
                f"reward_model.path = {reward_model}: it judges one response per prompt, but an episode of "
                "this task may have several",
                hint="leave it out: the environment's or the agent's own reward may ask a model",
            )
        if (buffer := profile.algorithm.overlong_buffer_tokens) is not None:
            raise ConfigError(
                f"algorithm.overlong_buffer_tokens = {buffer} punishes a response that comes near "
                "rollout.max_response_tokens, but an episode of this task may have several responses",
                hint="leave it out; algorithm.mask_truncated leaves out episodes that a limit has cut",
            )
    if address is None:
        compile_job(profile, local_cluster())
    else:
        check_reachable(address)
    check_engine(profile, device_of(profile, local_cluster()), is_elsewhere=address is not None)
    check_sinks(profile)
    model_here(profile)


def check_prompts(profile: Profile, task: Task, model_dir: Path | None) -> Task:
    """Check the prompts' number and lengths in tokens and, if `model_dir` is known, the model, its tokenizer
    and the adapters. Without a directory only the built-in model's tokens can be counted: its characters.
    Opening it would take seconds of imports. Returns the task without the prompts that are left out."""
    if is_builtin(profile):
        if profile.model.path != UNTAUGHT:
            demonstrations_of(task)
        # each character is a token, and in a chat so are the role of each message and that of the answer
        role_tokens = int(task.words is not None or profile.model.path == UNTAUGHT)

        def count_tokens(items: Sequence[Item]) -> list[int]:
            texts = ([message["content"] for message in messages_of(item["prompt"])] for item in items)
            return [role_tokens + sum(role_tokens + len(text) for text in prompt) for prompt in texts]

        task = check_prompt_lengths(profile, task, count_tokens)
    elif model_dir is not None:
        tokenizer = checked_tokenizer(profile, model_dir)
        task = check_prompt_lengths(profile, task, partial(tokens, tokenizer))
        check_chat(profile, model_dir)
    if model_dir is not None:
        check_adapters(profile, model_dir)
    groups, prompts = Schedule.of(profile).groups, len(task.train)
    if (share := profile.task.curriculum) is not None and groups <= prompts:
        why = f"the run trains {groups:,} groups of {prompts:,} prompts, so none comes a second time"
        hint = (
            f"--set task.train_prompts={max(groups // 4, 1)} or a longer run, or leave it out; if the task "
        )
        hint += "makes its prompts, task.params may have a difficulty"
        raise ConfigError(f"task.curriculum = {share:g}: {why}", hint=hint)
    return task


def check_teachers(profile: Profile, task: Task, model_dir: Path, teachers: Mapping[str, str]) -> None:
    """Raises PreflightError if a teacher cannot be opened, or if one of the policy's tokens has another id
    there or none. ConfigError if a prompt names none of several teachers."""
    tokens_of = opened_tokenizer(profile, model_dir).get_vocab() if teachers else {}
    for name, directory in teachers.items():
        try:
            theirs = checked_tokenizer(profile, Path(directory)).get_vocab()
            if others := [token for token, number in tokens_of.items() if theirs.get(token) != number]:
                why = f"model.path: {directory} has another tokenizer than the policy"
                shown = f"{len(others)} of the policy's {len(tokens_of)} tokens have another id there or none"
                hint = "logprobs are compared token by token: use a teacher of the policy's family"
                raise PreflightError(f"{why}: {shown}, such as {others[0]!r}", hint=hint)
        except PreflightError as error:
            why = error.message.replace("model.path", teacher_key(name), 1)
            raise PreflightError(why, hint=error.hint) from error
    if (column := profile.teacher.column) is None:
        return
    for item in task.train:
        if str(named := find(item["metadata"], column)) not in teachers:
            why = f'teacher.column = "{column}": prompt {item["uid"]} has {shortened(named)} there'
            raise ConfigError(f"{why}, which names no teacher", hint=f"teachers are {', '.join(teachers)}")


def needs_turns(profile: Profile) -> bool:
    """Whether the task needs more of a model's chat template than one prompt."""
    return not is_builtin(profile) and environment_of(profile.task) != "one-turn"


def check_chat(profile: Profile, directory: Path) -> None:
    """PreflightError if the task needs several turns, or tools, which the chat template of the tokenizer
    cannot write."""
    if needs_turns(profile):
        from asyncrl_cli.envs.chat import Chat, stop_tokens_of

        chat = Chat(opened_tokenizer(profile, directory), stop_tokens_of(directory))
        chat.check_turns()
        if has_tool_class(profile):
            chat.check_tools()


def check_adapters(profile: Profile, model_dir: Path) -> None:
    """ConfigError if `lora.target_modules` names a layer that the model lacks, or workers cannot merge
    adapters into its files."""
    if profile.lora.target_modules:
        from asyncrl_cli.models.saved_form import skeleton
        from asyncrl_cli.train.policy_model import adapted_layers

        adapted_layers(skeleton(model_dir, trust_remote_code=profile.model.trust_remote_code), profile.lora)
    if profile.lora.sync == "adapter":
        from asyncrl_cli.weights.receivers import BaseFiles

        BaseFiles(profile, model_dir)


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


async def interruptible(work: Callable[[Callable[[], None]], T]) -> T:
    """Run `work(check_cancelled)` in a thread. If the caller is cancelled, the next
    `check_cancelled()` raises Interrupted, which ends the work."""
    answer: Future[T] = Future()

    def check_cancelled() -> None:
        if answer.cancelled():
            raise Interrupted("interrupted before the run began")

    def run() -> None:
        with suppress(InvalidStateError):  # cancelled: nobody waits for the answer
            try:
                answer.set_result(work(check_cancelled))
            except BaseException as error:
                answer.set_exception(error)

    # Not a thread of the loop's executor: asyncio waits for those at the end, and an import or a download may
    # take long.
    threading.Thread(target=run, name="preparing", daemon=True).start()
    return await asyncio.wrap_future(answer)

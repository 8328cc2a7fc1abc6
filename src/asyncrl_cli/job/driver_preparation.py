"""What a run needs before Ray starts, prepared and checked: engine, task, model, prompts
(driver_prompt_checks.py). Runs in the driver; the slow parts in a thread that a Ctrl-C does not wait for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.base.daemon_threads import in_daemon
from asyncrl_cli.base.errors import ConfigError, Interrupted
from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.builtin.tiny import UNTAUGHT, demonstrations_of
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.engines.port import check_engine, kind_of
from asyncrl_cli.envs import check_environment
from asyncrl_cli.job.driver_prompt_checks import (
    check_curriculum,
    check_further_here,
    check_prompt_lengths,
    check_teachers,
    checked_tokenizer,
    opened_tokenizer,
    tokens,
)
from asyncrl_cli.job.ray.session import check_reachable
from asyncrl_cli.models.model_directory import (
    fetched_tokenizer,
    further_models,
    is_builtin,
    model_here,
    resolve_model,
)
from asyncrl_cli.observe.sinks import check_sinks
from asyncrl_cli.plan.cluster import local_cluster
from asyncrl_cli.plan.compiler import compile_job, device_of
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.sandbox.rehearsal import rehearse
from asyncrl_cli.tasks.code_choice import check_fields, environment_of, has_tool_class
from asyncrl_cli.tasks.task import Task, load_task
from asyncrl_cli.train.losses import check_loss
from asyncrl_cli.weights.directory import check_url

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
        scorers, notes = check_surroundings(profile, address, resumed)
        check_cancelled()
        say("loading the task")
        task = load_task(profile, resumed)
        task = replace(task, scorers=scorers, notes=(*task.notes, *notes))
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
        kind_of(profile).check_servers(profile, model_dir)  # their vocabularies, too
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


def check_surroundings(
    profile: Profile, address: str | None, resumed: Path | None = None
) -> tuple[dict[str, UserCode], tuple[str, ...]]:
    """Check that loss, fields, scorers and environment exist and fit, the job fits here (or the cluster
    answers), the engine is installed, the sinks could start, weights.url can be written, and models in
    directories are complete. Call it before transformers is imported: broken engine packages may break that
    import, too. Returns what `check_fields` does."""
    check_loss(profile.algorithm.loss_mode)
    scorers = check_fields(profile, resumed)
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
    check_url(profile.weights)
    model_here(profile)
    check_further_here(profile)
    return scorers


def check_prompts(profile: Profile, task: Task, model_dir: Path | None) -> Task:
    """Check the prompts' number and lengths in tokens and, if `model_dir` is known, the model, its layers
    and its tokenizer. Without a directory only the built-in model's tokens can be counted: its characters.
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
        check_layers(profile, model_dir)
    check_curriculum(profile, len(task.train))
    return task


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


def check_layers(profile: Profile, model_dir: Path) -> None:
    """ConfigError if `lora.target_modules` names a layer that the model lacks, if workers cannot merge
    adapters into its files, or if it has no experts for `trainer.router_replay`."""
    if profile.lora.target_modules or profile.trainer.router_replay:
        from asyncrl_cli.models.experts import Routing
        from asyncrl_cli.models.saved_form import adapted_layers, skeleton

        model = skeleton(model_dir, trust_remote_code=profile.model.trust_remote_code)
        if profile.lora.target_modules:
            adapted_layers(model, profile.lora)
        if profile.trainer.router_replay:
            Routing(model)
    if profile.lora.sync == "adapter":
        from asyncrl_cli.weights.receivers import BaseFiles

        BaseFiles(profile, model_dir)


async def interruptible(work: Callable[[Callable[[], None]], T]) -> T:
    """Run `work(check_cancelled)` in a thread. If the caller is cancelled, the next
    `check_cancelled()` raises Interrupted, which ends the work."""
    answer: Future[T] = Future()

    def check_cancelled() -> None:
        if answer.cancelled():
            raise Interrupted("interrupted before the run began")

    # an import or a download may take long
    return await asyncio.wrap_future(in_daemon(lambda: work(check_cancelled), "preparing", answer))

"""What a run needs before Ray starts: its engine, its task, its model, prompts that fit, and a checkpoint of its own if it resumes
from one. All of it is looked at in threads that a Ctrl-C need not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.checkpoint.sealed import Checkpoint
from asyncrl_cli.engines.port import check_engine
from asyncrl_cli.envs import check_environment
from asyncrl_cli.errors import ConfigError, Interrupted, PreflightError, RefusedError, first_line
from asyncrl_cli.job.driving import PromptFeed
from asyncrl_cli.job.session import check_reachable
from asyncrl_cli.loop.cuts import read_state
from asyncrl_cli.models.inspection import check_model, check_vocabulary
from asyncrl_cli.models.resolve import is_builtin, model_here, resolve_model
from asyncrl_cli.observe import observers
from asyncrl_cli.observe.wandb_sink import check_login
from asyncrl_cli.plan.cluster import local_cluster
from asyncrl_cli.plan.job_plan import compile_job, device_of
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.task import Task, load_task
from asyncrl_cli.train.losses import check_loss

T = TypeVar("T")
Item = Mapping[str, Any]
Say = Callable[..., None]
"""`say(text, done=0, total=0, figures="")`: what is being done; how far, where that can be counted; its `figures` (a loss, say)."""


async def prepare(profile: Profile, say: Say, address: str | None = None, resumed: Path | None = None) -> tuple[Task, Path]:
    """The task and the model's directory. Raises ConfigError or PreflightError for an engine, a task, a model or prompts that will
    not do.

    With `address` the engine runs on the nodes of that cluster, where this process cannot look. `resumed`: the directory of the
    run that goes on.
    """

    def work(look: Callable[[], None]) -> tuple[Task, Path]:
        def progress(text: str, *how_far: Any) -> None:
            look()
            say(text, *how_far)

        progress("looking for the engine")
        check_surroundings(profile, address)
        progress("loading the task")
        task = load_task(profile, resumed)
        progress("preparing the model")
        model_dir = resolve_model(profile, task, progress=progress)
        look()
        check_prompts(profile, task, model_dir)
        return task, model_dir

    return await interruptible(work)


def check_without_making(profile: Profile, address: str | None = None) -> Task:
    """Raises what `prepare` would, as far as that can be told while no model is made or fetched."""
    check_surroundings(profile, address)
    task = load_task(profile)
    check_prompts(profile, task, model_here(profile))
    return task


def check_surroundings(profile: Profile, address: str | None) -> None:
    """Whether loss and environment are known, the job fits here (or the cluster answers), the engine is installed, and
    W&B has a login. Called before anything imports transformers: what is wrong with the engine's packages may break that, too."""
    check_loss(profile.algorithm.loss_mode)
    check_environment(profile.task.environment)
    if address is None:
        compile_job(profile, local_cluster())
    else:
        check_reachable(address)
    check_engine(profile, device_of(profile, local_cluster()), is_elsewhere=address is not None)
    if profile.logging.wandb == "online":
        check_login()


def check_prompts(profile: Profile, task: Task, model_dir: Path | None) -> None:
    """Their lengths, and the model in whose tokens they are counted; without a directory only where it is the built-in one."""
    if is_builtin(profile):
        check_prompt_lengths(profile, task, characters)
    elif model_dir is not None:
        check_opened(profile, task, model_dir)


def check_opened(profile: Profile, task: Task, model_dir: Path) -> None:
    """The model and its tokenizer, and the task's prompts in its tokens."""
    from asyncrl_cli.envs.episode import load_tokenizer, render_prompts

    vocab_size = check_model(profile, model_dir)
    try:
        tokenizer = load_tokenizer(model_dir, trust_remote_code=profile.model.trust_remote_code)
        render_prompts(tokenizer, [{"prompt": "x"}])
    except Exception as error:  # of files that are no tokenizer's, transformers and tokenizers raise anything
        why = f"the tokenizer in {model_dir} cannot be loaded: {first_line(error)}"
        raise PreflightError(f"model.path: {why}", hint="save it anew with save_pretrained") from error
    check_vocabulary(model_dir, len(tokenizer), vocab_size)
    check_prompt_lengths(profile, task, partial(tokens, tokenizer))


def tokens(tokenizer: Any, items: Sequence[Item]) -> list[int]:
    """How many each prompt has."""
    from asyncrl_cli.envs.episode import render_prompts

    return list(map(len, render_prompts(tokenizer, items)))


def characters(items: Sequence[Item]) -> list[int]:
    """The tokens of the built-in model: to count them it need not be opened, which is seconds of imports."""
    return [len(item["prompt"]) for item in items]


def check_prompt_lengths(profile: Profile, task: Task, tokens: Callable[[Sequence[Item]], list[int]]) -> None:
    """ConfigError if a prompt of either split has more tokens than `rollout.max_prompt_tokens`.

    A token is hardly ever less than a byte, so only prompts of more bytes than that are tokenized. What slips through
    (a tokenizer that makes long things of short ones) fails its group later, by name.
    """
    limit = profile.rollout.max_prompt_tokens
    (around,) = tokens([{"prompt": "x"}])
    suspects = [item for item in (*task.train, *task.eval) if len(item["prompt"].encode()) + around > limit]
    lengths = tokens(suspects)
    num_too_long = sum(length > limit for length in lengths)
    if num_too_long:
        longest = max(lengths)
        uid = suspects[lengths.index(longest)]["uid"]
        others = f" ({num_too_long} prompts are too long)" if num_too_long > 1 else ""
        raise ConfigError(
            f"prompt {uid} has {longest} tokens, rollout.max_prompt_tokens is {limit}{others}",
            hint=f"--set rollout.max_prompt_tokens={longest}, or leave such prompts out of {profile.task.source}",
        )


def check_resumable(checkpoint: Checkpoint, profile: Profile) -> None:
    """Raises RefusedError unless the loop's state, its observers' and the finished groups are of one run with this profile."""
    from asyncrl_cli.checkpoint.payloads import read_payloads  # brings numpy, which a dry run does without

    state = read_state(checkpoint.loop_state, LoopSettings.of(profile))
    if state["step"] != checkpoint.step:
        raise _refused(checkpoint, f"its loop is at step {state['step']}")
    if len(state["observers"]) != 1:
        raise _refused(checkpoint, f"it has figures of {len(state['observers'])} observers, not of one")
    observers.read_state(state["observers"][0])
    finished = [entry["result"] for entry in state["groups"]["finished"]]
    payloads = [((p.uid, p.epoch, p.attempt), len(p.trajectories)) for p in read_payloads(checkpoint.directory)]
    if payloads != [(result.key, len(result.trajectories)) for result in finished]:
        raise _refused(checkpoint, "its tokens are not those of its finished groups")


def refuse_other_prompts(checkpoint: Checkpoint, task: Task, seed: int) -> None:
    """A checkpoint names its prompts: RefusedError unless the task still has them, as they were."""
    feed, groups = PromptFeed(task.train, seed=seed), checkpoint.loop_state["groups"]
    feed.restore(groups["feed"])
    for entry in (*groups["running"], *groups["again"], *(finished["try"] for finished in groups["finished"])):
        feed.find(*entry["key"][:2])


def _refused(checkpoint: Checkpoint, why: str) -> RefusedError:
    return RefusedError(f"checkpoint {checkpoint.directory} is refused: {why}", hint="take another checkpoint")


async def interruptible(work: Callable[[Callable[[], None]], T]) -> T:
    """Run `work(look)` in a thread; if we are cancelled, its next call of `look` raises and ends it."""
    answer: Future[T] = Future()

    def look() -> None:
        if answer.cancelled():
            raise Interrupted("interrupted before the run began")

    def run() -> None:
        with suppress(InvalidStateError):  # it was cancelled: nobody waits for the answer
            try:
                answer.set_result(work(look))
            except BaseException as error:
                answer.set_exception(error)

    # A thread of its own: those of the loop's executor are waited for at the end, and an import or a download takes its time.
    threading.Thread(target=run, name="preparing", daemon=True).start()
    return await asyncio.wrap_future(answer)

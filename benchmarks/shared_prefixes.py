"""A train step with and without shared prefixes: seconds and computed positions, side by side in one process.

    python -m benchmarks.shared_prefixes --smollm2 DIR [--only WORD] [--steps 9]

Three tasks, each with `trainer.shared_prefixes` on and off in turn, on the same trajectories:

    default      the base profile's own task, model and sizes; responses are sampled from the model
    arithmetic   SmolLM2-135M-Instruct (the directory), 4 groups of 8, "What is 37 + 25? Give the answer as
                 \\boxed{number}." by its chat template; responses of up to 48 tokens, sampled from the model
    template     the same model on the prompts of `asyncrl init pretrained`, which begin with an answered
                 example, with that profile's lengths and temperature
    agents       prompts of 1,000 tokens, 8 trajectories each with two turns of 24 tokens and a tool's result
                 of 32 between them; random tokens, and a random model of SmolLM2's widths with 4 layers

Prints Markdown: medians of CPU seconds and their ratio, and the positions that the decoder computes in a
forward pass.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.train.train_samples import meta_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult
from asyncrl_cli.data.sample_fields import BUILT_IN, NOT_SAMPLED
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of
from asyncrl_cli.envs.chat import render_prompts
from asyncrl_cli.models.model_directory import resolve_model
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.profile.toml_files import shipped_templates
from asyncrl_cli.tasks.task import load_task
from asyncrl_cli.train.packed_rows import Divide, RankShare
from asyncrl_cli.train.policy_trainer import PolicyTrainer
from asyncrl_cli.train.step_plan import plan_train_step

N, ARITHMETIC_GROUPS, ARITHMETIC_TOKENS = 8, 4, 48
AGENT_GROUPS, AGENT_PROMPT, TURN, RESULT = 2, 1000, 24, 32
Sampled = list[tuple[list[int], list[bool]]]
"""Of a group's trajectories: all tokens, and which of them are sampled."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2-135M-Instruct as a directory")
    parser.add_argument("--only", default="", help="only the task with this in its name")
    parser.add_argument("--steps", type=int, default=9, help="train steps of each way")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print("| train step | groups of 8 | positions, rows | shared | CPU seconds, rows | shared | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, task in TASKS.items():
            if options.only in name:
                model_dir, profile, groups = task(options.smollm2, Path(directory))
                place = ProcessPlace(model_dir=str(model_dir), workers=1, threads=options.threads)
                meeting = f"file://{directory}/{name}"
                found = compared(profile, place, meeting, groups, options.steps)
                positions, seconds = zip(*found, strict=True)
                ratio = seconds[0] / seconds[1]
                print(
                    f"| {name} | {len(groups)} | {positions[0]:,} | {positions[1]:,} | {seconds[0]:.2f} "
                    f"| {seconds[1]:.2f} | {ratio:.2f} |",
                    flush=True,
                )


def default(smollm2: Path, directory: Path) -> tuple[Path, Profile, list[Sampled]]:
    profile = load("base", []).profile
    task = load_task(profile)
    model_dir = Path(resolve_model(profile, task))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    number = profile.trainer.ppo_mini_batch_size
    prompts = [tokenizer.encode(str(task.train[i]["prompt"])) for i in range(number)]
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    return model_dir, profile, sampled(model, tokenizer.eos_token_id, prompts, profile)


def arithmetic(smollm2: Path, directory: Path) -> tuple[Path, Profile, list[Sampled]]:
    limit = f"rollout.max_response_tokens={ARITHMETIC_TOKENS}"
    sizes = [f"trainer.ppo_mini_batch_size={ARITHMETIC_GROUPS}", "trainer.lr=1e-6", limit]
    profile = load("base", [f"model.path={smollm2}", *sizes]).profile
    tokenizer, draw, prompts = AutoTokenizer.from_pretrained(smollm2), random.Random(0), []
    for _ in range(ARITHMETIC_GROUPS):
        question = f"What is {draw.randint(10, 99)} + {draw.randint(10, 99)}?"
        content = f"{question} Give the answer as \\boxed{{number}}."
        messages = [{"role": "user", "content": content}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    return smollm2, profile, sampled(model, tokenizer.eos_token_id, prompts, profile)


def template(smollm2: Path, directory: Path) -> tuple[Path, Profile, list[Sampled]]:
    sizes = [f"trainer.ppo_mini_batch_size={ARITHMETIC_GROUPS}", "trainer.lr=1e-6"]
    source = shipped_templates()["pretrained"] / "profile.toml"
    profile = load(str(source), [f"model.path={smollm2}", *sizes]).profile
    tokenizer, task = AutoTokenizer.from_pretrained(smollm2), load_task(profile)
    prompts = render_prompts(tokenizer, task.train[:ARITHMETIC_GROUPS])
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    return smollm2, profile, sampled(model, tokenizer.eos_token_id, prompts, profile)


def agents(smollm2: Path, directory: Path) -> tuple[Path, Profile, list[Sampled]]:
    config = AutoConfig.from_pretrained(smollm2, num_hidden_layers=4)
    model_dir, draw = directory / "agents-model", random.Random(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model_dir)
    sizes = [f"trainer.ppo_mini_batch_size={AGENT_GROUPS}", "trainer.lr=1e-6"]
    profile = load("base", [f"model.path={model_dir}", *sizes]).profile

    def tokens(number: int) -> list[int]:
        return [draw.randrange(config.vocab_size) for _ in range(number)]

    groups = []
    for _ in range(AGENT_GROUPS):
        prompt, is_sampled = tokens(AGENT_PROMPT), [False] * AGENT_PROMPT
        is_sampled += [True] * TURN + [False] * RESULT + [True] * TURN
        groups.append([(prompt + tokens(2 * TURN + RESULT), is_sampled) for _ in range(N)])
    return model_dir, profile, groups


def sampled(
    model: PreTrainedModel, end: int, prompts: Sequence[list[int]], profile: Profile
) -> list[Sampled]:
    """Groups of the model's own responses."""
    torch.manual_seed(0)
    groups = []
    for prompt in prompts:
        length = profile.rollout.max_response_tokens
        asked = torch.tensor([prompt] * N)
        how: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": profile.rollout.temperature}
        how |= {"eos_token_id": end, "pad_token_id": end}
        rows = model.generate(asked, attention_mask=asked.ne(-1), max_new_tokens=length, **how).tolist()
        group = []
        for row in rows:
            response = row[len(prompt) :]
            kept = response[: response.index(end) + 1] if end in response else response
            group.append((prompt + kept, [False] * len(prompt) + [True] * len(kept)))
        groups.append(group)
    return groups


def compared(
    profile: Profile, place: ProcessPlace, meeting: str, groups: Sequence[Sampled], num_steps: int
) -> list[tuple[int, float]]:
    """Positions of a step's forward pass and median CPU seconds, of rows and of shared prefixes."""
    metas, payloads = zip(*(trainable(index, group) for index, group in enumerate(groups)), strict=True)
    (plan,) = plan_train_step(metas, profile, ranks=1, step=1, window=0)
    trainer = PolicyTrainer(profile, place, rank=0, init_method=meeting, total_optimizer_steps=1000)
    positions, divide = list[int](), trainer.model.divide
    trainer.model._forward = counting(trainer, divide, positions)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    counts: dict[bool, int] = {}
    for step in range(num_steps + 1):  # the first one warms up
        for shares in (False, True):
            trainer.model.shares = shares
            positions.clear()
            began_s = time.process_time()
            trainer.train(0, plan, dict(enumerate(payloads)))
            counts[shares] = sum(positions)
            if step:
                seconds[shares].append(time.process_time() - began_s)
    trainer.close()
    return [(counts[shares], statistics.median(seconds[shares])) for shares in (False, True)]


def counting(trainer: PolicyTrainer, divide: Divide, positions: list[int]) -> Callable[..., Any]:
    def counted(microbatch: Any) -> RankShare:
        share = divide(microbatch)
        positions.append(share.inputs["input_ids"].numel())
        return share

    return replace(trainer.model._forward, divide=counted)


def trainable(index: int, group: Sampled) -> tuple[GroupResult, GroupPayload]:
    trajectories = tuple(
        trajectory_of(
            (segment_of(tokens, [-1.0 * one for one in mask], [0 if one else NOT_SAMPLED for one in mask]),),
            BUILT_IN,
            reward=float(number % 2),
            finish_reason="stop",
        )
        for number, (tokens, mask) in enumerate(group)
    )
    key = AttemptKey(f"prompt-{index}", 0, 0)
    own = tuple(map(meta_of, trajectories))
    meta = GroupResult(key=key, trajectories=own, failures=(), failed_tokens=0, payload=None)
    return meta, GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=trajectories)


TASKS = {"default": default, "arithmetic": arithmetic, "template": template, "agents": agents}


if __name__ == "__main__":
    main()

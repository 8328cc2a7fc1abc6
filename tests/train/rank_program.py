"""One trainer rank, in a process of its own: `main(job)`. Trains, then saves.

Keys: model_dir, settings (overrides), rank, world_size, init_method, first_step, last_step, num_groups, load
(a checkpoint), save (a checkpoint), weights (a directory, where each rank puts what it sends). A setting
"spoiled_step" is the step whose first group has a NaN; with "same_prompt", the trajectories of a group have
the same one.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from pathlib import Path

import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.policy_trainer import PolicyTrainer
from tests.train.train_samples import make_step
from tests.trainers import planned, trainer_parts

MADE_UP = ("spoiled_step", "same_prompt")


def train_steps(trainer: PolicyTrainer, job: dict) -> None:
    for step in range(job["first_step"], job["last_step"] + 1):
        metas, payloads = make_step(step, job["num_groups"])
        if step == job["settings"].get("spoiled_step"):
            next(payloads[0].trajectories[0].segments())["logprobs"][-1] = float("nan")
        for payload in payloads if job["settings"].get("same_prompt") else ():
            prompts = [one.per_token["tokens"][~one.per_token["mask"]] for one in payload.trajectories]
            for one in payload.trajectories:
                one.per_token["tokens"][: len(prompts[0])] = prompts[0]
        keys = {*AlgorithmSection.model_fields, "sequence_parallel_size", "ppo_epochs"}
        settings = {key: value for key, value in job["settings"].items() if key in keys}
        plans = planned(metas, ranks=job["world_size"], num_minibatches=2, **settings)
        plan = plans[job["rank"]]
        needed = {group: payloads[group] for group in plan.groups}
        step_in_window = (step - 1) % trainer.profile.async_training.trigger_parameter_sync_step
        trainer.train(step_in_window=step_in_window, plan=plan, payloads=needed)


def write_in_thread(trainer: PolicyTrainer, job: dict) -> None:
    trainer.gather(1)
    trainer.snapshot(job["last_step"])
    writer = threading.Thread(target=trainer.write, args=(job["last_step"], Path(job["save"]), True))
    writer.start()
    # Beside the write: one more step, which the snapshot must not see.
    train_steps(trainer, job | {"first_step": 99, "last_step": 99})
    writer.join()


def main_each(jobs: list[dict]) -> None:
    for job in jobs:
        main(job)


def main(job: dict) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    keys = {key: value for key, value in job["settings"].items() if key not in MADE_UP}
    parts = trainer_parts(job["model_dir"], workers=job["world_size"], total_optimizer_steps=100, **keys)
    trainer = parts.made(job["init_method"], job["rank"])
    if job["load"]:
        trainer.load(Path(job["load"]))
    train_steps(trainer, job)
    if job["weights"]:
        trainer.gather(0)
        sent = pickle.dumps(trainer.published(0))
        (Path(job["weights"]) / f"rank-{job['rank']}").write_bytes(sent)
    if job["save"]:
        write_in_thread(trainer, job)
    trainer.close()

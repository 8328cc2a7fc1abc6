"""Trains again from the recorded trajectories of a run, in this process, without Ray and engines: `asyncrl
replay`.

    run: checkpoint, step files -> PolicyTrainer -> a run directory of its own -> [a resume, for one eval]

With the run's own profile every version has the run's fingerprint. With another loss, correction or learning
rate it shows what that would have made of the same data. What it cannot show: another policy would have
sampled other data.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.base.paths import as_typed
from asyncrl_cli.base.storage import replace_text
from asyncrl_cli.checkpoint.lookup import REPLAY, find_run_or_checkpoint, has_checkpoints, is_locked
from asyncrl_cli.checkpoint.reader import load_checkpoint, sealed_checkpoints
from asyncrl_cli.checkpoint.run_directory import RunDirectory, fresh_name
from asyncrl_cli.checkpoint.writer import CheckpointStore
from asyncrl_cli.contracts.events import Event, StepRecord
from asyncrl_cli.contracts.ports import Json, LoopSnapshot
from asyncrl_cli.data.step_files import read_step, step_file
from asyncrl_cli.job.host_process import set_up_process
from asyncrl_cli.loop.ledger import Stage
from asyncrl_cli.models.model_directory import further_models, resolve_model
from asyncrl_cli.models.model_files import keep_model_files
from asyncrl_cli.observe.live_status import facts_of
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, StatusFile, TimelineFile
from asyncrl_cli.plan.cluster import local_cluster
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import TRAINER, place_of
from asyncrl_cli.profile.arithmetic import CRITIC, PROX, Schedule, is_apart
from asyncrl_cli.profile.resolved import differing, laid_over, read_document, to_document, to_toml
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.code_choice import keep_record
from asyncrl_cli.tasks.task import load_task

TRAINS = ("algorithm.", "trainer.", "critic.", "async_training.require_batches")
"""Keys that say how given data is trained."""
LENGTHS = ("run.train_steps", "run.total_rollout_steps")
"""With `trainer.lr_schedule` the learning rates follow from them, too."""
MAY_CHANGE = (*TRAINS, "eval.", "logging.", "checkpoint.")
NOT = ("algorithm.filter_groups", "algorithm.max_num_gen_batches")
OTHER_DATA = "a replay trains on the recorded trajectories: start a run for that, or leave it out"
Say = Callable[[str], object]


def without_servers(profile: Profile) -> Profile:
    """The profile with an engine of the run's own, if its was `remote`: the eval at the end of a replay must
    not depend on servers of others."""
    if profile.rollout.engine != "remote":
        return profile
    rollout, weights = type(profile.rollout)(), type(profile.weights)()  # with the defaults
    here = {key: getattr(rollout, key) for key in ("engine", "urls", "token_file", "workers")}
    sections = {
        "rollout": profile.rollout.model_copy(update=here),
        "weights": profile.weights.model_copy(update={"transport": weights.transport, "url": weights.url}),
    }
    return profile.model_copy(update=sections)


class Replay:
    """`changes`: the keys that differ from the run's, with their new values. `of`: the run's directory.
    `equal`, `different`: after `run`, the versions whose fingerprint is, or is not, that of the run;
    `run_dir`: the replay's own directory."""

    def __init__(self, argument: str, runs_dir: Path, sets: Sequence[str] = (), name: str = "") -> None:
        """`argument`: a run (from its oldest checkpoint), or a checkpoint. Raises ConfigError for keys that
        would have changed the data, RefusedError for a run that cannot be replayed."""
        found = find_run_or_checkpoint(argument, runs_dir)
        path = found if has_checkpoints(found) else found.parent.parent
        if is_locked(path):
            raise RefusedError(f"run '{path.name}' is running", hint=f"asyncrl stop {as_typed(path)}")
        sealed = [found] if path != found else sealed_checkpoints(path / "checkpoints")
        if not sealed:
            raise RefusedError(f"run '{path.name}' has no checkpoint to begin with", hint="replay another")
        self._begin, self._run = load_checkpoint(sealed[-1], "replay"), Recorded(path)
        if replayed := self._run.replay_of:
            why = f"run '{path.name}' is a replay: it recorded no trajectories"
            raise RefusedError(why, hint=f"asyncrl replay {as_typed(Path(replayed))}")
        before = read_document(self._run.files.config_resolved)
        self.loaded = laid_over(before, sets, "--set (replay)") if sets else before
        self.changes = differing(before.profile, self.loaded.profile)
        for key in self.changes:
            if key in NOT or not key.startswith(MAY_CHANGE):
                raise ConfigError(f"{key} would have changed what is trained on", hint=OTHER_DATA)
        self._size = Schedule.of(before.profile).step_groups
        if self._size != (size := Schedule.of(self.loaded.profile).step_groups):
            raise ConfigError(f"a recorded train step has {self._size} groups, not {size}", hint=OTHER_DATA)
        self.trains_differently = any(key.startswith(TRAINS) for key in self.changes)
        then = read_document(self._begin.directory / "config.resolved.json").profile
        trains = TRAINS if then.trainer.lr_schedule == "constant" else (*TRAINS, *LENGTHS)
        self._refuse_unsupported([key for key in differing(then, before.profile) if key.startswith(trains)])
        self._versions = {int(line["step"]): int(line["version"]) for line in self._run.metrics()}
        self._last = max(self._versions, default=0)
        if self._last <= self._begin.step:
            why = f"run '{path.name}' has no train step after {self._begin.directory.name} in metrics.jsonl"
            raise RefusedError(why, hint="replay from an earlier checkpoint, or another run")
        self._files = list[Path]()
        for step in range(self._begin.step + 1, self._last + 1):
            self._files.append(file := step_file(self._run.files.samples, step))
            if step not in self._versions or not file.is_file():
                why = f"run '{path.name}' did not record its trajectories: {file.name} is missing"
                hint = 'a run with logging.samples = "all" records them'
                raise RefusedError(f"{why}, or its line in metrics.jsonl", hint=hint)
        self.of = str(path.resolve())
        self._runs_dir, self._name = runs_dir, name or fresh_name(f"{path.name}-replay", runs_dir)
        self.run_dir = runs_dir / self._name
        self.equal, self.different = list[int](), list[int]()

    def _refuse_unsupported(self, later: Sequence[str]) -> None:
        """`later`: the training keys with which the run was resumed after the checkpoint."""
        profile, directory = self.loaded.profile, self._begin.directory
        had_critic = self._run.loaded.profile.algorithm.has_critic
        refused = {
            "its trainer had several ranks": len(list(directory.glob("rank-*.safetensors"))) > 1,
            "its critic had processes of its own": is_apart(profile, CRITIC),
            'it trained no critic for algorithm.adv_estimator = "gae"': (
                profile.algorithm.has_critic and not had_critic
            ),
            "prox had processes of its own, and its logprobs are of the run's weights": (
                self.trains_differently and is_apart(profile, PROX)
            ),
            f"it was resumed with another {', '.join(later)} after this checkpoint": bool(later),
        }
        for why, is_so in refused.items():
            if is_so:
                hint = "replay from a later checkpoint, RUN/step-000040" if later else "replay another run"
                if self.changes:
                    hint += ", or leave --set out"
                raise RefusedError(f"run '{self._run.name}' cannot be replayed: {why}", hint=hint)

    def to_json(self) -> dict[str, object]:
        steps = {"from_step": self._begin.step, "to_step": self._last}
        found = {"equal_versions": self.equal, "different_versions": self.different, "failure": self.failure}
        return {"of": self.of, "changes": dict(self.changes), **steps, **found}

    @property
    def equality(self) -> str:
        return f"{len(self.equal)} of {len(self.equal) + len(self.different)} versions have the run's weights"

    @property
    def failure(self) -> str:
        """Why the replay has failed; "" if its weights are the run's, or need not be."""
        if self.trains_differently or not self.different:
            return ""
        return f"{self.equality}: version {self.different[0]} is the first that has not"

    @property
    def steps(self) -> str:
        return f"steps {self._begin.step + 1}-{self._last} of {self._last}, from {self._begin.directory.name}"

    def run(self, say: Say = lambda text: None, *, is_scored: bool = True) -> None:
        """Train the recorded steps again, in a new run directory that ends with a checkpoint. Nothing is left
        of a replay that fails. `is_scored`: a resume follows, and until then the replay is not done."""
        profile, origins = self.loaded.profile, self.loaded.origins
        job = compile_job(profile, local_cluster())
        set_up_process(threads=job.role(TRAINER).threads, log_path=None)
        from asyncrl_cli.train.policy_trainer import PolicyTrainer  # torch

        say("preparing the model")
        task = load_task(profile, self._run.files.path)
        model_dir = resolve_model(profile, task)
        place = replace(place_of(job, TRAINER, model_dir), workers=1, **further_models(profile, model_dir))
        # a resume has nothing left but one eval
        ends = {"train_steps": self._last, "total_rollout_steps": None, "name": self._name}
        self._ending = without_servers(profile).model_copy(
            update={"run": profile.run.model_copy(update=ends)}
        )
        documents = {"profile_toml": to_toml(self._ending, origins)}
        resolved = to_document(self._ending, origins)
        directory = RunDirectory.create(self._runs_dir, self._name, **documents, resolved=resolved)
        try:
            self._describe(directory)  # what is killed before the end is known as a replay, too
            keep_model_files(model_dir, directory.path)
            for record, code in task.user_code.items():
                keep_record(directory.path, record, code)
            directory.start_attempt()
            with tempfile.TemporaryDirectory() as meeting:
                steps = Schedule.of(profile).optimizer_steps
                where = f"file://{meeting}/ranks"
                trainer = PolicyTrainer(
                    profile, place, rank=0, init_method=where, total_optimizer_steps=steps
                )
                try:
                    trainer.load(self._begin.directory)
                    self._train_all(trainer, directory, say, "stopped" if is_scored else "done")
                finally:
                    trainer.close()
            self._describe(directory)
        except BaseException:
            directory.remove()
            raise
        finally:
            directory.close()

    def _describe(self, directory: RunDirectory) -> None:
        replace_text(directory.path / REPLAY, json.dumps(self.to_json(), indent=1) + "\n")

    def _train_all(self, trainer: Any, directory: RunDirectory, say: Say, phase: str) -> None:
        sinks = [MetricsFile(directory.metrics), EventsFile(directory.events)]
        further = [TimelineFile(directory.timeline), StatusFile(directory.status)]
        facts, began_s = facts_of(self._ending, directory.path, 1), time.monotonic()
        observers = Observers(facts, [*sinks, *further], clock=time.monotonic)
        recorded = {event["version"]: event.get("fingerprint") for event in self._run.events("published")}
        step, version, window = self._begin.step, self._begin.version, self._begin.version
        tokens = int(self._begin.loop_state["groups"]["tokens_trained"])

        def publish() -> None:
            trainer.gather(version)
            fingerprint = trainer.published(version)[0].fingerprint
            fields, time_s = {"fingerprint": fingerprint}, time.monotonic() - began_s
            observers.event(Event(time_s=time_s, name="published", version=version, step=step, fields=fields))
            if recorded.get(version) is not None:
                (self.equal if recorded[version] == fingerprint else self.different).append(version)

        if self._begin.at_window_boundary:
            publish()
        for path in self._files:
            say(f"train step {step + 1} of {self._last}")
            record = self._trained(trainer, path)
            step, window, tokens = record.step, record.window, tokens + record.tokens_trained
            if self._versions[step] > version:
                version += 1
                publish()
            observers.step(replace(record, version=version, tokens_trained=tokens, ended_s=time.monotonic()))
        if version == window:  # the run was stopped within a window
            version += 1
            publish()
        trainer.snapshot(step)
        progress = {"time_s": time.monotonic() - began_s, "observers": [observers.state()]}
        self._checkpoint(trainer, directory, version, tokens, progress)
        observers.close("failed" if self.failure else phase, self.failure)

    def _trained(self, trainer: Any, path: Path) -> StepRecord:
        from asyncrl_cli.train.step_plan import plan_train_step, training_order

        began_s, profile = time.monotonic(), self.loaded.profile
        batch, payloads, _ = read_step(path)
        of_key = {group.key: payload for group, payload in zip(batch.groups, payloads, strict=True)}
        minibatches, seed = profile.async_training.require_batches, profile.run.seed
        groups = training_order(batch.groups, num_minibatches=minibatches, seed=seed, step=batch.step)
        when: dict[str, Any] = {"step": batch.step, "window": batch.window}
        (plan,) = plan_train_step(groups, profile, ranks=1, **when, shares_prefixes=trainer.shares)
        indexed = {index: of_key[group.key] for index, group in enumerate(groups)}
        report = trainer.train(batch.step_in_window, plan, indexed, batch.columns)
        step_s, trained = time.monotonic() - began_s, batch.step * self._size
        return StepRecord(
            **when,
            version=batch.window,
            step_in_window=batch.step_in_window,
            ended_s=time.monotonic(),
            groups=tuple(groups),
            timing_s={"step": step_s, "train": report.train_s, "other": step_s - report.train_s},
            train=report,
            reports={},
            spans={},
            sync={},
            evals=(),
            ledger={"admitted_total": trained, **{stage.value: 0 for stage in Stage}, "trained": trained},
            tokens_discarded=0,
            tokens_trained=sum(group.response_tokens for group in groups),
        )

    def _checkpoint(
        self, trainer: Any, directory: RunDirectory, version: int, tokens: int, progress: Json
    ) -> None:
        """What a resume needs to publish and to score the last version, with nothing left to train."""
        from asyncrl_cli.checkpoint.payloads import write_payloads

        step, trained, before = self._last, self._last * self._size, self._begin.loop_state
        ledger = {"admitted_total": trained, "ended": {"trained": trained}, "reasons": {}}
        groups = {"tokens_discarded": 0, "tokens_trained": tokens, "feed": before["groups"]["feed"]}
        state = {
            "schema_version": before["schema_version"],
            "step": step,
            "window": {"version": version, "taken_groups": 0},
            "groups": {**groups, "ledger": ledger, "running": [], "again": [], "finished": []},
            "running_tokens": 0,
            "last_eval_version": None,
            "evals_ended": [],
            **progress,
        }

        async def write(directory: Path, snapshot: LoopSnapshot) -> None:
            trainer.write(step, directory, False)
            write_payloads(directory, [])

        name = self.loaded.profile.name
        store = CheckpointStore(directory.path, keep=1, profile=name, write_trainer=write)
        snapshot = LoopSnapshot(step=step, version=version, at_window_boundary=True, loop_state=state)
        asyncio.run(store.write(snapshot))

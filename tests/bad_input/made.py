"""A run directory that the parts of asyncrl have written, in a second and without Ray: the loop on its
virtual clock, with real prompts, observers, checkpoints and tensors. And the tools to spoil it: every file of
a spoilt checkpoint has its checksum."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl_cli.checkpoint import reader, writer
from asyncrl_cli.checkpoint.payloads import write_payloads
from asyncrl_cli.checkpoint.writer import CheckpointStore
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import Arrays, GroupPayload, trajectory_of
from asyncrl_cli.job.driver_prompts import PromptFeed
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import World
from asyncrl_cli.observe.live_status import facts_of
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, StatusFile, TimelineFile
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.loaded import Loaded, load
from asyncrl_cli.profile.resolved import to_document, to_toml
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer, TrainerTimes
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.world import run_virtual
from asyncrl_cli.tasks.task import load_task
from tests.loop.proof.memory import MemoryCheckpoints
from tests.loop.worlds import worker_times

NAME, STEP = "otter", 6
PROFILE = """extends = "base"
[run]
train_steps = 18
[model]
path = "{model}"
[task]
source = "jsonl:{prompts}"
[trainer]
ppo_mini_batch_size = 4
[rollout]
n = 2
slots = 8
[async_training]
trigger_parameter_sync_step = 2
staleness_threshold = 0.5
partial_rollout = true
[checkpoint]
every_steps = 3
[eval]
prompts = 4
every_versions = 1
"""


@dataclass(frozen=True)
class Place:
    """A directory of its own, with the run `otter` in `runs/`, its model and its prompts."""

    root: Path

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def run(self) -> Path:
        return self.runs / NAME

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def newest(self) -> Path:
        return self.checkpoints / f"step-{STEP:06d}"

    @property
    def model(self) -> Path:
        return self.root / "model"


def make_place(root: Path) -> Place:
    place = Place(root)
    (root / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(64))
    )
    _write_model(place.model)
    (root / "profile.toml").write_text(PROFILE.format(model=place.model, prompts=root / "prompts.jsonl"))
    loaded = load(str(root / "profile.toml"), environ={})
    place.run.mkdir(parents=True)
    (place.run / "profile.toml").write_text(to_toml(loaded.profile, loaded.origins))
    (place.run / "config.resolved.json").write_text(json.dumps(to_document(loaded.profile, loaded.origins)))
    (place.run / "logs" / "attempt-1").mkdir(parents=True)
    (place.run / "logs" / "attempt-1" / "driver.log").write_text("started\n")
    (place.run / "logs" / "latest").symlink_to("attempt-1")
    shutil.copytree(place.model, place.run / "model")
    snapshots = _train(place, loaded)
    write_trainer = partial(_write_trainer, model=place.model)
    store = CheckpointStore(place.run, keep=9, profile=loaded.profile.name, write_trainer=write_trainer)
    for snapshot, _ in snapshots:
        if snapshot.step <= STEP:
            asyncio.run(store.write(snapshot))
    return place


def _train(place: Place, loaded: Loaded) -> list[Any]:
    profile = loaded.profile
    task = load_task(profile)

    async def main() -> list[Any]:
        times = worker_times()
        checkpoints = MemoryCheckpoints()
        sinks = [
            MetricsFile(place.run / "metrics.jsonl"),
            EventsFile(place.run / "events.jsonl"),
            TimelineFile(place.run / "timeline.jsonl"),
            StatusFile(place.run / "status.json"),
        ]
        observers = Observers(facts_of(profile, place.run, 1), sinks)
        world = World(
            feed=PromptFeed(task.train, seed=0, eval_sets={"": task.eval}),
            trainer=SimulatedTrainer(TrainerTimes(train_s=lambda batch: 0.7, gather_s=0.1, publish_s=0.05)),
            workers=[SimulatedWorker(f"rollout-{i}", 8, times, 0, None) for i in range(2)],
            eval_sets={"": task.eval},
            observers=[observers],
            checkpoints=checkpoints,
        )
        await Pipeline(LoopSettings.of(profile), world).run()
        observers.close("stopped")
        return checkpoints.snapshots

    return run_virtual(main())


async def _write_trainer(directory: Path, snapshot: Any, model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = {f"weight/{name}": tensor for name, tensor in load_file(model / "model.safetensors").items()}
    places = {key: (0, len(tensor)) for key, tensor in weights.items()}
    save_file(weights, directory / "rank-00000.safetensors", metadata={"rows": json.dumps(places)})
    counters = {
        "schema_version": 2,
        "ranks": 1,
        "step": snapshot.step,
        "optimizer_steps": snapshot.step,
        "has_window_first": 0,
    }
    (directory / "trainer.json").write_text(json.dumps(counters))
    groups = snapshot.loop_state["groups"]
    finished = [_payload(entry["result"]) for entry in groups["finished"]]
    ended = [
        _payload({**part["result"], "key": entry["key"]})
        for entry in groups["running"]
        for part in entry["ended"]
    ]
    kept = [_so_far(entry) for entry in groups["running"] if entry["kept"]]
    write_payloads(directory, [*finished, *ended, *kept])


def _so_far(entry: dict[str, Any]) -> GroupPayload:
    trajectories = [trajectory_of((), BUILT_IN, reward=0.0, finish_reason="abort")] * (max(entry["kept"]) + 1)
    for index, kept in entry["kept"].items():
        segment = _segment({"prompt_tokens": 0, "version_tokens": kept.version_tokens})
        trajectories[index] = trajectory_of(
            (segment,), BUILT_IN, reward=0.0, finish_reason="stop" if kept.is_whole else "abort"
        )
    uid, epoch, attempt = entry["key"]
    return GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=tuple(trajectories))


def _payload(result: dict[str, Any]) -> GroupPayload:
    uid, epoch, attempt = result["key"]
    trajectories = tuple(
        trajectory_of((_segment(meta),), BUILT_IN, reward=meta["reward"], finish_reason=meta["finish_reason"])
        for meta in result["trajectories"]
    )
    return GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=trajectories)


def _segment(meta: dict[str, Any]) -> Arrays:
    versions = [-1] * meta["prompt_tokens"] + [
        version for version, tokens in meta["version_tokens"] for _ in range(tokens)
    ]
    return dict(
        tokens=np.ones(len(versions), np.int32),
        logprobs=np.zeros(len(versions), np.float32),
        versions=np.array(versions, np.int32),
        mask=np.array(versions) >= 0,
    )


def _write_model(directory: Path) -> None:
    """A Qwen3 of two layers, without transformers: names and shapes are those of its files."""
    import torch
    from safetensors.torch import save_file

    hidden, middle, vocabulary, head = 16, 32, 64, 8
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (2 * head, hidden),
        "self_attn.k_proj": (head, hidden),
        "self_attn.v_proj": (head, hidden),
        "self_attn.o_proj": (hidden, 2 * head),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()} | {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    vocabulary_of = {
        token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+=. "])
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary_of, "unk_token": "<unk>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(special))


def copied(place: Place, root: Path) -> Place:
    """A copy to be spoilt, of hard links: a spoilt file is a new one. Its profile still names the first one's
    model and prompts."""
    shutil.copytree(place.root, root, symlinks=True, dirs_exist_ok=True, copy_function=os.link)
    return Place(root)


def replace(path: Path, content: bytes) -> None:
    """`content` in a file of its own, not through the link that other copies share."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


Edit = Callable[[Any], Any]


class _Delete:
    def __repr__(self) -> str:
        return "gone"


DELETE = _Delete()


def set_at(path: str | Sequence[Any], value: Any) -> Callable[[Any], Any]:
    """`set_at("a.0", value)` is an edit of a JSON value; `DELETE` removes the key."""
    if isinstance(path, str):
        path = [int(part) if part.isdigit() else part for part in path.split(".")]
    *outer, last = path

    def edit(content: Any) -> Any:
        node = content
        for part in outer:
            node = node[part]
        if value is DELETE:
            del node[last]
        else:
            node[last] = value
        return content

    return edit


def edit_json(path: Path, edit: Edit) -> None:
    """Rewrite `path` with what `edit` returns for its content."""
    replace(path, json.dumps(edit(json.loads(path.read_text()))).encode())


def reseal(directory: Path) -> None:
    """Make a manifest that fits the files: whoever spoilt them knows how."""
    known = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").unlink()
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            return seal_by_hand(directory, known)
    writer.seal(
        directory, step=known["step"], version=known["version"], run=known["run"], profile=known["profile"]
    )


def seal_by_hand(directory: Path, content: dict[str, Any]) -> None:
    """Write `content` as the manifest, with its own checksum."""
    content.pop("self_sha256", None)
    text = json.dumps(content | {"self_sha256": reader.digest_of(content)})
    replace(directory / "manifest.json", text.encode())


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Everything below `root`: nothing may be made, changed or removed by a command that refuses."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in [*names, *files]:
            status = os.lstat(os.path.join(directory, name))
            found[os.path.join(directory, name)] = (
                status.st_size if name in files else 0,
                status.st_mtime_ns if name in files else 0,
            )
    return found

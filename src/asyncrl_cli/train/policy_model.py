"""The policy under FSDP2: parameters, logprobs and entropies of tokens; and LoRA's adapters, which are
trained in place of its parameters.

Master weights are float32. With dtype bfloat16, forward and backward compute in bfloat16, and gradients are
reduced in float32. A single rank uses FSDP2, too: it costs about 4 ms per microbatch (measured on a CPU), and
a single code path is worth that. The attention function is chosen as in the transformers engine
(models/attention.py).

Legend: B = rows, T = positions, H = hidden size, N = sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.models.experts import Routing
from asyncrl_cli.models.saved_form import ADAPTER, adapted_layers, merged, persistent_buffers, scale_of
from asyncrl_cli.models.shape import LAYER
from asyncrl_cli.profile.arithmetic import MAX_LOGPROB_DIFF, PROX, REF, sends_rows
from asyncrl_cli.profile.schema import LoraSection, ProcessPlace, Profile
from asyncrl_cli.train.batch import Microbatch, scoring_microbatch
from asyncrl_cli.train.logprobs import ForwardPass, Scored
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.sharded_model import ShardedModel, fill, first_row
from asyncrl_cli.weights.buckets import Bucket, Spec, Unpacked, dtype_name, torch_dtype
from asyncrl_cli.weights.receivers import AnnouncedWeights
from asyncrl_cli.weights.versions import Manifest, make_probes, mean_abs_diff

FIXED_PROBES = 4


class PolicyModel(ShardedModel[PreTrainedModel]):
    """One rank's part of the model. `parameters`: the model's (with LoRA the adapters'), by their first name
    if they are tied.

    `replays`: whether it takes the sampler's experts, with `trainer.router_replay`.

    `specs` describe what this rank sends of a version, under the names in the model's files: every parameter
    once, in the engine's dtype, then persistent buffers in their own dtype. With `lora.sync = "adapter"`: the
    adapters alone, in float32.

    A rank sends its own rows of a parameter (`sends_rows`). Rank 0 sends the rest for all ranks, who gather
    it: tensors that transformers joins or changes in memory (experts), weights into which an adapter is
    merged, and buffers.
    """

    def __init__(self, profile: Profile, model_dir: str, ranks: Ranks, *, replays: bool = False) -> None:
        super().__init__(profile, model_dir, ranks)
        model = self.content
        self._forward = ForwardPass(
            model,
            profile.rollout.temperature,
            self.divide,
            differentiates_entropy=profile.algorithm.entropy_coeff > 0,
            routing=Routing(model) if replays and profile.trainer.router_replay else None,
        )
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._weights = {name: weight for name, weight in model.named_parameters() if ADAPTER not in name}
        adapted = [(name, part) for name, part in model.named_modules() if isinstance(part, LoraLinear)]
        self._adapted = {f"{name}.weight": part for name, part in adapted}
        self._buffers = persistent_buffers(model)
        self._wire_dtype = torch_dtype(profile.model.dtype)
        if profile.lora.sync == "adapter":
            self._weights, self._adapted, self._buffers = self.parameters, {}, {}
            self._wire_dtype = torch.float32
        parts = self._whole_parts()
        self._by_rows: dict[str, str] = {}
        """Parameters that are sent by rows: their names in files and in memory."""
        self.specs = self._make_specs(parts)
        done = set(self._by_rows.values())
        rest = ([name for name in part if name not in done] for part in parts)
        self._gathered_parts = [part for part in rest if part]

    def make_content(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.profile.lora.rank:
            add_adapters(model, self.profile.lora, self.profile.run.seed)
        return model

    def scored(self, microbatch: Microbatch, teacher_NV: torch.Tensor | None = None) -> Scored:
        """Logprobs, with gradient, and entropies (with gradient if there is an entropy bonus) of the sampled
        tokens at the sampling temperature; the divergence from a teacher that gives `teacher_NV`. A
        collective."""
        return self.gathered(partial(self._forward, microbatch, teacher_NV))

    @torch.no_grad()
    def whole_NV(self, microbatch: Microbatch, vocab_size: int) -> torch.Tensor:
        """Logprobs of the whole vocabulary before each sampled token. A collective."""
        found_NV = self.gathered(partial(self._forward.whole_NV, microbatch, vocab_size))
        self.gathered.release()
        return found_NV

    def traced_N(self, microbatch: Microbatch) -> torch.Tensor:
        return self.scored(microbatch).logprobs_N

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs of each sequence's tokens from index 1 on, at the sampling temperature. A collective."""
        if not sequences:
            return []
        found = iter(self.numbers_N(scoring_microbatch(sequences, self.ranks.device)).tolist())
        return [list(islice(found, len(tokens) - 1)) for tokens in sequences]

    def fixed_logprob(self) -> float:
        """The mean logprob of tokens that are the same in each run: it tells these weights from others. A
        collective."""
        tokens = make_probes(FIXED_PROBES, self.vocab_size, self.profile.run.seed)
        return self.numbers_N(scoring_microbatch(tokens, self.ranks.device)).mean().item()

    def load(self, manifest: Manifest, buckets: Iterable[Bucket]) -> None:
        """Load a published version, without adapters. A collective. Raises ValueError if its tensors do not
        fit, ExecutorFailed if the logprobs of its probes then differ from the trainer's."""
        buckets = list(buckets)
        self.form.check(AnnouncedWeights(bucket.entries for bucket in buckets), manifest.version)
        whole = self.form.to_memory(Unpacked(buckets))
        with torch.no_grad():
            for name, tensor in {**self._weights, **self._buffers}.items():
                fill(tensor, whole[name].__getitem__)
        if not manifest.probe_tokens:
            return
        difference = mean_abs_diff(self.logprobs(manifest.probe_tokens), manifest.probe_logprobs)
        if difference > MAX_LOGPROB_DIFF[self.profile.model.dtype]:
            what = f"logprobs of version {manifest.version} differ from the trainer's"
            raise ExecutorFailed(f"{what} by {difference:.2g} on average")

    def sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's tensors of `specs`, in their order and on the device. A collective: every rank
        must iterate to the end. Tensors may alias live memory."""
        for file_name, name in self._by_rows.items():
            if len(rows := cast(DTensor, self._weights[name]).to_local().detach()):
                yield file_name, rows
        for tensors in self._gathered():
            if self.ranks.rank == 0:
                yield from self.form.to_files(tensors).items()

    def _gathered(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the whole tensors that rank 0 sends, by their names in memory, for one part of the model at a
        time."""
        for names in self._gathered_parts:
            tensors = dict[str, torch.Tensor]()
            for name in names:
                if name in self._buffers:
                    tensors[name] = self._buffers[name]
                elif name in self._adapted:
                    layer = self._adapted[name]
                    sharded = (layer.weight, layer.lora_A.weight, layer.lora_B.weight)
                    weight, a, b = (cast(DTensor, shard.detach()).full_tensor() for shard in sharded)
                    tensors[name] = merged(weight, a, b, layer.scale).to(self._wire_dtype)
                else:
                    shard = self._weights[name].detach().to(self._wire_dtype)
                    tensors[name] = cast(DTensor, shard).full_tensor()
            yield tensors

    def _whole_parts(self) -> list[list[str]]:
        """Groups of names that must be converted together: one per layer if the form converts, else one per
        tensor."""
        parts: dict[str, list[str]] = {}
        for name in (*self._weights, *self._buffers):
            layer = LAYER.search(name)
            part = name if not self.form.converts else name[: layer.end()] if layer else ""
            kind = "parameters" if name in self._weights else "buffers"
            parts.setdefault(f"{kind} {part}", []).append(name)
        return sorted(parts.values(), key=lambda names: names[0] in self._buffers)

    def _make_specs(self, parts: Sequence[Sequence[str]]) -> list[Spec]:
        same: dict[int, list[str]] = {}
        for name, parameter in self.content.named_parameters(remove_duplicate=False):
            same.setdefault(id(parameter), []).append(name)
        aliases = dict[str, tuple[str, ...]]()
        for tied in same.values():
            if len(tied) > 1 and tied[0] in self._weights:
                converted = [self.form.to_files({name: torch.empty(0, device="meta")}) for name in tied]
                first, *others = (file_name for (file_name,) in converted)
                aliases[first] = tuple(others)
        empty = {name: buffer.to("meta") for name, buffer in self._buffers.items()}
        for name, parameter in self._weights.items():
            empty[name] = torch.empty(parameter.shape, dtype=self._wire_dtype, device="meta")
        files = dict[str, torch.Tensor]()
        for names in parts:
            files |= self.form.to_files({name: empty[name] for name in names})
        sent = sends_rows(self.profile)
        # what a conversion leaves as it is stays the same object
        by_rows = {id(empty[name]): name for name in self._weights if sent and name not in self._adapted}
        own, rest = list[Spec](), list[Spec]()
        for name, tensor in files.items():
            shape, also = tuple(tensor.shape), aliases.get(name, ())
            spec = Spec(name=name, dtype=dtype_name(tensor.dtype), shape=shape, aliases=also)
            if (in_memory := by_rows.get(id(tensor))) is None:
                rest.append(spec)
                continue
            self._by_rows[name] = in_memory
            parameter = cast(DTensor, self._weights[in_memory])
            if count := len(parameter.to_local()):
                own.append(spec.rows(first_row(parameter), count))
        return own + (rest if self.ranks.rank == 0 else [])


def frozen_model(task: str, profile: Profile, place: ProcessPlace, ranks: Ranks) -> PolicyModel:
    """This rank's part of the model for `ref` or `prox`, which is never trained and has no adapters."""
    model_dir = (place.ref_dir if task == REF else "") or place.model_dir
    # prox is the policy of the window's start; the reference chooses its own experts
    profile = profile.model_copy(update={"lora": LoraSection()})
    return PolicyModel(profile, model_dir, ranks, replays=task == PROX)


class LoraLinear(torch.nn.Linear):
    """A linear layer with frozen weights and an adapter (LoRA, arXiv:2106.09685).

        y = W x + alpha / rank * B A x        A: rank x in, uniform at random.  B: out x rank, 0 at the start

    Names follow peft: beside `...q_proj.weight` there are `...q_proj.lora_A.weight` and
    `...q_proj.lora_B.weight`. Engines get W + alpha / rank * B A under W's name, merged here or by the
    workers (models/saved_form.py), or A and B themselves. peft's own layers are not used: they rename W to
    `base_layer.weight`, and only these few lines of them are needed (tests compare the two).
    """

    def __init__(self, base: torch.nn.Linear, lora: LoraSection, generator: torch.Generator) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale_of(lora)
        self.lora_A = torch.nn.Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = torch.nn.Linear(lora.rank, self.out_features, bias=False)
        torch.nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
        torch.nn.init.zeros_(self.lora_B.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias) + self.lora_B(self.lora_A(input)) * self.scale


def add_adapters(model: PreTrainedModel, lora: LoraSection, seed: int) -> None:
    """Freeze the model, and replace each chosen layer by a `LoraLinear`. The same seed gives the same
    adapters.

    Raises ConfigError as `adapted_layers` does.
    """
    generator, layers = torch.Generator().manual_seed(seed), adapted_layers(model, lora)
    model.requires_grad_(False)
    for name, base in layers.items():
        parent, _, end = name.rpartition(".")
        setattr(model.get_submodule(parent), end, LoraLinear(base, lora, generator))

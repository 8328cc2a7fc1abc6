"""The policy under FSDP2: parameters, logprobs and entropies of tokens.

Master weights are float32. With dtype bfloat16, forward and backward compute in bfloat16, and gradients are
reduced in float32. A single rank uses FSDP2, too: it costs about 4 ms per microbatch (measured on a CPU), and
a single code path is worth that. The attention function is chosen as in the transformers engine
(models/attention.py).

Legend: B = rows, T = positions, H = hidden size, N = sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.models.saved_form import ADAPTER, persistent_buffers
from asyncrl_cli.models.shape import LAYER
from asyncrl_cli.profile.arithmetic import MAX_LOGPROB_DIFF
from asyncrl_cli.profile.schema import LoraSection, ProcessPlace, Profile
from asyncrl_cli.profile.sharing import REF
from asyncrl_cli.train.batch import Microbatch, scoring_microbatch
from asyncrl_cli.train.chunked_logprobs import Head, Scored
from asyncrl_cli.train.lora import LoraLinear, add_adapters
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.sharded_model import ShardedModel, fill
from asyncrl_cli.train.unpadded import Divide, padded
from asyncrl_cli.weights.buckets import Bucket, Spec, dtype_name, torch_dtype, unpack
from asyncrl_cli.weights.versions import Manifest, mean_abs_diff


class PolicyModel(ShardedModel):
    """One rank's part of the model. `parameters`: the model's (with LoRA the adapters'), by their first name
    if they are tied.

    `specs` describe the tensors that a publish sends, under their names in the model's files: every parameter
    once, in the engine's dtype, then persistent buffers in their own dtype. With `lora.sync = "adapter"`: the
    adapters alone, in float32.
    """

    def __init__(self, profile: Profile, model_dir: str, ranks: Ranks) -> None:
        super().__init__(profile, model_dir, ranks)
        model: PreTrainedModel = self._content
        self._scorer = ForwardPass(model, profile.rollout.temperature, self.divide)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._weights = {
            name: parameter for name, parameter in model.named_parameters() if ADAPTER not in name
        }
        self._adapted = {
            f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, LoraLinear)
        }
        self._buffers = persistent_buffers(model)
        self._aliases = _aliases(model)
        self._wire_dtype = torch_dtype(profile.model.dtype)
        if profile.lora.sync == "adapter":
            self._weights, self._adapted, self._buffers, self._aliases = self.parameters, {}, {}, {}
            self._wire_dtype = torch.float32
        self._parts = self._whole_parts()
        self.specs = self._make_specs()

    def _make_content(self, model: PreTrainedModel) -> PreTrainedModel:
        if self._profile.lora.rank:
            add_adapters(model, self._profile.lora, self._profile.run.seed)
        return model

    def scored(self, microbatch: Microbatch) -> Scored:
        """Logprobs, with gradient, and entropies of the sampled tokens at the sampling temperature. A
        collective."""
        return self._gathered(partial(self._scorer, microbatch))

    def traced_N(self, microbatch: Microbatch) -> torch.Tensor:
        return self.scored(microbatch).logprobs_N

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs of each sequence's tokens from index 1 on, at the sampling temperature. A collective."""
        if not sequences:
            return []
        found = iter(self.numbers_N(scoring_microbatch(sequences, self._ranks.device)).tolist())
        return [list(islice(found, len(tokens) - 1)) for tokens in sequences]

    def load(self, manifest: Manifest, buckets: Iterable[Bucket]) -> None:
        """Load a published version, without adapters. A collective. Raises ValueError if its tensors do not
        fit, ExecutorFailed if the logprobs of its probes then differ from the trainer's."""
        tensors = {name: tensor for bucket in buckets for name, tensor in unpack(bucket).items()}
        self.form.check(tensors, manifest.version)
        whole = self.form.to_memory(tensors)
        with torch.no_grad():
            for name, tensor in {**self._weights, **self._buffers}.items():
                fill(tensor, whole[name].__getitem__)
        if not manifest.probe_tokens:
            return
        off = mean_abs_diff(self.logprobs(manifest.probe_tokens), manifest.probe_logprobs)
        if off > MAX_LOGPROB_DIFF[self._profile.model.dtype]:
            raise ExecutorFailed(
                f"logprobs of version {manifest.version} differ from the trainer's by {off:.2g} on average"
            )

    def full(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield whole tensors on the device, by their names in memory, for one part of the model at a time.
        `form.to_files` makes the tensors of `specs` from them. A collective: every rank must iterate over all
        parts. Tensors may alias live memory."""
        for names in self._parts:
            yield {name: self._full(name) for name in names}

    def _full(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name]
        if name in self._adapted:
            return self._adapted[name].merged_weight().to(self._wire_dtype)
        return cast(DTensor, self._weights[name].detach().to(self._wire_dtype)).full_tensor()

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

    def _make_specs(self) -> list[Spec]:
        aliases = {
            self._file_name(name): tuple(map(self._file_name, others))
            for name, others in self._aliases.items()
        }
        empty = {
            n: torch.empty(p.shape, dtype=self._wire_dtype, device="meta") for n, p in self._weights.items()
        }
        empty |= {name: buffer.to("meta") for name, buffer in self._buffers.items()}
        converted: dict[str, torch.Tensor] = {}
        for names in self._parts:
            converted |= self.form.to_files({name: empty[name] for name in names})
        return [
            Spec(
                name=name,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                aliases=aliases.get(name, ()),
            )
            for name, tensor in converted.items()
        ]

    def _file_name(self, name: str) -> str:
        (converted,) = self.form.to_files({name: torch.empty(0, device="meta")})
        return converted


def frozen_model(task: str, profile: Profile, place: ProcessPlace, ranks: Ranks) -> PolicyModel:
    """This rank's part of the model for `ref` or `prox`, which is never trained and has no adapters."""
    model_dir = (place.ref_dir if task == REF else "") or place.model_dir
    return PolicyModel(profile.model_copy(update={"lora": LoraSection()}), model_dir, ranks)


class ForwardPass:
    """A model as a function from a microbatch to its `Scored`."""

    def __init__(self, model: PreTrainedModel, temperature: float, divide: Divide = padded) -> None:
        self._model = model
        self._divide = divide
        self._decoder_name = model.base_model_prefix
        self._temperature = temperature

    def __call__(self, microbatch: Microbatch) -> Scored:
        part = self._divide(microbatch)
        decoded = getattr(self._model, self._decoder_name)(**part.inputs, use_cache=False)
        hidden_NH = decoded.last_hidden_state.flatten(0, 1).index_select(0, part.select_n)
        head = Head(
            logits_of=partial(self._logits, replace(decoded, last_hidden_state=None)),
            parameters=tuple(self._model.get_output_embeddings().parameters()),
            vocab_size=int(self._model.config.get_text_config().vocab_size),
            temperature=self._temperature,
        )
        scored = head.score(hidden_NH, part.of(microbatch.targets_N))
        return Scored(*(part.joined(values_N, len(microbatch.targets_N)) for values_N in scored))

    def _logits(self, decoded: Any, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Run the model's own forward pass on the decoder's result, because some models scale or cap their
        logits."""
        decoder = getattr(self._model, self._decoder_name)
        setattr(
            self._model, self._decoder_name, _Decoder(replace(decoded, last_hidden_state=hidden_NH[None]))
        )
        try:
            logits_NV: torch.Tensor = self._model(use_cache=False).logits.squeeze(0)
        finally:
            setattr(self._model, self._decoder_name, decoder)
        return logits_NV


class _Decoder(torch.nn.Module):
    """A stand-in for the decoder that returns a known result."""

    def __init__(self, decoded: Any) -> None:
        super().__init__()
        self._decoded = decoded

    def forward(self, **_: Any) -> Any:
        return self._decoded


def _aliases(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}

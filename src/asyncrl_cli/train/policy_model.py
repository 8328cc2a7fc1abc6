"""The policy under FSDP2: parameters, logprobs and entropies of tokens.

Master weights are float32; with dtype bfloat16 forward and backward compute in bfloat16 and gradients are reduced in float32. A
single rank uses FSDP2, too: it costs about 4 ms per microbatch (measured on a CPU), and a single code path is worth that. The
attention function is chosen as in the transformers engine (models/attention.py).

Legend: B = rows, T = positions, H = hidden size, N = sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl_cli.models.saved_form import SavedForm, persistent_buffers, skeleton
from asyncrl_cli.models.shape import LAYER
from asyncrl_cli.profile.schema import LoraSection, Profile
from asyncrl_cli.train.batch import Microbatch
from asyncrl_cli.train.chunked_logprobs import Head, Scored
from asyncrl_cli.train.lora import LoraLinear, add_adapters
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.sharded_model import choose_computation, fill, sharded
from asyncrl_cli.train.unpadded import Divide, is_packed, padded
from asyncrl_cli.weights.adapters import ADAPTER
from asyncrl_cli.weights.buckets import Spec, dtype_name, torch_dtype


class PolicyModel:
    """One rank's part of the model. `parameters` are the sharded float32 master weights by first name; with LoRA the adapters'.

    `is_packed`: its microbatches' budget of tokens needs no room for padding.
    `specs` describe the tensors that a publish sends, under their names in the model's files: every parameter once, in the
    engine's dtype, then persistent buffers in their own dtype; with `lora.sync = "adapter"` the adapters alone, in float32.
    """

    def __init__(self, profile: Profile, model_dir: str, ranks: Ranks) -> None:
        transformers.logging.disable_progress_bar()
        trusts = profile.model.trust_remote_code
        model, empty = (skeleton(model_dir, trust_remote_code=trusts) for _ in range(2))
        self.form = SavedForm(empty)
        if profile.lora.rank:
            add_adapters(model, profile.lora, profile.run.seed)
        self._gathered = sharded(model, model, model_dir, profile, self.form, ranks)
        self.attention, divide = choose_computation(self._gathered, model, getattr(model, model.base_model_prefix), ranks)
        self.is_packed = is_packed(divide)
        self._scorer = Scorer(model, profile.rollout.temperature, divide)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        every = cast(dict[str, DTensor], dict(model.named_parameters()))
        self.parameters = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
        self._weights = {name: parameter for name, parameter in every.items() if ADAPTER not in name}
        self._adapted = {f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, LoraLinear)}
        self._buffers = persistent_buffers(model)
        self._aliases = _aliases(model)
        self._wire_dtype = torch_dtype(profile.model.dtype)
        if profile.lora.sync == "adapter":
            self._weights, self._adapted, self._buffers, self._aliases = self.parameters, {}, {}, {}
            self._wire_dtype = torch.float32
        self._parts = self._whole_parts()
        self.specs = self._make_specs()

    def scored(self, microbatch: Microbatch) -> Scored:
        """Logprobs, with gradient, and entropies of the sampled tokens at the sampling temperature. A collective."""
        return self._gathered(partial(self._scorer, microbatch))

    def logprobs_N(self, microbatch: Microbatch) -> torch.Tensor:
        """Logprobs of the sampled tokens, without gradient. A collective: all ranks call it."""
        with torch.no_grad():
            logprobs_N = self.scored(microbatch).logprobs_N
        self._gathered.release()
        return logprobs_N

    def before_backward(self, *, is_last: bool) -> None:
        """Call it before the forward of each microbatch of an optimizer step."""
        self._gathered.before_backward(is_last=is_last)

    def locals(self) -> dict[str, torch.Tensor]:
        """This rank's shards; writing to them in place changes the weights."""
        return {name: parameter.to_local().detach() for name, parameter in self.parameters.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Take the weights of a version without adapters; tensors by their names in files. ValueError if they do not fit."""
        self.form.check(tensors, version)
        whole = self.form.to_memory(tensors)
        with torch.no_grad():
            for name, tensor in {**self._weights, **self._buffers}.items():
                fill(tensor, whole[name].__getitem__)

    def full(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield whole tensors on the device, by their names in memory, for one part of the model at a time. `form.to_files` of the
        parts gives what `specs` lists. A collective: every rank must iterate over all parts. Tensors may alias live memory."""
        for names in self._parts:
            yield {name: self._full(name) for name in names}

    def _full(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name]
        if name in self._adapted:
            return self._adapted[name].merged_weight().to(self._wire_dtype)
        return cast(DTensor, self._weights[name].detach().to(self._wire_dtype)).full_tensor()

    def _whole_parts(self) -> list[list[str]]:
        """Groups of names that must be converted together: one per layer if the form converts, else one per tensor."""
        parts: dict[str, list[str]] = {}
        for name in (*self._weights, *self._buffers):
            layer = LAYER.search(name)
            part = name if not self.form.converts else name[: layer.end()] if layer else ""
            kind = "parameters" if name in self._weights else "buffers"
            parts.setdefault(f"{kind} {part}", []).append(name)
        return sorted(parts.values(), key=lambda names: names[0] in self._buffers)

    def _make_specs(self) -> list[Spec]:
        aliases = {self._file_name(name): tuple(map(self._file_name, others)) for name, others in self._aliases.items()}
        empty = {n: torch.empty(p.shape, dtype=self._wire_dtype, device="meta") for n, p in self._weights.items()}
        empty |= {name: buffer.to("meta") for name, buffer in self._buffers.items()}
        converted: dict[str, torch.Tensor] = {}
        for names in self._parts:
            converted |= self.form.to_files({name: empty[name] for name in names})
        return [
            Spec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), aliases=aliases.get(name, ()))
            for name, tensor in converted.items()
        ]

    def _file_name(self, name: str) -> str:
        (converted,) = self.form.to_files({name: torch.empty(0, device="meta")})
        return converted


def reference_model(profile: Profile, model_dir: str, ranks: Ranks) -> PolicyModel:
    """This rank's part of the reference, which is never trained and has no adapters."""
    return PolicyModel(profile.model_copy(update={"lora": LoraSection()}), model_dir, ranks)


class Scorer:
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
        """The model's own forward pass, with the decoder's result given: some models scale or cap their logits."""
        decoder = getattr(self._model, self._decoder_name)
        setattr(self._model, self._decoder_name, _Decoder(replace(decoded, last_hidden_state=hidden_NH[None])))
        try:
            logits_NV: torch.Tensor = self._model(use_cache=False).logits.squeeze(0)
        finally:
            setattr(self._model, self._decoder_name, decoder)
        return logits_NV


class _Decoder(torch.nn.Module):
    """A decoder whose result is known."""

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

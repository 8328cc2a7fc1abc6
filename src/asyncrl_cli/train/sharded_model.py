"""Makes a rank's model: created on the meta device, sharded over ranks by FSDP2, then filled from files.

Every decoder layer is one shard group, and the rest (embedding, norm, head) another. A rank reads only its
own rows of each tensor, so the host never holds more than the rank's shards and one tensor. Models whose
tensors differ between files and memory (`SavedForm.converts`: joined experts), or have other names there, are
an exception: transformers reads them whole, on every rank.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
import torch.nn.attention.varlen
import transformers
from numpy.typing import NDArray
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl_cli.contracts.item import Item
from asyncrl_cli.data.trajectories import GroupPayload
from asyncrl_cli.models.attention import Attention, choose_attention
from asyncrl_cli.models.model_files import tensor_files
from asyncrl_cli.models.saved_form import SavedForm, persistent_buffers, skeleton
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train import keeps_whole_gradients
from asyncrl_cli.train.batch import Column, Microbatch, StepBatch, step_batches
from asyncrl_cli.train.division import choose_division, is_packed
from asyncrl_cli.train.packed_rows import Divide
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.shared_prefixes import SharedPrefixes
from asyncrl_cli.train.step_plan import OptimizerStepPlan, PlannedTrajectory, RankPlan

T = TypeVar("T")
Content = TypeVar("Content", bound=torch.nn.Module)
Read = Callable[[str, slice], torch.Tensor]
"""Reads rows of a tensor, given its name in memory: on the host, in any dtype."""
WHOLE = slice(None)
LAYER_CLASSES, INITIALIZED = "_no_split_modules", "_is_hf_initialized"
"""Attributes of transformers, for which it has no public ones: of a model, the names of its layers' classes;
of a tensor, that `initialize_weights` must not touch it."""

logger = logging.getLogger(__name__)
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_ATEN = ("mm", "addmm", "bmm", *(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS))
EXPENSIVE = [*(getattr(torch.ops.aten, n).default for n in _ATEN), torch.ops.torch_attn._varlen_attn.default]
"""Operations whose results `selective` keeps: matrix products and attention, which take nearly all of a
layer's time."""


class Gathered(torch.nn.Module):
    """The root of sharding. It calls functions that need the parameters of `content`; FSDP gathers them for
    the call.

    On CPUs, where memory is plentiful, gathered parameters and whole gradients are kept for an optimizer
    step. With two ranks, gathering for each pass and reducing after each microbatch took a quarter of the
    time. On GPUs gradients alone may be kept (`trainer.whole_gradients`). `keeps_whole`: parameters;
    `sums_once`: gradients are reduced once per optimizer step.
    """

    def __init__(self, content: torch.nn.Module, ranks: Ranks, whole_gradients: bool | None) -> None:
        super().__init__()
        self.content = content
        self.keeps_whole = self.sums_once = ranks.device.type == "cpu"
        if not self.keeps_whole:
            trained = sum(parameter.numel() for parameter in content.parameters() if parameter.requires_grad)
            device_bytes = torch.cuda.get_device_properties(ranks.device).total_memory
            self.sums_once = keeps_whole_gradients(
                whole_gradients, ranks=ranks.world_size, parameters=trained, device_bytes=device_bytes
            )

    def forward(self, function: Callable[[], T]) -> T:
        return function()

    def before_backward(self, *, is_last: bool) -> None:
        """Call this before each microbatch's forward in an optimizer step."""
        root = cast(FSDPModule, self)
        if self.sums_once:
            root.set_requires_gradient_sync(is_last)
        if self.keeps_whole:
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(is_last)

    def release(self) -> None:
        """Call this after a call without backward pass: else FSDP keeps the gathered parameters, and the next
        call's are stale."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class ShardedModel(ABC, Generic[Content]):
    """One rank's part of a model that gives each sampled token a number: its logprob (PolicyModel), or a
    value (Critic).

    `content`: the module that is sharded. `parameters`: the trained, sharded float32 master weights, by name.
    `divide`: how the decoder takes microbatches. `is_packed`: whether microbatches are packed without
    padding; `shares`: whether what rows share is computed once. OSError or ValueError, from transformers, if
    `model_dir` is not a model.
    """

    def __init__(self, profile: Profile, model_dir: str, ranks: Ranks) -> None:
        transformers.logging.disable_progress_bar()
        self.profile, self.ranks = profile, ranks
        trusts = profile.model.trust_remote_code
        model, empty = (skeleton(model_dir, trust_remote_code=trusts) for _ in range(2))
        self.form = SavedForm(empty)
        self.content: Content = self.make_content(model)
        self.gathered = sharded(model, self.content, model_dir, profile, self.form, ranks)
        decoder = getattr(model, model.base_model_prefix)
        # the module whose outputs the choice of attention must keep
        attending = model if self.content is model else decoder
        self.attention: Attention = self.gathered(partial(choose_attention, attending))
        wanted = profile.trainer.shared_prefixes
        self.divide: Divide = self.gathered(partial(choose_division, decoder, self.attention, ranks, wanted))
        self.gathered.release()
        self.is_packed, self.shares = is_packed(self.divide), isinstance(self.divide, SharedPrefixes)
        layout = "packed without padding" if self.is_packed else "padded"
        layout += ", shared prefixes computed once" if self.shares else ""
        logger.info("rank %d: attention %s, microbatches %s", ranks.rank, self.attention, layout)
        every = cast(dict[str, DTensor], dict(self.content.named_parameters()))
        self.parameters = {name: parameter for name, parameter in every.items() if parameter.requires_grad}

    @abstractmethod
    def make_content(self, model: PreTrainedModel) -> Content:
        """The `content` for `sharded`, made from a model on the meta device."""

    @abstractmethod
    def traced_N(self, microbatch: Microbatch) -> torch.Tensor:
        """The numbers of the sampled tokens, with gradient. A collective: all ranks call it."""

    def numbers_N(self, microbatch: Microbatch) -> torch.Tensor:
        """The same without gradient. A collective."""
        with torch.no_grad():
            numbers_N = self.traced_N(microbatch)
        self.gathered.release()
        return numbers_N

    def step_batches(
        self, plan: RankPlan, payloads: Mapping[int, GroupPayload], columns: Sequence[str] = ()
    ) -> list[StepBatch]:
        """The microbatches of a plan, if this model alone takes them. A collective."""
        return step_batches(
            plan,
            payloads,
            columns,
            max_tokens=self.profile.trainer.max_tokens_per_microbatch,
            ranks=self.ranks,
            are_packed=self.is_packed,
            are_trees=self.shares,
        )

    def column(self, payloads: Mapping[int, GroupPayload]) -> Column:
        """The numbers of the groups' sampled tokens. A collective; each rank may have its own groups, or
        none."""
        left = iter(self.arrays(every_trajectory(payloads), payloads))
        return {group: tuple(next(left) for _ in one.trajectories) for group, one in payloads.items()}

    def arrays(
        self, planned: Sequence[PlannedTrajectory], payloads: Mapping[int, GroupPayload]
    ) -> list[NDArray[np.float32]]:
        """The numbers of each of these trajectories' sampled tokens. A collective."""
        these = OptimizerStepPlan(trajectories=tuple(planned), num_loss_tokens=0, num_trajectories=0)
        (batch,) = self.step_batches(RankPlan(optimizer_steps=(these,), window=0), payloads)
        batch.fill("column", self.numbers_N)
        values_F = batch.column("column").cpu().numpy()
        return np.split(values_F, np.cumsum(batch.counts_P)[:-1]) if planned else []

    def score(self, groups: Sequence[GroupPayload], items: Sequence[Item]) -> list[Any]:
        """`column` as a list, one entry per group, for a scorer with processes of its own. `items`: of its
        groups' prompts, which only a reward model reads."""
        return list(self.column(dict(enumerate(groups))).values())

    def locals(self) -> dict[str, torch.Tensor]:
        """This rank's shards; writing to them in place changes the weights."""
        return {name: parameter.to_local().detach() for name, parameter in self.parameters.items()}


def every_trajectory(payloads: Mapping[int, GroupPayload]) -> list[PlannedTrajectory]:
    return [
        PlannedTrajectory(group=group, trajectory=index, advantage=0.0)
        for group, payload in payloads.items()
        for index in range(len(payload.trajectories))
    ]


def sharded(
    model: PreTrainedModel,
    content: torch.nn.Module,
    model_dir: str,
    profile: Profile,
    form: SavedForm,
    ranks: Ranks,
) -> Gathered:
    """This rank's part of `content`: a model on the meta device (`models.saved_form.skeleton`), its decoder,
    or either of them with modules added. Added modules keep their values; the rest is filled from the files.

    Master weights are float32. Forward and backward compute in `model.dtype`; gradients are reduced in
    float32.
    """
    # In eval mode: with dropout, prox and theta would be different functions of the same weights.
    model.float().eval().tie_weights()
    added = {n: p.detach().clone() for n, p in content.named_parameters() if not p.is_meta}
    policy, recompute = MixedPrecisionPolicy(), profile.trainer.activation_checkpointing
    if profile.model.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer_classes = set(getattr(model, LAYER_CLASSES) or ())
    for layer in [module for module in content.modules() if type(module).__name__ in layer_classes]:
        if recompute != "none":
            # Keep only the layer's inputs (with `selective` also expensive results), and compute the rest
            # again in the backward pass.
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            if recompute == "selective":
                how["context_fn"] = partial(create_selective_checkpoint_contexts, EXPENSIVE)
            layer.forward = partial(checkpoint, layer.forward, **how)
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
    root = Gathered(content, ranks, profile.trainer.whole_gradients)
    gathered = cast(Gathered, fully_shard(root, mesh=ranks.mesh, mp_policy=policy))
    # Only now is there memory for them: this rank's shards alone.
    gathered.to_empty(device=ranks.device)
    model.tie_weights()
    others = {id(content.get_parameter(name)) for name in added}
    named = {**dict(model.named_parameters()), **persistent_buffers(model)}
    with torch.no_grad():
        for tensor in named.values():
            setattr(tensor, INITIALIZED, True)
        model.initialize_weights()  # computes tensors that no file has, such as rotary frequencies
        missing = {n: t for n, t in named.items() if not t.is_meta and id(t) not in others}
        read = None if form.converts else rows_in_files(model, missing, Path(model_dir))
        read = read or rows_of_whole(model_dir, trusts=profile.model.trust_remote_code)
        for name, tensor in missing.items():
            fill(tensor, partial(read, name))
        for name, whole in added.items():
            fill(content.get_parameter(name), whole.__getitem__)
    return gathered


def fill(tensor: torch.Tensor, read: Callable[[slice], torch.Tensor]) -> None:
    """Write this rank's rows of a parameter, or a whole buffer; `read` gives rows of the whole tensor."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(read(WHOLE))
    elif len(local := tensor.to_local()):
        begin = first_row(tensor)
        local.copy_(read(slice(begin, begin + len(local))))


def first_row(parameter: DTensor) -> int:
    """The row of the whole parameter at which this rank's shard begins. FSDP2 divides rows as torch.chunk
    does: all ranks have the same number, except the last ones."""
    mesh, num_rows = parameter.device_mesh, parameter.shape[0]
    return min(mesh.get_local_rank() * -(-num_rows // mesh.size()), num_rows)


def rows_in_files(model: PreTrainedModel, wanted: Mapping[str, torch.Tensor], model_dir: Path) -> Read | None:
    """A reader of rows in the files; None if they lack one of the `wanted` tensors. Files may have a tied
    tensor under any of its names."""
    files = tensor_files(model_dir)
    saved = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items() if name in files}
    if not all(id(tensor) in saved for tensor in wanted.values()):
        return None

    def read(name: str, rows: slice) -> torch.Tensor:
        saved_name = saved[id(wanted[name])]
        # opened per tensor: pages read stay mapped until it closes
        with safe_open(files[saved_name], framework="pt") as file:
            whole = rows == WHOLE
            tensor: torch.Tensor = file.get_tensor(saved_name) if whole else file.get_slice(saved_name)[rows]
            return tensor

    return read


def rows_of_whole(model_dir: str, *, trusts: bool) -> Read:
    """A reader of rows in the whole model, which transformers loads on this rank's host."""
    loaded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, trust_remote_code=trusts)
    whole = loaded.state_dict()
    return lambda name, rows: whole[name] if rows == WHOLE else whole[name][rows]

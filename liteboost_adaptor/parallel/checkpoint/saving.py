"""``save_pretrained`` of a sharded model: rank 0 writes the whole checkpoint, tensor by tensor."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ParallelError
from ...quantization.layers import QuantizedLayer
from ..runtime import groups
from ..runtime.groups import Group
from ..runtime.mesh import Mesh
from ..tensor import quantized
from ..tensor.apply import sharded_specs
from ..tensor.plan import ShardingPlan
from ..tensor.shard_spec import ShardSpec, copy_shard
from .checkpoint_writer import CheckpointWriter

#: Buffers of quantized weights.
_BUFFERS = ("weight", "scales", "zero_points", "columns")
_REFUSED = ("state_dict", "push_to_hub", "distributed_checkpoint")


def save(
    model: Any, plan: ShardingPlan, mesh: Mesh, save_directory: str | os.PathLike[str], **kwargs: Any
) -> None:
    """What ``save_pretrained`` of the unsharded model would write. Every rank calls it; rank 0 writes.

    Ranks with the same shards as the first ones only wait. The files get their names when all of them are
    written. One tensor of the checkpoint is in memory at a time.

    Raises:
        ParallelError: An argument that needs the whole model in one process; a rank that fails.
    """
    refused = [name for name in _REFUSED if kwargs.get(name)]
    if refused:
        raise ParallelError(
            f"{refused[0]} of save_pretrained needs the whole model in one process, and this {plan.model} is "
            f"sharded over {mesh.tensor.size}. Save it to a folder, and go on from there."
        )
    with groups.fail_together(mesh.world):
        if mesh.is_first:
            _save(model, plan, mesh.tensor, save_directory, kwargs)


def save_replicated(model: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> None:
    """``save_pretrained`` of a model that is replicated. Every rank calls it; rank 0 writes.

    Raises:
        ParallelError: On the others, where rank 0 has failed.
    """
    with groups.fail_together(mesh.world):
        if mesh.is_first:
            type(model).save_pretrained(model, *args, **kwargs)


def _save(
    model: Any,
    plan: ShardingPlan,
    group: Group,
    save_directory: str | os.PathLike[str],
    kwargs: dict[str, Any],
) -> None:
    """Step by step on all ranks: where one fails, no other is left waiting for a tensor of it."""
    with contextlib.ExitStack() as stack:
        with groups.fail_together(group):
            tensors = Tensors(model, plan, group.rank)
            steps = _steps(model, tensors) if group.rank == 0 else []
        steps = groups.all_gather_object(group, steps)[0]
        with groups.fail_together(group):
            if group.rank == 0:
                meta = {name: tensors.on_meta(name) for names in steps for name in names}
                target = Path(save_directory)
                saved = stack.enter_context(
                    CheckpointWriter(model, target, meta, tensors.has_checksums, kwargs)
                )
        for names in steps:
            with groups.fail_together(group):
                # What is not sharded, rank 0 has itself.
                own = names if group.rank == 0 else [name for name in names if name in tensors.specs]
                local = {name: tensors.local(name).detach().cpu() for name in own}
                receiver = _Receiver(local, tensors.specs, group) if group.rank == 0 else None
            if receiver is not None:
                groups.communicate(group, receiver.receive)
            else:
                groups.communicate(group, functools.partial(_send, local, group))
            with groups.fail_together(group):
                if receiver is not None:
                    saved.put(receiver.whole())
            del local, receiver
        with groups.fail_together(group):
            if group.rank == 0:
                saved.close()


class _Receiver:
    """Receives tensors on rank 0. All memory is allocated before others send, so that no rank waits in vain.

    Args:
        local: Its own shards, and what is not sharded.
    """

    def __init__(self, local: dict[str, Tensor], specs: dict[str, ShardSpec], group: Group) -> None:
        self._local, self._group = local, group
        self._specs = {name: specs[name] for name in local if name in specs}
        self._held = {name: spec.empty_global(local[name]) for name, spec in self._specs.items()}
        sizes = [self._part_size(name, rank) for name in self._specs for rank in range(1, group.size)]
        self._part = torch.empty(max(sizes, default=0), dtype=torch.uint8)

    def _part_size(self, name: str, rank: int) -> int:
        part = self._local[name]
        return math.prod(self._specs[name].local_shape(tuple(part.shape), rank)) * part.itemsize

    def receive(self) -> None:
        """Receive what the others send, in their order."""
        for name, spec in self._specs.items():
            own, held = self._local[name], self._held[name]
            copy_shard(held, own, spec.dim, spec.ranges[0])
            for rank in range(1, self._group.size):
                bytes_ = self._part[: self._part_size(name, rank)]
                dist.recv(bytes_, rank, group=groups.process_group(self._group))
                part = bytes_.view(own.dtype).view(spec.local_shape(tuple(own.shape), rank))
                copy_shard(held, part, spec.dim, spec.ranges[rank])

    def whole(self) -> dict[str, Tensor]:
        """All tensors, as they are saved."""
        return {
            name: self._specs[name].without_repeats(self._held[name]) if name in self._specs else own
            for name, own in self._local.items()
        }


def _send(parts: dict[str, Tensor], group: Group) -> None:
    for part in parts.values():
        dist.send(_bytes(part), 0, group=groups.process_group(group))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _steps(model: Any, tensors: Tensors) -> list[list[str]]:
    """Parameters grouped by the tensor of the checkpoint that they are converted to."""
    from transformers.core_model_loading import WeightConverter, apply_converters
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    state = {name: value for name, value in tensors.plain.items() if name not in ignored}
    reverse = [each.reverse_transform() for each in reversed(_conversions(model))]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    found: dict[str, list[str]] = {}
    kept = remove_tied_weights_from_state_dict(dict(state), model)
    for name in tensors.names:
        if name in kept or name not in tensors.plain:
            found.setdefault(apply_converters(name, converters)[0], []).append(name)
    return list(found.values())


def _conversions(model: Any) -> list[Any]:
    """What transformers did to the tensors of the checkpoint, as `revert_weight_conversion` finds it."""
    found = getattr(model, "_weight_conversions", None)
    if found is None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        found = get_model_conversion_mapping(model, add_legacy=False)
        found = [each for each in found if not isinstance(each, PrefixChange)]
    return found


class Tensors:
    """The tensors of a sharded model that are saved: this rank's shards, and the unsharded shapes.

    Attributes:
        names: Of all tensors, in the order of the model.
        plain: Those that are saved as they are; quantized weights are unpacked one by one.
        specs: How those that are sharded are.
        has_checksums: Whether files have checksums.
    """

    def __init__(self, model: Any, plan: ShardingPlan, rank: int) -> None:
        self.specs = sharded_specs(model, plan, rank)
        self.specs |= quantized.shard_specs_of(model)
        self._integers: dict[str, tuple[QuantizedLayer, str]] = {}
        self.has_checksums = bool(quantized.modules_of(model))
        if not self.has_checksums:
            self.plain: dict[str, Tensor] = model.state_dict()
            self.names = list(self.plain)
            return
        self.plain, self.names = {}, []
        for name, module in model.named_modules(remove_duplicate=False):
            self._add(f"{name}." if name else "", module)

    def _add(self, prefix: str, module: Any) -> None:
        """As `state_dict` does, which would unpack all quantized weights at once."""
        found: dict[str, Tensor] = {}
        if not isinstance(module, QuantizedLayer):
            module._save_to_state_dict(found, prefix, False)
        else:
            bias = module._parameters.get("bias")
            found.update({f"{prefix}bias": bias.detach()} if bias is not None else {})
            kept = [part for part in _BUFFERS if getattr(module, part) is not None]
            self._integers |= {f"{prefix}{part}": (module, part) for part in kept}
            self.names += [f"{prefix}{part}" for part in kept]
        self.plain |= found
        self.names += list(found)

    def local(self, name: str) -> Tensor:
        """This rank's shard, or the whole tensor."""
        if name in self.plain:
            return self.plain[name]
        module, part = self._integers[name]
        return module.columns if part == "columns" else module.unpacked().tensors()[part]

    def on_meta(self, name: str) -> Tensor:
        """The unsharded tensor, on the meta device."""
        if name in self.plain:
            shape, dtype = tuple(self.plain[name].shape), self.plain[name].dtype
        else:
            module, part = self._integers[name]
            shape, dtype = module.scheme.buffer_specs(module.out_features, module.in_features)[part]
        spec = self.specs.get(name)
        return torch.empty(spec.global_shape(shape) if spec else shape, dtype=dtype, device="meta")

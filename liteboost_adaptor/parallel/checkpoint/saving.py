"""``save_pretrained`` of a divided model: rank 0 puts the whole checkpoint together, tensor by tensor."""

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
from ...quantization.weights import QuantizedWeight
from ..runtime import groups
from ..runtime.groups import Group
from ..runtime.mesh import Mesh
from ..tensor import quantized
from ..tensor.plan import Plan
from ..tensor.shard_spec import Share, put
from .checkpoint_writer import Saved

#: Of integers.
_BUFFERS = ("weight", "scales", "zero_points", "columns")
_REFUSED = ("state_dict", "push_to_hub", "distributed_checkpoint")


def save(model: Any, plan: Plan, mesh: Mesh, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
    """What ``save_pretrained`` of the undivided model would write. Every rank calls it; rank 0 writes.

    Ranks whose parts the first ones have as well only wait.

    The files get their names when all of them are written. One tensor, or those that are one in the
    checkpoint, is in memory at a time.

    Raises:
        ParallelError: An argument that needs the whole model in one process; a rank that fails.
    """
    refused = [name for name in _REFUSED if kwargs.get(name)]
    if refused:
        raise ParallelError(
            f"{refused[0]} of save_pretrained needs the whole model in one process, and this {plan.model} is "
            f"divided over {mesh.tensor.size}. Save it to a folder, and go on from there."
        )
    with groups.together(mesh.world):
        if mesh.is_first:
            _save(model, plan, mesh.tensor, save_directory, kwargs)


def save_whole(model: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> None:
    """``save_pretrained`` of a model that every rank holds whole. Every rank calls it; rank 0 writes.

    Raises:
        ParallelError: On the others, where rank 0 has failed.
    """
    with groups.together(mesh.world):
        if mesh.is_first:
            type(model).save_pretrained(model, *args, **kwargs)


def _save(
    model: Any, plan: Plan, group: Group, save_directory: str | os.PathLike[str], kwargs: dict[str, Any]
) -> None:
    """Step by step on all ranks: where one fails, no other is left waiting for a tensor of it."""
    with contextlib.ExitStack() as stack:
        with groups.together(group):
            tensors = Tensors(model, plan)
            steps = _steps(model, tensors) if group.rank == 0 else []
        steps = groups.gathered(group, steps)[0]
        with groups.together(group):
            if group.rank == 0:
                meta = {name: tensors.on_meta(name) for names in steps for name in names}
                target = Path(save_directory)
                saved = stack.enter_context(Saved(model, target, meta, tensors.has_checksums, kwargs))
        for names in steps:
            with groups.together(group):
                # What is not divided, rank 0 may have alone.
                own = names if group.rank == 0 else [name for name in names if name in tensors.shares]
                local = {name: tensors.local(name).detach().cpu() for name in own}
                receiver = _Receiver(local, tensors.shares, group) if group.rank == 0 else None
            if receiver is not None:
                groups.talk(group, receiver.receive)
            else:
                groups.talk(group, functools.partial(_send, local, group))
            with groups.together(group):
                if receiver is not None:
                    saved.put(receiver.whole())
            del local, receiver
        with groups.together(group):
            if group.rank == 0:
                saved.close()


class _Receiver:
    """Rank 0's of some tensors. All memory is there before others send: no rank waits for one that has none.

    Args:
        local: Its own parts, and what is not divided.
    """

    def __init__(self, local: dict[str, Tensor], shares: dict[str, Share], group: Group) -> None:
        self._local, self._group = local, group
        self._shares = {name: shares[name] for name in local if name in shares}
        self._held = {name: share.room(local[name]) for name, share in self._shares.items()}
        sizes = [self._part_size(name, rank) for name in self._shares for rank in range(1, group.size)]
        self._part = torch.empty(max(sizes, default=0), dtype=torch.uint8)

    def _part_size(self, name: str, rank: int) -> int:
        part = self._local[name]
        return math.prod(self._shares[name].shape(tuple(part.shape), rank)) * part.itemsize

    def receive(self) -> None:
        """What the others send, in their order."""
        for name, share in self._shares.items():
            own, held = self._local[name], self._held[name]
            put(held, own, share.dim, share.ranges[0])
            for rank in range(1, self._group.size):
                bytes_ = self._part[: self._part_size(name, rank)]
                dist.recv(bytes_, rank, group=groups.process_group(self._group))
                part = bytes_.view(own.dtype).view(share.shape(tuple(own.shape), rank))
                put(held, part, share.dim, share.ranges[rank])

    def whole(self) -> dict[str, Tensor]:
        """All tensors, as they are saved."""
        return {
            name: self._shares[name].folded(self._held[name]) if name in self._shares else own
            for name, own in self._local.items()
        }


def _send(parts: dict[str, Tensor], group: Group) -> None:
    for part in parts.values():
        dist.send(_bytes(part), 0, group=groups.process_group(group))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _steps(model: Any, tensors: Tensors) -> list[list[str]]:
    """The parameters by what becomes of them in the checkpoint: those that are put together are together."""
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
    """What is saved of a divided model, as this rank holds it and as the ranks hold it together.

    Attributes:
        names: Of all tensors, in the order of the model.
        plain: Those that are saved as they are kept; integers are laid out in turn.
        shares: How those that are divided are.
        has_checksums: Whether files say what is in them.
    """

    def __init__(self, model: Any, plan: Plan) -> None:
        self.shares = {name: Share.of(cut, plan.world_size) for name, cut in plan.cuts.items()}
        self.shares |= quantized.shares_of(model)
        self._integers: dict[str, tuple[QuantizedWeight, str]] = {}
        self.has_checksums = bool(quantized.modules_of(model))
        if not self.has_checksums:
            self.plain: dict[str, Tensor] = model.state_dict()
            self.names = list(self.plain)
            return
        self.plain, self.names = {}, []
        for name, module in model.named_modules(remove_duplicate=False):
            self._add(f"{name}." if name else "", module)

    def _add(self, prefix: str, module: Any) -> None:
        """As `state_dict` does, which would lay all integers out at once."""
        found: dict[str, Tensor] = {}
        if not isinstance(module, QuantizedWeight):
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
        """What this rank holds."""
        if name in self.plain:
            return self.plain[name]
        module, part = self._integers[name]
        return module.columns if part == "columns" else module.saved().tensors()[part]

    def on_meta(self, name: str) -> Tensor:
        """The whole tensor, without its values."""
        if name in self.plain:
            shape, dtype = tuple(self.plain[name].shape), self.plain[name].dtype
        else:
            module, part = self._integers[name]
            shape, dtype = module.scheme.shapes(module.out_features, module.in_features)[part]
        share = self.shares.get(name)
        return torch.empty(share.whole_shape(shape) if share else shape, dtype=dtype, device="meta")

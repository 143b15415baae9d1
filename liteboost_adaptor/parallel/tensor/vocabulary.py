"""Vocabulary parallelism: which embeddings and heads are sharded by rows of the vocabulary."""

from __future__ import annotations

from torch import nn

from . import source_checks
from .layout_builder import LayoutBuilder
from .plan import EMBEDDING, HEAD, DimSharding, Role, Segment


def shard_vocabulary(builder: LayoutBuilder, model: nn.Module) -> None:
    """Shard the input embedding and the output layer of ``model`` where they are of known types.

    Modules that share a weight (encoder, decoder and output layer of BART) are sharded together or not.
    """
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    weights = {id(part.weight): part.weight for part in (embedding, head) if part is not None}
    for weight in weights.values():
        holders = {
            name: module
            for name, module in builder.modules.items()
            if any(each is weight for each in module._parameters.values())
        }
        reason = next((why for each in holders.items() if (why := _why_whole(builder, *each, head))), "")
        for name, module in holders.items():
            if reason:
                builder.replicate(name, reason)
            else:
                _shard_rows(builder, name, module, HEAD if module is head else EMBEDDING)


def _shard_rows(builder: LayoutBuilder, name: str, module: nn.Module, role: Role) -> None:
    rows = module.weight.shape[0]  # type: ignore[union-attr]
    builder.shard(f"{name}.weight", DimSharding(0, (Segment(rows, rows),)))
    if getattr(module, "bias", None) is not None:
        builder.shard(f"{name}.bias", DimSharding(0, (Segment(rows, rows),)))
    builder.set_role(name, role)
    builder.require(name, "rows of the vocabulary", rows, least=True)


def _part(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        found = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(getattr(found, "weight", None), nn.Parameter) else None


def _why_whole(builder: LayoutBuilder, name: str, module: nn.Module, head: nn.Module | None) -> str:
    """Why what holds a weight of the vocabulary cannot hold a shard of it."""
    if module is head:
        if type(module) is not nn.Linear:
            return f"{type(module).__name__} is no plain linear layer"
        return _why_bias_read(builder, module) or _why_read(builder, module)
    if builder.styles.get(name) == "replicate":
        return "the model's own plan keeps it whole"
    if (
        not isinstance(module, nn.Embedding)
        or not source_checks.is_lookup(module)
        or module.max_norm is not None
    ):
        return f"{type(module).__name__} is no plain embedding"
    return _why_read(builder, module)


def _why_bias_read(builder: LayoutBuilder, head: nn.Linear) -> str:
    for module in builder.modules.values():
        names = {name for name, each in module._parameters.items() if each is head.bias and each is not None}
        if names and module is not head and source_checks.reads(module, names):
            return f"{type(module).__name__} reads its bias"
    return ""


def _why_read(builder: LayoutBuilder, module: nn.Module) -> str:
    for parent in builder.modules.values():
        for name, child in parent._modules.items():
            if child is module and (reason := source_checks.why_read(parent, (name,))):
                return reason
    return ""

"""Vocabulary parallelism: which embeddings and heads are sharded by rows of the vocabulary."""

from __future__ import annotations

from torch import nn

from . import source_checks
from .layout_builder import LayoutBuilder
from .plan import EMBEDDING, HEAD, DimSharding, Segment


def shard_vocabulary(builder: LayoutBuilder, model: nn.Module) -> None:
    """Shard the input embedding and the output layer of ``model`` where they are of known types."""
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    names = {id(module): name for name, module in reversed(builder.modules.items())}
    cannot = {
        "embedding": _why_embedding_whole(builder, embedding, names),
        "head": _why_head_whole(builder, head, names),
    }
    is_tied = embedding is not None and head is not None and head.weight is embedding.weight
    if is_tied and any(cannot.values()):
        cannot = dict.fromkeys(cannot, cannot["embedding"] or cannot["head"])
    for part, module, role in (("embedding", embedding, EMBEDDING), ("head", head, HEAD)):
        if module is None or id(module) not in names:
            continue
        name = names[id(module)]
        if cannot[part]:
            builder.replicate(name, cannot[part])
            continue
        rows = module.weight.shape[0]
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


def _why_embedding_whole(builder: LayoutBuilder, module: nn.Module | None, names: dict[int, str]) -> str:
    if module is None or id(module) not in names:
        return ""
    if builder.styles.get(names[id(module)]) == "replicate":
        return "the model's own plan keeps it whole"
    if (
        not isinstance(module, nn.Embedding)
        or not source_checks.is_lookup(module)
        or module.max_norm is not None
    ):
        return f"{type(module).__name__} is no plain embedding"
    return _why_read(builder, module)


def _why_head_whole(builder: LayoutBuilder, module: nn.Module | None, names: dict[int, str]) -> str:
    if module is None or id(module) not in names:
        return ""
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is no plain linear layer"
    return _why_read(builder, module)


def _why_read(builder: LayoutBuilder, module: nn.Module) -> str:
    for parent in builder.modules.values():
        for name, child in parent._modules.items():
            if child is module and (reason := source_checks.why_read(parent, (name,))):
                return reason
    return ""

"""Embedding and head: divided by the rows of the vocabulary."""

from __future__ import annotations

from torch import nn

from . import source_checks
from .layout_builder import Parts
from .plan import EMBEDDING, HEAD, Cut, Part


def recognise(parts: Parts, model: nn.Module) -> None:
    """Divide the input embedding and the output layer of ``model``, where they are plain."""
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    names = {id(module): name for name, module in reversed(parts.modules.items())}
    cannot = {
        "embedding": _why_embedding_whole(parts, embedding, names),
        "head": _why_head_whole(parts, head, names),
    }
    is_tied = embedding is not None and head is not None and head.weight is embedding.weight
    if is_tied and any(cannot.values()):
        cannot = dict.fromkeys(cannot, cannot["embedding"] or cannot["head"])
    for part, module, role in (("embedding", embedding, EMBEDDING), ("head", head, HEAD)):
        if module is None or id(module) not in names:
            continue
        name = names[id(module)]
        if cannot[part]:
            parts.whole(name, cannot[part])
            continue
        rows = module.weight.shape[0]
        parts.cut(f"{name}.weight", Cut(0, (Part(rows, rows),)))
        if getattr(module, "bias", None) is not None:
            parts.cut(f"{name}.bias", Cut(0, (Part(rows, rows),)))
        parts.role(name, role)
        parts.need(name, "rows of the vocabulary", rows, least=True)


def _part(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        found = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(getattr(found, "weight", None), nn.Parameter) else None


def _why_embedding_whole(parts: Parts, module: nn.Module | None, names: dict[int, str]) -> str:
    if module is None or id(module) not in names:
        return ""
    if parts.styles.get(names[id(module)]) == "replicate":
        return "the model's own plan keeps it whole"
    if (
        not isinstance(module, nn.Embedding)
        or not source_checks.is_lookup(module)
        or module.max_norm is not None
    ):
        return f"{type(module).__name__} is no plain embedding"
    return _why_read(parts, module)


def _why_head_whole(parts: Parts, module: nn.Module | None, names: dict[int, str]) -> str:
    if module is None or id(module) not in names:
        return ""
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is no plain linear layer"
    return _why_read(parts, module)


def _why_read(parts: Parts, module: nn.Module) -> str:
    for parent in parts.modules.values():
        for name, child in parent._modules.items():
            if child is module and (reason := source_checks.why_read(parent, (name,))):
                return reason
    return ""

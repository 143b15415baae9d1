"""What a decode step of a loaded model reads of its weights, by the part of the model they are in."""

from __future__ import annotations

import torch

from ..errors import ConfigError

#: Part -> what names of its modules contain.
_PARTS = {"attention": ("attn", "attention"), "MLP": ("mlp", "feed_forward", "ffn")}


def token_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of every tensor that a decode step reads, integers and their scales as they are kept.

    Args:
        model: A dense causal language model. Of an embedding that is not also the head, a step needs one row.

    Returns:
        ``attention``, ``MLP``, ``head``, ``embedding`` and ``other``, those that are not empty.

    Raises:
        ConfigError: The model routes tokens to experts, so not every weight is read.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    found = dict.fromkeys((*_PARTS, "head", "embedding", "other"), 0)
    seen: set[int] = set()
    for name, module in model.named_modules():
        if "experts" in name.split("."):
            raise ConfigError("quantized variants are measured on dense models only; choose another --arch")
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or id(tensor) in seen or module is embedding:
                continue
            seen.add(id(tensor))
            found[_part(name, module is head)] += tensor.nbytes
    row = embedding.weight[0].nbytes if head is None or embedding.weight is not head.weight else 0
    found["embedding"] = row
    return {part: nbytes for part, nbytes in found.items() if nbytes}


def _part(name: str, is_head: bool) -> str:
    if is_head:
        return "head"
    return next((part for part, words in _PARTS.items() if any(word in name for word in words)), "other")

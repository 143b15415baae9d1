"""Layers whose weight a model's code reads beside calling them: integers in its place would be misread.

As in ``self.lm_head(x.to(self.lm_head.weight.dtype))`` (Mamba), or ``self.dt_proj.weight @ time_step``.
"""

from __future__ import annotations

import ast
import functools

import torch

from ..huggingface.class_code import methods

#: Methods that run before weights are loaded, or where there is a GPU.
_ELSEWHERE = ("__init__", "_init_", "init_weights", "reset_", "tie_weights", "_tie", "resize_", "prune_")
_CUDA = "cuda"


def read_weights(model: torch.nn.Module) -> set[str]:
    """Names of the layers of ``model`` whose ``weight`` its code reads."""
    modules = dict(model.named_modules())
    found: set[str] = set()
    for name, module in modules.items():
        for root, path in _reads(type(module)):
            if root == "self":
                found.add(f"{name}.{path}" if name else path)
            else:  # a block of a loop, say: whatever has such a child
                found |= {each for each in modules if f".{each}".endswith(f".{path}")}
    return found & set(modules)


@functools.cache
def _reads(cls: type) -> frozenset[tuple[str, str]]:
    """(variable, path of a child) of each ``variable.path.weight`` in the methods of a class."""
    found = set()
    for name, method in methods(cls).items():
        if name.startswith(_ELSEWHERE) or _CUDA in name:
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and node.attr == "weight":
                root, path = _path(node.value)
                if path:
                    found.add((root, path))
    return frozenset(found)


def _path(node: ast.AST) -> tuple[str, str]:
    """``("x", "a.b")`` of ``x.a.b``; an empty path of anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, ".".join(reversed(names))) if isinstance(node, ast.Name) else ("", "")

"""The methods of a model's classes as their source has them."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap

import torch

from ..engine import source

#: Of models in general: they know no child by its name.
_GENERAL = (
    *("torch", "builtins"),
    *("transformers.modeling_utils", "transformers.generation", "transformers.utils"),
)

#: How Falcon writes ``nn.Linear.forward``.
_PRODUCT = (
    "hidden_states = input @ self.weight.T",
    "if self.bias is None:\n    return hidden_states",
    "return hidden_states + self.bias",
)


@functools.cache
def methods(cls: type) -> dict[str, ast.FunctionDef]:
    """Functions of a class and its bases, but for general ones; empty where there is no source."""
    found: dict[str, ast.FunctionDef] = {}
    for base in cls.__mro__:
        if f"{base.__module__}.".startswith(tuple(f"{name}." for name in _GENERAL)):
            continue
        definition = _classes(base.__module__).get(base.__qualname__) or _definition(base)
        for node in definition.body if definition is not None else ():
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, node)
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes at the top of a module, from one reading of its file."""
    try:
        tree = source.tree_of(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _definition(cls: type) -> ast.ClassDef | None:
    try:
        with source.parsing:  # inspect parses, too: it looks for the class in its file
            tree = source.tree_of(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree.body[0] if isinstance(tree.body[0], ast.ClassDef) else None


def is_product(cls: type) -> bool:
    """Whether a subclass of ``torch.nn.Linear`` computes what that does, in other words."""
    if not issubclass(cls, torch.nn.Linear) or cls is torch.nn.Linear or set(methods(cls)) != {"forward"}:
        return False
    return tuple(map(ast.unparse, methods(cls)["forward"].body)) == _PRODUCT

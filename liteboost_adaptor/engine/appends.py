"""Reroute how a method appends to a tensor it keeps: ``torch.cat([self.x, new], dim=d)``.

Appending by concatenation copies everything kept so far; what takes its place may write behind it. As in
`rewrite`, everything else of the method stays as its author wrote it.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable
from typing import Any

import torch

from . import source
from .rewrite import build, rewrap


def reroute_appends(
    method: Any, append: Callable[[Any, Any, str, Any, int], Any]
) -> tuple[types.FunctionType, frozenset[str]] | None:
    """A copy of ``method`` in which ``append(self.x, self, "x", new, d)`` stands for each such concatenation.

    Returns:
        The copy, and the names of what it appends to; ``None`` when there is nothing.

    Raises:
        SourceUnavailable: The method cannot be rewritten soundly; the message says why.
    """
    parsed = source.parse(source.innermost(method))
    if not parsed.node.args.args or parsed.function.__globals__.get("torch") is not torch:
        return None
    editor = _Editor(parsed)
    node = editor.visit(copy.deepcopy(parsed.node))
    if not editor.found:
        return None
    if editor.rebinds:
        raise source.SourceUnavailable(f"assigns to {editor.rebinds}")
    return rewrap(method, build(node, parsed, {_APPEND: append})), frozenset(editor.found)


_APPEND = "__liteboost_append__"


class _Editor(ast.NodeTransformer):
    def __init__(self, parsed: source.Source) -> None:
        self.self_name = parsed.node.args.args[0].arg
        self.found: set[str] = set()
        self.rebinds = ""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in (self.self_name, "torch") and not isinstance(node.ctx, ast.Load):
            self.rebinds = node.id
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        kept = self._kept(node)
        if not kept:
            return node
        held, new, dim = kept
        self.found.add(held.attr)
        arguments = [
            held,
            ast.Name(id=self.self_name, ctx=ast.Load()),
            ast.Constant(value=held.attr),
            new,
            ast.Constant(value=dim),
        ]
        function = ast.Name(id=_APPEND, ctx=ast.Load())
        made = ast.Call(func=function, args=arguments, keywords=[])
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def _kept(self, node: ast.Call) -> tuple[ast.Attribute, ast.expr, int] | None:
        """(self.x, new, d) of ``torch.cat([self.x, new], dim=d)``."""
        if ast.unparse(node.func) != "torch.cat" or len(node.args) != 1 or len(node.keywords) != 1:
            return None
        parts, keyword = node.args[0], node.keywords[0]
        if not isinstance(parts, ast.List) or len(parts.elts) != 2 or keyword.arg != "dim":
            return None
        first, new = parts.elts
        if not isinstance(first, ast.Attribute) or not isinstance(first.value, ast.Name):
            return None
        if first.value.id != self.self_name or isinstance(new, ast.Starred):
            return None
        try:
            dim = ast.literal_eval(keyword.value)
        except ValueError:
            return None
        return (first, new, dim) if type(dim) is int else None

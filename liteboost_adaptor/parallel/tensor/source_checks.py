"""Whether a module can be sharded, decided conservatively from its source code."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

import torch
from torch import nn

from ...huggingface.class_code import methods as _methods

#: Channelwise functions and methods.
_CHANNELWISE = {
    *("gelu", "silu", "relu", "relu2", "sigmoid", "tanh", "clamp", "dropout", "mul", "pow", "square"),
    *("to", "type", "float", "contiguous", "type_as"),
    *("getattr", "isinstance", "len"),
}
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation", "torch.nn.modules.dropout")
#: Methods that run before a model is sharded, or that are not called on a sharded one.
_SET_UP = ("__init__", "_init_", "init_weights", "reset_", "tie_weights", "_tie", "resize_", "set_", "prune_")
_HARMLESS_READS = ("dtype", "device")


#: Arguments of experts: tokens, and for each its experts and their weights.
ROUTED = ("hidden_states", "top_k_index", "top_k_weights")


def path_of(node: ast.AST) -> str:
    """``a.b`` for ``self.a.b``, else an empty string."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else ""


def forward_of(module: nn.Module) -> ast.FunctionDef | None:
    """The definition of ``forward``, or None where its source is not there."""
    return _methods(type(module)).get("forward")


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def why_read(module: nn.Module, children: tuple[str, ...]) -> str:
    """Why children cannot be sharded: the code reads their weights, beside calling them."""
    methods = _methods(type(module))
    if "forward" not in methods:
        return f"the source of {type(module).__name__}.forward is not there"
    for name, method in methods.items():
        if name.startswith(_SET_UP):
            continue
        for node in ast.walk(method):
            if not isinstance(node, ast.Attribute) or node.attr not in ("weight", "bias"):
                continue
            if path_of(node.value) in children and not _is_harmless(node, method):
                return f"{name} reads {path_of(node)}"
    return ""


def why_replaced(parent: nn.Module, child: str) -> str:
    """Why a child cannot be sharded: its parent replaces it, depending on the configuration."""
    for name, method in _methods(type(parent)).items():
        for node in ast.walk(method) if name != "__init__" else ():
            if isinstance(node, ast.Assign) and any(path_of(target) == child for target in node.targets):
                return f"{name} replaces it"
    return ""


def _is_harmless(read: ast.Attribute, method: ast.FunctionDef) -> bool:
    """Whether only the dtype or the device of what is read is asked for."""
    return any(
        isinstance(node, ast.Attribute) and node.value is read and node.attr in _HARMLESS_READS
        for node in ast.walk(method)
    )


def why_input_width(module: nn.Module) -> str:
    """Why attention cannot be sharded: ``forward`` shapes its result by the width of its input."""
    forward = _methods(type(module)).get("forward")
    nodes = list(ast.walk(forward)) if forward is not None else []
    widths = {
        target.elts[-1].id
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple)
        and len(target.elts) == 3
        and isinstance(target.elts[-1], ast.Name)
        and ast.unparse(node.value).endswith((".size()", ".shape"))
    }
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            used = {name.id for value in node.args for name in ast.walk(value) if isinstance(name, ast.Name)}
            if node.func.attr in ("view", "reshape") and used & widths:
                return f"forward calls {ast.unparse(node)}"
    return ""


def config_reads(module: nn.Module) -> set[str]:
    """What ``forward`` asks the configuration for."""
    forward = _methods(type(module)).get("forward")
    found = (
        {path_of(node) for node in ast.walk(forward) if isinstance(node, ast.Attribute)} if forward else set()
    )
    return {path.removeprefix("config.") for path in found if path.startswith("config.")}


def is_of_result(module: nn.Module, norm: str, layer: str) -> bool:
    """Whether ``forward`` calls child ``norm`` on what child ``layer`` returns."""
    forward = _methods(type(module)).get("forward")
    for call in _calls(forward) if forward is not None else ():
        if path_of(call.func) != norm or len(call.args) != 1:
            continue
        if _mentions(call.args[0], (layer,)):
            return True
        variable = ast.unparse(call.args[0])
        before = [
            node
            for node in ast.walk(forward)
            if isinstance(node, ast.Assign)
            and node.lineno < call.lineno
            and any(ast.unparse(target) == variable for target in node.targets)
        ]
        last = max(before, key=lambda node: node.lineno, default=None)
        return last is not None and _mentions(last.value, (layer,))
    return False


def why_not_channelwise(module: nn.Module, wide: tuple[str, ...], narrow: str) -> str:
    """Why an MLP cannot be sharded: the code between its layers is not channelwise."""
    if "." in narrow:  # BERT: each layer in a module of its own, which begins or ends with it
        first = _named(module, wide[0].rpartition(".")[0])
        second = _named(module, narrow.rpartition(".")[0])
        return _why_not_plain(first, "dense") or _why_not_begins(second, "dense")
    reason = why_read(module, (*wide, narrow))
    if reason:
        return reason
    for method in _methods(type(module)).values():
        statements = [
            index
            for index, node in enumerate(method.body)
            if _mentions(node, wide) or _mentions(node, (narrow,))
        ]
        if not any(_mentions(node, (narrow,)) for node in method.body) or method.name == "__init__":
            continue
        if not any(_mentions(node, wide) for node in method.body):
            return f"{narrow} is called in another method than {wide[0]}"
        between = method.body[statements[0] : statements[-1] + 1]
        return next((why for node in between if (why := _why_not(module, node, (*wide, narrow)))), "")
    return f"no method calls {narrow}"


def _named(module: nn.Module, path: str) -> nn.Module:
    return module.get_submodule(path)


def _mentions(node: ast.AST, children: tuple[str, ...]) -> bool:
    return any(path_of(call.func) in children for call in _calls(node))


def _why_not(module: nn.Module, node: ast.AST, children: tuple[str, ...]) -> str:
    """Why a statement is not channelwise."""
    if isinstance(node, (ast.For, ast.While, ast.With, ast.Try)):
        return "a loop or a block between its layers"
    for part in ast.walk(node):
        if isinstance(part, (ast.Subscript, ast.Lambda, ast.MatMult)):
            return f"{ast.unparse(part)} between its layers"
    for call in _calls(node):
        path = path_of(call.func)
        if path in children or (path and _is_activation(getattr(module, path, None))):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        halves = name == "chunk" and [ast.unparse(value) for value in call.args[:1]] == ["2"]
        if path or not (name in _CHANNELWISE or halves):
            return f"{ast.unparse(call.func)} between its layers"
    return ""


def _is_activation(value: object) -> bool:
    if isinstance(value, nn.Module):
        return type(value).__module__ in _ACTIVATIONS and not any(p.ndim > 1 for p in value.parameters())
    return getattr(value, "__module__", "") in ("torch._C._nn", "torch.nn.functional", "torch") or value in (
        torch.nn.functional.gelu,
        torch.nn.functional.relu,
        torch.nn.functional.silu,
        torch.tanh,
    )


def _why_not_plain(module: nn.Module, layer: str) -> str:
    """Why a module is not one linear layer with an activation behind it."""
    forward = _methods(type(module)).get("forward")
    if forward is None:
        return "its source is not there"
    return next((why for node in forward.body if (why := _why_not(module, node, (layer,)))), "")


def _why_not_begins(module: nn.Module, layer: str) -> str:
    """Why a module does not begin with a linear layer on its first argument."""
    forward = _methods(type(module)).get("forward")
    first = forward.body[0] if forward is not None else None
    if isinstance(first, ast.Assign) and isinstance(first.value, ast.Call):
        call = first.value
        argument = forward.args.args[1].arg
        if path_of(call.func) == layer and [ast.unparse(value) for value in call.args] == [argument]:
            return why_read(module, (layer,))
    return f"{type(module).__name__} does not begin with {layer}"


def why_gate_not_channelwise(module: nn.Module) -> str:
    """Why the gate of experts cannot be sharded with their channels."""
    gate = _methods(type(module)).get("_apply_gate")
    if gate is None:  # the library's own: act(gate) * up, of two halves
        act = getattr(module, "act_fn", None)
        return (
            "" if act is None or _is_activation(act) else f"the activation {type(act).__name__} is not known"
        )
    for node in ast.walk(gate):
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) not in (
            "(..., slice(None, None, 2))",
        ):
            text = ast.unparse(node.slice)
            if text not in ("..., ::2", "..., 1::2", "(..., ::2)", "(..., 1::2)"):
                return f"{ast.unparse(node)} in its gate"
    for call in _calls(gate):
        path = path_of(call.func)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in _CHANNELWISE or name == "chunk" or (path and _is_activation(getattr(module, path, None))):
            continue
        return f"{ast.unparse(call.func)} in its gate"
    return ""


def supports_expert_parallel(module: nn.Module) -> bool:
    """Whether experts take the index ``num_experts`` for an expert of another rank, as transformers does."""
    forward = _methods(type(module)).get("forward")
    if forward is None or [each.arg for each in forward.args.args[1:]] != list(ROUTED):
        return False
    return "num_classes=self.num_experts + 1" in ast.unparse(forward)


def reads(module: nn.Module, attributes: Collection[str]) -> bool:
    """Whether the code of ``module`` reads one of its ``attributes`` once made; also if it is not there."""
    methods = _methods(type(module))
    return not methods or any(
        isinstance(node, ast.Attribute) and path_of(node) in attributes
        for name, method in methods.items()
        if not name.startswith(_SET_UP)
        for node in ast.walk(method)
    )


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is a root mean square norm whose only parameter is its weight."""
    names = [name for name, value in module.named_parameters() if value is not None]
    return names == ["weight"] and "RMSNorm" in type(module).__name__


def is_lookup(module: nn.Module) -> bool:
    """Whether an embedding returns rows of its weight, times a number where its class says so."""
    if type(module).forward is nn.Embedding.forward:
        return True
    if not isinstance(module, nn.Embedding):
        return False
    forward = _methods(type(module)).get("forward")
    body = [node for node in forward.body if not _is_docstring(node)] if forward is not None else []
    if len(body) != 1 or not isinstance(body[0], ast.Return) or not isinstance(body[0].value, ast.BinOp):
        return False
    product = body[0].value
    argument = forward.args.args[1].arg
    return (
        isinstance(product.op, ast.Mult)
        and ast.unparse(product.left) == f"super().forward({argument})"
        and ast.unparse(product.right).startswith("self.")
    )


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

"""Which attention modules can be divided by heads, and how."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

from torch import nn

from . import module_names, source_checks
from .layout_builder import Parts, is_linear, is_transposed
from .plan import NORM, SUM, Cut, Part


@dataclass(frozen=True)
class Heads:
    """How many heads, and how wide: of queries, of keys and values, of what the output projection reads."""

    query: int
    key_value: int
    query_width: int
    key_width: int
    value_width: int


class _Whole(Exception):
    """Why an attention module stays whole."""


def recognise(parts: Parts, name: str, module: nn.Module) -> None:
    """Divide ``module`` if it is attention of a known structure; note why not, if it is another one."""
    try:
        for latent in module_names.LATENT:
            found = [parts.child(name, child) for child in (*latent.wide, latent.output)]
            if all(found):
                _check_parent(parts, name)
                return _latent(parts, name, module, latent)
        for form in module_names.ATTENTION:
            needed = [child for child in (*form.projections, form.output) if child != form.value]
            if all(parts.child(name, child) for child in needed) and _has_value(parts, name, module, form):
                _check_parent(parts, name)
                return _divide(parts, name, module, form)
    except _Whole as reason:
        parts.whole(name, str(reason))
        for child in module.modules():
            parts.skip(child)
    return None


def _check_parent(parts: Parts, name: str) -> None:
    parent, _, child = name.rpartition(".")
    reason = source_checks.why_exchanged(parts.modules[parent], child) if name else ""
    if reason:
        raise _Whole(reason)


def _has_value(parts: Parts, name: str, module: nn.Module, form: module_names.Attention) -> bool:
    # Where values are the keys, the attribute is there and empty.
    return parts.child(name, form.value) is not None or form.value in module._modules


def _layer(parts: Parts, name: str, child: str) -> tuple[str, nn.Module]:
    full = parts.child(name, child)
    layer = parts.modules[full]
    if not is_linear(layer):
        raise _Whole(f"{child} is a {type(layer).__name__}")
    return full, layer


def _is_vouched(parts: Parts, layer: str) -> bool:
    """Whether the model's own plan divides this layer by heads, and so says that ``forward`` stands it."""
    return parts.styles.get(layer) == "colwise"


def _latent(parts: Parts, name: str, module: nn.Module, form: module_names.LatentAttention) -> None:
    layers = [_layer(parts, name, child) for child in form.wide]
    output_name, output = _layer(parts, name, form.output)
    kv_dim = getattr(module, "qk_nope_head_dim", 0) + getattr(module, "v_head_dim", 0)
    heads = parts.outputs(layers[-1][1]) // kv_dim if kv_dim else 0
    if not heads or any(parts.outputs(layer) % heads for _, layer in layers) or parts.inputs(output) % heads:
        raise _Whole("the number of heads is not known")
    vouched = all(_is_vouched(parts, layer) for layer, _ in layers)
    handled = {full for full, _ in layers} | {output_name}
    _check_code(module, (*form.wide, form.output))
    if not vouched:
        _count_attributes(parts, name, module, Heads(heads, heads, 0, 0, parts.inputs(output) // heads))
    extras = [full for full in _parameter_owners(parts, name) if full not in handled]
    _extras(parts, name, extras, heads, heads, vouched, _LATENT_EXTRAS)
    for full, layer in layers:
        parts.cut_outputs(full, (Part(parts.outputs(layer), heads),))
    parts.cut_inputs(output_name, (Part(parts.inputs(output), heads),))
    parts.role(output_name, SUM)
    parts.need(name, "attention heads", heads)


#: Styles of the model's own plan that leave what else an attention has whole, or divide it by heads.
_STYLES_OF_EXTRAS = (
    "colwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "local_params",
)
_LATENT_EXTRAS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")


def _divide(parts: Parts, name: str, module: nn.Module, form: module_names.Attention) -> None:
    layers = {
        child: _layer(parts, name, child)
        for child in form.projections
        if parts.child(name, child) is not None
    }
    output_name, output = _layer(parts, name, form.output)
    form = _as_fused(form, module)
    heads = _heads(parts, module, form, layers, parts.inputs(output))
    vouched = _is_vouched(parts, layers[form.query][0])
    _check_code(module, (*form.projections, *(() if form.output.startswith("../") else (form.output,))))
    handled = {full for full, _ in layers.values()} | {output_name}
    extras = [full for full in _parameter_owners(parts, name) if full not in handled]
    _extras(parts, name, extras, heads.query, heads.key_value, vouched, (), heads)
    for child, (full, layer) in layers.items():
        parts.cut_outputs(full, _pieces(form, child, parts.outputs(layer), heads))
    width = parts.inputs(output)
    parts.cut_inputs(output_name, (Part(width, heads.query),))
    parts.role(output_name, SUM)
    if not vouched:
        _count_attributes(parts, name, module, heads)
    for group in module_names.GROUPS:
        if vars(module).get(group) == heads.query // heads.key_value:
            parts.group(name, group, heads.query, heads.key_value)
    parts.need(name, "attention heads", heads.query)
    # Of a group, queries cannot be had without keys and values.
    is_repeatable = form.fused != "groups"
    parts.need(name, "heads of keys and values", heads.key_value, repeatable=is_repeatable)


def _as_fused(form: module_names.Attention, module: nn.Module) -> module_names.Attention:
    """``form`` as flags of ``module`` say that its projection is fused."""
    if form.fused == "heads":
        fused = next(
            (fused for flag, fused in module_names.FUSED_BY if vars(module).get(flag) is True), "heads"
        )
        return replace(form, fused=fused)
    return form


def _pieces(form: module_names.Attention, child: str, width: int, heads: Heads) -> tuple[Part, ...]:
    if form.fused == "parts":
        values = width - heads.query * heads.query_width - heads.key_value * heads.key_width
        return (
            Part(heads.query * heads.query_width, heads.query),
            Part(heads.key_value * heads.key_width, heads.key_value),
            Part(values, heads.key_value),
        )
    if form.fused == "heads":
        return (Part(width, heads.query),)
    if form.fused == "groups":
        return (Part(width, heads.key_value),)
    return (Part(width, heads.query if child == form.query else heads.key_value),)


def _attribute(module: nn.Module, known: tuple[str, ...]) -> int:
    return next((vars(module)[name] for name in known if type(vars(module).get(name)) is int), 0)


def _heads(
    parts: Parts,
    module: nn.Module,
    form: module_names.Attention,
    layers: dict[str, tuple[str, nn.Module]],
    output_width: int,
) -> Heads:
    """How many heads there are, by the widths of the layers and what the module says.

    Raises:
        _Whole: They do not agree.
    """
    dim = _attribute(module, module_names.HEAD_DIM)
    count = _attribute(module, module_names.HEADS)
    if not dim and count:
        dim = output_width // count
    if not dim or output_width % dim:
        raise _Whole("the size of a head is not known")
    if form.fused:
        return _fused_heads(
            form, layers[form.query][1], parts.outputs(layers[form.query][1]), output_width, dim
        )
    query_width = parts.outputs(layers[form.query][1])
    key_width = parts.outputs(layers[form.key][1])
    value_width = parts.outputs(layers[form.value][1]) if form.value in layers else key_width
    kv_heads = key_width // dim
    if not kv_heads or key_width % dim or value_width % kv_heads:
        raise _Whole("the projections of keys and values do not fit the size of a head")
    value_dim = value_width // kv_heads
    heads = output_width // value_dim
    if output_width % value_dim or query_width % heads or heads % kv_heads:
        raise _Whole("the projections do not fit together")
    if count and count != heads:
        raise _Whole(f"it says {count} heads, its layers {heads}")
    return Heads(heads, kv_heads, query_width // heads, dim, value_dim)


def _fused_heads(
    form: module_names.Attention, layer: nn.Module, width: int, output_width: int, dim: int
) -> Heads:
    heads = output_width // dim
    rest = width - output_width
    if form.query == "c_attn" and not is_transposed(layer):  # GPT-BigCode's has two layouts
        raise _Whole("the fused projection is of a form that is not known")
    if rest % 2 or rest // 2 % dim or (form.fused == "heads" and rest != 2 * output_width):
        raise _Whole("the fused projection is of a form that is not known")
    kv_heads = rest // 2 // dim
    if not kv_heads or heads % kv_heads:
        raise _Whole("the fused projection is of a form that is not known")
    return Heads(heads, kv_heads, dim, dim, dim)


def _parameter_owners(parts: Parts, name: str) -> list[str]:
    """Modules at and below ``name`` that have parameters of their own."""
    prefix = f"{name}."
    return [
        full
        for full, module in parts.modules.items()
        if (full == name or full.startswith(prefix)) and module._parameters
    ]


def _extras(
    parts: Parts,
    name: str,
    owners: list[str],
    heads: int,
    kv_heads: int,
    vouched: bool,
    known: tuple[str, ...],
    shape: Heads | None = None,
) -> None:
    """Decide what else an attention module holds: norms, sinks, gates.

    Raises:
        _Whole: Something is not known to be the same for every head.
    """
    todo = []
    for owner in owners:
        for local, parameter in parts.modules[owner]._parameters.items():
            if parameter is None:
                continue
            full = f"{owner}.{local}"
            cut = _extra(
                parts, name, owner, local, tuple(parameter.shape), heads, kv_heads, vouched, known, shape
            )
            if cut is not None:
                todo.append((full, owner, cut))
    for full, owner, (cut, role) in todo:
        parts.cut(full, cut)
        if role:
            parts.role(owner, role)


def _extra(
    parts: Parts,
    name: str,
    owner: str,
    local: str,
    size: tuple[int, ...],
    heads: int,
    kv_heads: int,
    vouched: bool,
    known: tuple[str, ...],
    shape: Heads | None,
) -> tuple[Cut, str] | None:
    """How one further parameter is divided; None where every rank has the whole of it."""
    child = owner[len(name) + 1 :]
    style = parts.styles.get(f"{owner}.{local}") or parts.styles.get(owner)
    if style is not None and style not in _STYLES_OF_EXTRAS and child not in module_names.HEAD_NORMS:
        raise _Whole(f"{child} is {style} in the model's own plan")
    if (style == "colwise" or local in module_names.SINKS) and size and size[0] % heads == 0:
        return Cut(0, (Part(size[0], heads),)), ""
    if child in module_names.HEAD_NORMS and shape is not None:
        count, width = (heads, shape.query_width) if child.startswith("q") else (kv_heads, shape.key_width)
        if size and size[-1] in (shape.query_width, shape.key_width, shape.value_width) and len(size) == 1:
            return None
        if size == (count, width):
            return Cut(0, (Part(count, count),)), ""
        is_over_heads = source_checks.is_of_result(parts.modules[name], child, _PROJECTION_OF.get(child, ""))
        if size == (count * width,) and is_over_heads and source_checks.is_rms_norm(parts.modules[owner]):
            return Cut(0, (Part(count * width, count),)), NORM
        raise _Whole(f"{child} is a norm over heads of a form that is not known")
    if vouched or child in known:
        return None
    raise _Whole(f"{child + '.' if child else ''}{local} is not known")


_PROJECTION_OF = {"q_norm": "q_proj", "k_norm": "k_proj", "v_norm": "v_proj"}


def _check_code(module: nn.Module, children: tuple[str, ...]) -> None:
    """Raise `_Whole` where ``forward`` holds something for each head that is not divided with the layers."""
    by_head = sorted(set(inspect.signature(type(module).forward).parameters) & set(module_names.BY_HEAD))
    settings = getattr(module, "config", None)
    # Falcon's configuration says whether there is one at all.
    by_head = [name for name in by_head if getattr(settings, name, None) is not False]
    if by_head:
        raise _Whole(f"forward takes {', '.join(by_head)}")
    reason = source_checks.why_read(module, children) or source_checks.why_input_width(module)
    if reason:
        raise _Whole(reason)
    unknown = sorted(
        name for name in source_checks.config_reads(module) if "head" in name and name not in _CONFIG_COUNTS
    )
    if unknown:
        raise _Whole(f"forward reads config.{unknown[0]}")


_CONFIG_COUNTS = {*module_names.HEADS, *module_names.KV_HEADS}


def _count_attributes(parts: Parts, name: str, module: nn.Module, heads: Heads) -> None:
    for attribute, value in vars(module).items():
        if type(value) is not int:
            continue
        if attribute in module_names.HEADS and value == heads.query:
            parts.count(name, attribute, value, heads.query)
        elif attribute in module_names.KV_HEADS and value == heads.key_value:
            parts.count(name, attribute, value, heads.key_value)
        elif attribute in module_names.WIDTHS and value == heads.query * heads.value_width:
            parts.count(name, attribute, value, heads.query)
    for asked in source_checks.config_reads(module) & _CONFIG_COUNTS:
        units = heads.query if asked in module_names.HEADS else heads.key_value
        parts.count(name, f"config.{asked}", units, units)

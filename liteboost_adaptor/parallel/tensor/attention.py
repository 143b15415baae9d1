"""Which attention modules can be sharded by heads, and how."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

from torch import nn

from . import module_names, source_checks
from .layout_builder import LayoutBuilder, is_linear, is_transposed
from .plan import NORM, ROWWISE, DimSharding, Segment


@dataclass(frozen=True)
class Heads:
    """How many heads, and how wide: of queries, of keys and values, of what the output projection reads."""

    query: int
    key_value: int
    query_width: int
    key_width: int
    value_width: int


class _NotShardable(Exception):
    """Why an attention module is replicated."""


def shard_attention(builder: LayoutBuilder, name: str, module: nn.Module) -> None:
    """Shard ``module`` if it is attention of a known structure; note why not, if it is another one."""
    try:
        for latent in module_names.LATENT:
            found = [builder.child(name, child) for child in (*latent.wide, latent.output)]
            if all(found):
                _check_parent(builder, name)
                return _shard_latent_attention(builder, name, module, latent)
        for form in module_names.ATTENTION:
            needed = [child for child in (*form.projections, form.output) if child != form.value]
            if all(builder.child(name, child) for child in needed) and _has_value(
                builder, name, module, form
            ):
                _check_parent(builder, name)
                return _shard_by_heads(builder, name, module, form)
    except _NotShardable as reason:
        builder.replicate(name, str(reason))
        for child in module.modules():
            builder.skip(child)
    return None


def _check_parent(builder: LayoutBuilder, name: str) -> None:
    parent, _, child = name.rpartition(".")
    reason = source_checks.why_replaced(builder.modules[parent], child) if name else ""
    if reason:
        raise _NotShardable(reason)


def _has_value(builder: LayoutBuilder, name: str, module: nn.Module, form: module_names.Attention) -> bool:
    # Where values are the keys, the attribute is there and empty.
    return builder.child(name, form.value) is not None or form.value in module._modules


def _layer(builder: LayoutBuilder, name: str, child: str) -> tuple[str, nn.Module]:
    full = builder.child(name, child)
    layer = builder.modules[full]
    if not is_linear(layer):
        raise _NotShardable(f"{child} is a {type(layer).__name__}")
    return full, layer


def _is_colwise_in_tp_plan(builder: LayoutBuilder, layer: str) -> bool:
    """Whether the model's own plan shards this layer by heads, so that its ``forward`` supports that."""
    return builder.styles.get(layer) == "colwise"


def _shard_latent_attention(
    builder: LayoutBuilder, name: str, module: nn.Module, form: module_names.LatentAttention
) -> None:
    layers = [_layer(builder, name, child) for child in form.wide]
    output_name, output = _layer(builder, name, form.output)
    kv_dim = getattr(module, "qk_nope_head_dim", 0) + getattr(module, "v_head_dim", 0)
    heads = builder.outputs(layers[-1][1]) // kv_dim if kv_dim else 0
    if (
        not heads
        or any(builder.outputs(layer) % heads for _, layer in layers)
        or builder.inputs(output) % heads
    ):
        raise _NotShardable("the number of heads is not known")
    in_tp_plan = all(_is_colwise_in_tp_plan(builder, layer) for layer, _ in layers)
    handled = {full for full, _ in layers} | {output_name}
    _check_code(module, (*form.wide, form.output))
    if not in_tp_plan:
        _count_attributes(builder, name, module, Heads(heads, heads, 0, 0, builder.inputs(output) // heads))
    others = [full for full in _parameter_owners(builder, name) if full not in handled]
    _shard_other_parameters(builder, name, others, heads, heads, in_tp_plan, _LATENT_OTHERS)
    for full, layer in layers:
        builder.shard_outputs(full, (Segment(builder.outputs(layer), heads),))
    builder.shard_inputs(output_name, (Segment(builder.inputs(output), heads),))
    builder.set_role(output_name, ROWWISE)
    builder.require(name, "attention heads", heads)


#: Styles of the model's own plan by which further parameters of attention are replicated or sharded by heads.
_STYLES_OF_OTHERS = (
    "colwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "local_params",
)
_LATENT_OTHERS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")


def _shard_by_heads(
    builder: LayoutBuilder, name: str, module: nn.Module, form: module_names.Attention
) -> None:
    layers = {
        child: _layer(builder, name, child)
        for child in form.projections
        if builder.child(name, child) is not None
    }
    output_name, output = _layer(builder, name, form.output)
    form = _as_fused(form, module)
    heads = _heads(builder, module, form, layers, builder.inputs(output))
    in_tp_plan = _is_colwise_in_tp_plan(builder, layers[form.query][0])
    _check_code(module, (*form.projections, *(() if form.output.startswith("../") else (form.output,))))
    handled = {full for full, _ in layers.values()} | {output_name}
    others = [full for full in _parameter_owners(builder, name) if full not in handled]
    _shard_other_parameters(builder, name, others, heads.query, heads.key_value, in_tp_plan, (), heads)
    for child, (full, layer) in layers.items():
        builder.shard_outputs(full, _pieces(form, child, builder.outputs(layer), heads))
    width = builder.inputs(output)
    builder.shard_inputs(output_name, (Segment(width, heads.query),))
    builder.set_role(output_name, ROWWISE)
    if not in_tp_plan:
        _count_attributes(builder, name, module, heads)
    for group in module_names.GROUPS:
        if vars(module).get(group) == heads.query // heads.key_value:
            builder.record_kv_groups(name, group, heads.query, heads.key_value)
    builder.require(name, "attention heads", heads.query)
    # Of a group, queries cannot be had without keys and values.
    is_repeatable = form.fused != "groups"
    builder.require(name, "heads of keys and values", heads.key_value, repeatable=is_repeatable)


def _as_fused(form: module_names.Attention, module: nn.Module) -> module_names.Attention:
    """``form`` as flags of ``module`` say that its projection is fused."""
    if form.fused == "heads":
        fused = next(
            (fused for flag, fused in module_names.FUSED_BY if vars(module).get(flag) is True), "heads"
        )
        return replace(form, fused=fused)
    return form


def _pieces(form: module_names.Attention, child: str, width: int, heads: Heads) -> tuple[Segment, ...]:
    if form.fused == "parts":
        values = width - heads.query * heads.query_width - heads.key_value * heads.key_width
        return (
            Segment(heads.query * heads.query_width, heads.query),
            Segment(heads.key_value * heads.key_width, heads.key_value),
            Segment(values, heads.key_value),
        )
    if form.fused == "heads":
        return (Segment(width, heads.query),)
    if form.fused == "groups":
        return (Segment(width, heads.key_value),)
    return (Segment(width, heads.query if child == form.query else heads.key_value),)


def _attribute(module: nn.Module, known: tuple[str, ...]) -> int:
    return next((vars(module)[name] for name in known if type(vars(module).get(name)) is int), 0)


def _heads(
    builder: LayoutBuilder,
    module: nn.Module,
    form: module_names.Attention,
    layers: dict[str, tuple[str, nn.Module]],
    output_width: int,
) -> Heads:
    """How many heads there are, by the widths of the layers and what the module says.

    Raises:
        _NotShardable: They do not agree.
    """
    dim = _attribute(module, module_names.HEAD_DIM)
    count = _attribute(module, module_names.HEADS)
    if not dim and count:
        dim = output_width // count
    if not dim or output_width % dim:
        raise _NotShardable("the size of a head is not known")
    if form.fused:
        return _fused_heads(
            form, layers[form.query][1], builder.outputs(layers[form.query][1]), output_width, dim
        )
    query_width = builder.outputs(layers[form.query][1])
    key_width = builder.outputs(layers[form.key][1])
    value_width = builder.outputs(layers[form.value][1]) if form.value in layers else key_width
    kv_heads = key_width // dim
    if not kv_heads or key_width % dim or value_width % kv_heads:
        raise _NotShardable("the projections of keys and values do not fit the size of a head")
    value_dim = value_width // kv_heads
    heads = output_width // value_dim
    if output_width % value_dim or query_width % heads or heads % kv_heads:
        raise _NotShardable("the projections do not fit together")
    if count and count != heads:
        raise _NotShardable(f"it says {count} heads, its layers {heads}")
    return Heads(heads, kv_heads, query_width // heads, dim, value_dim)


def _fused_heads(
    form: module_names.Attention, layer: nn.Module, width: int, output_width: int, dim: int
) -> Heads:
    heads = output_width // dim
    rest = width - output_width
    if form.query == "c_attn" and not is_transposed(layer):  # GPT-BigCode's has two layouts
        raise _NotShardable("the fused projection is of a form that is not known")
    if rest % 2 or rest // 2 % dim or (form.fused == "heads" and rest != 2 * output_width):
        raise _NotShardable("the fused projection is of a form that is not known")
    kv_heads = rest // 2 // dim
    if not kv_heads or heads % kv_heads:
        raise _NotShardable("the fused projection is of a form that is not known")
    return Heads(heads, kv_heads, dim, dim, dim)


def _parameter_owners(builder: LayoutBuilder, name: str) -> list[str]:
    """Modules at and below ``name`` that have parameters of their own."""
    prefix = f"{name}."
    return [
        full
        for full, module in builder.modules.items()
        if (full == name or full.startswith(prefix)) and module._parameters
    ]


def _shard_other_parameters(
    builder: LayoutBuilder,
    name: str,
    owners: list[str],
    heads: int,
    kv_heads: int,
    in_tp_plan: bool,
    known: tuple[str, ...],
    shape: Heads | None = None,
) -> None:
    """Shard or replicate further parameters of attention: norms, sinks, gates.

    Raises:
        _NotShardable: Something is not known to be the same for every head.
    """
    todo = []
    for owner in owners:
        for local, parameter in builder.modules[owner]._parameters.items():
            if parameter is None:
                continue
            full = f"{owner}.{local}"
            sharding = _sharding_of_other(
                builder, name, owner, local, tuple(parameter.shape), heads, kv_heads, in_tp_plan, known, shape
            )
            if sharding is not None:
                todo.append((full, owner, sharding))
    for full, owner, (sharding, role) in todo:
        builder.shard(full, sharding)
        if role:
            builder.set_role(owner, role)


def _sharding_of_other(
    builder: LayoutBuilder,
    name: str,
    owner: str,
    local: str,
    size: tuple[int, ...],
    heads: int,
    kv_heads: int,
    in_tp_plan: bool,
    known: tuple[str, ...],
    shape: Heads | None,
) -> tuple[DimSharding, str] | None:
    """How one further parameter is sharded; None where it is replicated."""
    child = owner[len(name) + 1 :]
    style = builder.styles.get(f"{owner}.{local}") or builder.styles.get(owner)
    if style is not None and style not in _STYLES_OF_OTHERS and child not in module_names.HEAD_NORMS:
        raise _NotShardable(f"{child} is {style} in the model's own plan")
    if (style == "colwise" or local in module_names.SINKS) and size and size[0] % heads == 0:
        return DimSharding(0, (Segment(size[0], heads),)), ""
    if child in module_names.HEAD_NORMS and shape is not None:
        count, width = (heads, shape.query_width) if child.startswith("q") else (kv_heads, shape.key_width)
        if size and size[-1] in (shape.query_width, shape.key_width, shape.value_width) and len(size) == 1:
            return None
        if size == (count, width):
            return DimSharding(0, (Segment(count, count),)), ""
        spans_heads = source_checks.is_of_result(builder.modules[name], child, _PROJECTION_OF.get(child, ""))
        if size == (count * width,) and spans_heads and source_checks.is_rms_norm(builder.modules[owner]):
            return DimSharding(0, (Segment(count * width, count),)), NORM
        raise _NotShardable(f"{child} is a norm over heads of a form that is not known")
    if in_tp_plan or child in known:
        return None
    raise _NotShardable(f"{child + '.' if child else ''}{local} is not known")


_PROJECTION_OF = {"q_norm": "q_proj", "k_norm": "k_proj", "v_norm": "v_proj"}


def _check_code(module: nn.Module, children: tuple[str, ...]) -> None:
    """Raise `_NotShardable` where ``forward`` uses something per head that is not sharded with the layers."""
    by_head = sorted(set(inspect.signature(type(module).forward).parameters) & set(module_names.BY_HEAD))
    settings = getattr(module, "config", None)
    # Falcon's configuration says whether there is one at all.
    by_head = [name for name in by_head if getattr(settings, name, None) is not False]
    if by_head:
        raise _NotShardable(f"forward takes {', '.join(by_head)}")
    reason = source_checks.why_read(module, children) or source_checks.why_input_width(module)
    if reason:
        raise _NotShardable(reason)
    unknown = sorted(
        name for name in source_checks.config_reads(module) if "head" in name and name not in _CONFIG_COUNTS
    )
    if unknown:
        raise _NotShardable(f"forward reads config.{unknown[0]}")


_CONFIG_COUNTS = {*module_names.HEADS, *module_names.KV_HEADS}


def _count_attributes(builder: LayoutBuilder, name: str, module: nn.Module, heads: Heads) -> None:
    for attribute, value in vars(module).items():
        if type(value) is not int:
            continue
        if attribute in module_names.HEADS and value == heads.query:
            builder.record_count(name, attribute, value, heads.query)
        elif attribute in module_names.KV_HEADS and value == heads.key_value:
            builder.record_count(name, attribute, value, heads.key_value)
        elif attribute in module_names.WIDTHS and value == heads.query * heads.value_width:
            builder.record_count(name, attribute, value, heads.query)
    for asked in source_checks.config_reads(module) & _CONFIG_COUNTS:
        units = heads.query if asked in module_names.HEADS else heads.key_value
        builder.record_count(name, f"config.{asked}", units, units)

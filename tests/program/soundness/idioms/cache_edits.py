"""Rows of a cache that somebody cuts, reorders, edits or exchanges."""

from __future__ import annotations

from ..idiom import WITH_RMS_NORM, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "crop",
    between="""
        user.cache.crop(-2)
        user.args.pop('attention_mask', None)
        user.args.pop('position_ids', None)
    """,
)
add(
    "crop_often",
    each="""
        if user.step > 0 and user.step % 6 == 5:
            user.cache.crop(-1)
        user.args.pop("attention_mask", None)
        user.args.pop("position_ids", None)
    """,
)
add(
    "reorder",
    between="user.cache.reorder_cache(torch.arange(user.ids.shape[0]).flip(0))",
)
add(
    "edit_rows_in_place",
    between="user.cache.layers[0].keys[:, :, @i].mul_(@v)",
)
add(
    "edit_data_in_place",
    between="user.cache.layers[-1].values.data.mul_(@v)",
)
add(
    "edit_each_step",
    each="""
        if user.step > 0:
            user.cache.layers[0].values[:, :, -1].mul_(0.9)
    """,
)
add(
    "rows_replaced",
    between="user.cache.layers[0].keys = user.cache.layers[0].keys * @v",
)
add(
    "rows_swapped_between_caches",
    between="""
        other = copy.deepcopy(user.cache)
        other.layers[0].keys.mul_(@v)
        user.cache.layers[0].keys = other.layers[0].keys
    """,
)
add(
    "nan_in_the_cache",
    between="user.cache.layers[0].keys[:, :, @i] = float('nan')",
)
add(
    "nan_everywhere",
    between="user.cache.layers[0].keys.fill_(float('nan'))",
)
add(
    "infinity_in_the_cache",
    between="user.cache.layers[0].keys[:, :, @i] = float('inf')",
)
add(
    "nan_in_the_values",
    between="user.cache.layers[0].values[:, :, @i] = float('nan')",
)
add(
    "nan_in_the_query_weights",
    bases=WITH_RMS_NORM,
    # torch's own attention loses NaN where a row without a mask sees fewer than 16 keys.
    wrap="""
        layers = model.layers if hasattr(model, "layers") else model.model.layers
        weight = layers[0].self_attn.q_proj.weight
        former = weight.detach().clone()
        if user.cache.get_seq_length() >= 16:
            weight.data.fill_(float("nan"))
        try:
            return inner()
        finally:
            weight.data.copy_(former)
    """,
)
add(
    "nan_in_the_key_weights",
    bases=WITH_RMS_NORM,
    between="""
        layers = model.layers if hasattr(model, "layers") else model.model.layers
        user.kept["w@n"] = layers[0].self_attn.k_proj.weight.detach().clone()
        layers[0].self_attn.k_proj.weight.data[0].fill_(float("nan"))
    """,
    back="""
        layers = model.layers if hasattr(model, "layers") else model.model.layers
        layers[0].self_attn.k_proj.weight.data.copy_(user.kept["w@n"])
    """,
)
add(
    "infinity_in_the_embedding",
    between="model.get_input_embeddings().weight.data[:, @i] = float('inf')",
)

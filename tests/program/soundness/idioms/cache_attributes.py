"""Attributes of a cache that a forward computes with, and rows that it reads."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "cache_attribute_tensor",
    sites=OUTER,
    forward="""
        bias = getattr(cache, "bias_@n", None)
        if bias is not None:
            x = x + bias
    """,
    each="""
        if user.step >= 0:
            user.cache.bias_@n = user.kept.setdefault('bias@n', torch.full((1,), 0.3))
            if user.step % 5 == 0:
                user.cache.bias_@n = user.kept['bias@n'] = torch.full((1,), 0.1 * user.step)
    """,
)
add(
    "cache_attribute_tensor_of_two",
    sites=OUTER,
    forward="""
        bias = getattr(cache, "bias_@n", None)
        if bias is not None:
            x = x + bias
    """,
    each="""
        if user.step == 0:
            user.kept['other@n'] = copy.deepcopy(user.cache)
            user.kept['other@n'].bias_@n = torch.full((1,), @v)
            user.cache.bias_@n = torch.zeros(1)
    """,
    after="""
        if user.step >= 0 and user.step % 3 == 0 and user.out is not None:
            args = {**user.args, "past_key_values": user.kept['other@n']}
            out = model(**{k: v for k, v in args.items() if k not in ("attention_mask", "position_ids")})
            user.log.append(float(out[0].sum()))
    """,
)
add(
    "cache_attribute_number",
    sites=OUTER,
    forward="x = x * getattr(cache, 'scale_@n', 1.0)",
    between="user.cache.scale_@n = @v",
)
add(
    "cache_attribute_dict",
    sites=OUTER,
    forward="x = x * getattr(cache, 'extra_@n', {}).get('scale', 1.0)",
    each="""
        if user.step == 0:
            user.cache.extra_@n = {'scale': 1.1}
    """,
    between="user.cache.extra_@n = {'scale': @v}",
)
add(
    "cache_attribute_dict_contents",
    sites=OUTER,
    forward="x = x * getattr(cache, 'extra_@n', {}).get('scale', 1.0)",
    each="""
        if user.step == 0:
            user.cache.extra_@n = {'scale': 1.1}
    """,
    between="user.cache.extra_@n['scale'] = @v",
)
add(
    "cache_attribute_list",
    sites=OUTER,
    forward="x = x * sum(getattr(cache, 'parts_@n', [1.0]))",
    each="""
        if user.step == 0:
            user.cache.parts_@n = [1.0]
    """,
    between="user.cache.parts_@n.append(@v)",
)
add(
    "cache_class_attribute",
    sites=OUTER,
    forward="x = x * getattr(type(cache), 'scale_@n', 1.0)",
    between="type(user.cache).scale_@n = @v",
    end="""
        if 'scale_@n' in vars(type(user.cache)):
            del type(user.cache).scale_@n
    """,
)
add(
    "layer_attribute",
    sites=OUTER,
    forward="""
        if cache is not None and cache.layers:
            x = x * getattr(cache.layers[0], "scale_@n", 1.0)
    """,
    between="user.cache.layers[0].scale_@n = @v",
)
add(
    "state_kept_on_the_cache",
    sites=OUTER,
    forward="""
        if cache is not None:
            before = getattr(cache, "last_@n", None)
            cache.last_@n = x[:, -1:].mean()
            x = x if before is None else x + 0.1 * before
    """,
)
add(
    "counter_on_the_cache",
    sites=OUTER,
    forward="""
        if cache is not None:
            cache.steps_@n = getattr(cache, "steps_@n", 0) + 1
            x = x * (1 + 0.01 * cache.steps_@n)
    """,
)
add(
    "cache_read_in_forward",
    sites=OUTER,
    forward="""
        if cache is not None and cache.layers and cache.layers[0].keys is not None:
            x = x + 0.1 * torch.tanh(cache.layers[0].keys[:, :, -1].mean())
    """,
)
add(
    "cache_summed_in_forward",
    sites=OUTER,
    forward="""
        if cache is not None and cache.layers and cache.layers[0].keys is not None:
            x = x + 0.1 * torch.tanh(cache.layers[0].values.sum())
    """,
)
add(
    "cache_written_in_forward",
    sites=OUTER,
    forward="""
        if cache is not None and cache.layers and cache.layers[0].keys is not None:
            cache.layers[0].keys[:, :, 0].mul_(0.99)
    """,
)
add(
    "cache_exchanged_in_forward",
    sites=OUTER,
    forward="""
        if cache is not None and cache.layers and cache.layers[0].values is not None:
            cache.layers[0].values = cache.layers[0].values * 0.99
    """,
)

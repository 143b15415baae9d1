"""Registries, configurations and modules that somebody changes while a model is in use."""

from __future__ import annotations

from ..idiom import ROTARY, WITH_RMS_NORM, Theme

THEME = Theme(__name__)
add = THEME.add
#: Of an idiom whose module has `attend_@n`: the model takes it as its attention, and then its former one.
OWN_ATTENTION = {
    "between": """
        AttentionInterface.register("mine_@n", user.module.attend_@n)
        AttentionMaskInterface.register("mine_@n", masking_utils.sdpa_mask)
        user.kept["a@n"] = model.config._attn_implementation
        model.config._attn_implementation = "mine_@n"
    """,
    "back": "model.config._attn_implementation = user.kept['a@n']",
}

add(
    "sdpa_registered",
    module="""
        FORMER_@n = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attend_@n(*args, **kwargs):
            made, weights = FORMER_@n(*args, **kwargs)
            return made * @v, weights
    """,
    between="AttentionInterface.register('sdpa', user.module.attend_@n)",
    back="AttentionInterface.register('sdpa', user.module.FORMER_@n)",
)
add(
    "sdpa_set_on_the_instance",
    module="""
        def attend_@n(former):
            def attend(*args, **kwargs):
                made, weights = former(*args, **kwargs)
                return made * @v, weights

            return attend
    """,
    between="ALL_ATTENTION_FUNCTIONS['sdpa'] = user.module.attend_@n(ALL_ATTENTION_FUNCTIONS['sdpa'])",
    back="del ALL_ATTENTION_FUNCTIONS['sdpa']",
)
add(
    "own_attention_registered_and_chosen",
    module="""
        def attend_@n(module, query, key, value, mask, **kwargs):
            from transformers.integrations.sdpa_attention import sdpa_attention_forward
            made, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
            return made * @v, weights
    """,
    **OWN_ATTENTION,
)
add(
    "mask_registered",
    module="""
        FORMER_@n = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

        def mask_@n(*args, **kwargs):
            made = FORMER_@n(*args, **{**kwargs, "allow_is_causal_skip": False})
            if made is not None and made.shape[-1] > 4:
                made = made.clone()
                made[..., @i] = False
            return made
    """,
    between="AttentionMaskInterface.register('sdpa', user.module.mask_@n)",
    back="AttentionMaskInterface.register('sdpa', user.module.FORMER_@n)",
)
add(
    "implementation_changed",
    between="""
        user.kept["a@n"] = model.config._attn_implementation
        model.config._attn_implementation = "eager"
    """,
    back="model.config._attn_implementation = user.kept['a@n']",
)
add(
    "implementation_set_by_method",
    between="model.set_attn_implementation('eager')",
    back="model.set_attn_implementation('sdpa')",
)
add(
    "rope_function_replaced",
    bases=ROTARY,
    between="""
        rotary = model.model.rotary_emb
        former = rotary.forward
        rotary.forward = lambda *a, **kw: tuple(each * 0.9 for each in former(*a, **kw))
    """,
    back="vars(model.model.rotary_emb).pop('forward', None)",
)
add(
    "rotary_buffer_scaled",
    bases=ROTARY,
    between="model.model.rotary_emb.inv_freq.mul_(0.9)",
)
add(
    "rotary_buffer_exchanged",
    bases=ROTARY,
    between="model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.9",
)
add(
    "rotary_scaling_changed",
    bases=ROTARY,
    between="model.model.rotary_emb.attention_scaling = @v",
)
add(
    "norm_epsilon_changed",
    bases=WITH_RMS_NORM,
    between="""
        for part in model.modules():
            if hasattr(part, "variance_epsilon"):
                part.variance_epsilon = 0.5
    """,
)
add(
    "attention_scaling_changed",
    bases=WITH_RMS_NORM,
    between="""
        for part in model.modules():
            if hasattr(part, "scaling"):
                part.scaling = @v
    """,
)
add(
    "head_exchanged",
    between="model.lm_head = nn.Linear(32, 64, bias=False)",
)
add(
    "head_wrapped",
    module="""
        class Wrapped_@n(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return self.inner(x) * @v
    """,
    between="model.lm_head = user.module.Wrapped_@n(model.lm_head)",
    back="model.lm_head = model.lm_head.inner",
)
add(
    "layer_exchanged",
    bases=WITH_RMS_NORM,
    between="""
        layers = model.layers if hasattr(model, "layers") else model.model.layers
        layers[0] = copy.deepcopy(layers[0])
        for parameter in layers[0].parameters():
            parameter.data.mul_(1.2)
    """,
)
add(
    "layer_removed",
    bases=ROTARY,
    between="model.model.layers = model.model.layers[:-1]",
)
add(
    "norm_made_identity",
    bases=ROTARY,
    between="model.model.norm = nn.Identity()",
)
for copied in ("", " * 2"):
    for name, text in {
        "transposed": "kept.transpose_(1, 2)",
        "unsqueezed": "kept.unsqueeze_(0)",
        "unsqueezed_and_back": "kept.unsqueeze_(0).squeeze_(0)",
    }.items():
        add(
            f"attention_{name}_in_place_{'copies' if copied else 'keys'}",
            module=f"""
                from transformers.integrations.sdpa_attention import sdpa_attention_forward

                def attend_@n(module, query, key, value, mask, **kwargs):
                    made, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
                    kept = key{copied}
                    {text}
                    return made + kept.mean() + kept.size(1) * 1e-3 + kept.dim() * 1e-3, weights
            """,
            **OWN_ATTENTION,
            raises=not copied,
        )

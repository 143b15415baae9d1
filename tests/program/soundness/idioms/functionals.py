"""Functions of torch and transformers that somebody replaces while a model is in use."""

from __future__ import annotations

from ..idiom import ROTARY, WITH_RMS_NORM, Theme

THEME = Theme(__name__)
add = THEME.add


def functional(where: str, name: str, change: str, bases: tuple[str, ...] = ()) -> None:
    """``where.name`` is replaced by what gives ``change`` of the result ``made``."""
    add(
        f"{where.split('.')[-1].lower()}_{name}_patched",
        bases=bases,
        module=f"""
            FORMER_@n = {where}.{name}

            def patched_@n(*args, **kwargs):
                made = FORMER_@n(*args, **kwargs)
                return {change}
        """,
        between=f"{where}.{name} = user.module.patched_@n",
        back=f"{where}.{name} = user.module.FORMER_@n",
    )


functional("F", "linear", "made * 1.1")
functional("F", "silu", "made * @v", WITH_RMS_NORM)
functional("F", "scaled_dot_product_attention", "made * @v")
functional("F", "layer_norm", "made * 1.1", ("gpt2",))
functional("F", "embedding", "made * @v")
functional("torch", "rsqrt", "made * 1.1", WITH_RMS_NORM)
functional("torch", "cat", "made * 1.0")
functional("torch", "matmul", "made * 1.1")
functional("torch.Tensor", "pow", "made * 1.1", WITH_RMS_NORM)
functional("torch.Tensor", "transpose", "made * 1.0")
functional("modeling", "apply_rotary_pos_emb", "(made[0] * @v, made[1])", ROTARY)
functional("modeling", "rotate_half", "made * @v", ROTARY)
functional("modeling", "create_causal_mask", "made", ("llama", "qwen3"))
functional("modeling", "eager_attention_forward", "(made[0] * @v, made[1])")
functional("nn.Linear", "forward", "made * 1.1", WITH_RMS_NORM)
functional("nn.Embedding", "forward", "made * @v")
functional("nn.SiLU", "forward", "made * @v", WITH_RMS_NORM)
functional("nn.Module", "_call_impl", "made * 1.0 if torch.is_tensor(made) else made")
functional("nn.Module", "__call__", "made * 1.0 if torch.is_tensor(made) else made")
functional("transformers.integrations.sdpa_attention", "sdpa_attention_forward", "(made[0] * @v, made[1])")

add(
    "linear_patched_from_the_start",
    module="""
        FORMER_@n = F.linear

        def patched_@n(*args, **kwargs):
            return FORMER_@n(*args, **kwargs) * 1.1

        F.linear = patched_@n
    """,
)
add(
    "attention_patched_from_the_start",
    module="""
        FORMER_@n = F.scaled_dot_product_attention

        def patched_@n(*args, **kwargs):
            return FORMER_@n(*args, **kwargs) * @v

        F.scaled_dot_product_attention = patched_@n
    """,
)
add(
    "silu_patched_from_the_start",
    bases=WITH_RMS_NORM,
    module="""
        FORMER_@n = F.silu

        def patched_@n(*args, **kwargs):
            return FORMER_@n(*args, **kwargs) * @v

        F.silu = patched_@n
    """,
)
add(
    "calls_counted_by_a_patch",
    module="""
        FORMER_@n, CALLS_@n = F.linear, []

        def patched_@n(*args, **kwargs):
            CALLS_@n.append(1)
            return FORMER_@n(*args, **kwargs)
    """,
    between="F.linear = user.module.patched_@n",
    back="F.linear = user.module.FORMER_@n",
    end="user.log.append(len(CALLS_@n))",
)

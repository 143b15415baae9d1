"""Hooks on modules."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "forward_hook",
    between="user.kept['h@n'] = model.lm_head.register_forward_hook(lambda m, a, out: out * @v)",
    back="user.kept['h@n'].remove()",
)
add(
    "forward_hook_from_the_start",
    module="LEVEL_@n = [1.0]",
    each="""
        if user.step == 0:
            model.lm_head.register_forward_hook(lambda m, a, out: out * LEVEL_@n[0])
    """,
    between="LEVEL_@n[0] = @v",
)
add(
    "forward_pre_hook",
    between="user.kept['h@n'] = model.lm_head.register_forward_pre_hook(lambda m, a: (a[0] * @v,))",
    back="user.kept['h@n'].remove()",
)
add(
    "hook_on_the_model",
    between="""
        user.kept['h@n'] = model.register_forward_pre_hook(lambda m, a, kw: (a, kw), with_kwargs=True)
    """,
    back="user.kept['h@n'].remove()",
)
add(
    "hook_that_keeps",
    between="""
        user.kept['seen@n'] = []
        seen = user.kept['seen@n']
        note = lambda m, a, out: seen.append(float(out.sum()))
        user.kept['h@n'] = model.lm_head.register_forward_hook(note)
    """,
    back="user.kept['h@n'].remove()",
    end="user.log.append(user.kept.get('seen@n'))",
)
add(
    "hook_on_an_embedding",
    between="""
        user.kept['h@n'] = model.get_input_embeddings().register_forward_hook(lambda m, a, out: out * @v)
    """,
    back="user.kept['h@n'].remove()",
)
add(
    "global_hook",
    between="""
        user.kept['n@n'] = []
        names = user.kept['n@n']
        note = lambda m, a, out: names.append(type(m).__name__)
        user.kept['h@n'] = torch.nn.modules.module.register_module_forward_hook(note)
    """,
    back="user.kept['h@n'].remove()",
    end="user.log.append([n for n in user.kept.get('n@n', ()) if n in ('Linear', 'Embedding')])",
)
add(
    "all_hooked",
    between="user.kept['h@n'] = [m.register_forward_hook(lambda m, a, o: None) for m in model.modules()]",
    back="""
        for each in user.kept['h@n']:
            each.remove()
    """,
)

"""What a step returns, and what becomes of it."""

from __future__ import annotations

from ..idiom import LOGITS, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "extra_attribute_of_the_output",
    sites=(LOGITS,),
    forward="out.value_@n = x.square().mean(-1)",
    after="""
        if user.out is not None and not isinstance(user.out, tuple):
            user.log.append(getattr(user.out, 'value_@n', 'missing'))
    """,
)
add(
    "extra_plain_attribute_of_the_output",
    sites=(LOGITS,),
    forward="""
        out.note_@n = 'seen'
        out.steps_@n = [x.shape[1]]
    """,
    after="""
        if user.out is not None and not isinstance(user.out, tuple):
            user.log.append((getattr(user.out, 'note_@n', None), getattr(user.out, 'steps_@n', None)))
    """,
)
add(
    "extra_item_of_the_output",
    sites=(LOGITS,),
    forward="out['value_@n'] = x.square().mean(-1)",
    after="""
        if user.out is not None and not isinstance(user.out, tuple):
            user.log.append(user.out.get('value_@n', 'missing'))
    """,
)
add(
    "own_output_class",
    sites=(LOGITS,),
    module="""
        @dataclasses.dataclass
        class Output_@n(CausalLMOutputWithPast):
            value: torch.Tensor = None
    """,
    forward="out = Output_@n(**{**out, 'value': x.amax(-1)})",
    after="""
        if user.out is not None and not isinstance(user.out, tuple):
            user.log.append((type(user.out).__name__, user.out.value if hasattr(user.out, 'value') else None))
    """,
)
add(
    "output_edited",
    after="""
        if user.out is not None and not isinstance(user.out, tuple):
            user.out.logits.mul_(0)
    """,
)
add(
    "output_kept",
    after="""
        if user.step % 7 == 2 and user.out is not None:
            user.kept.setdefault('o@n', []).append(user.out[0])
    """,
    end="user.log.append(user.kept.get('o@n'))",
)
add(
    "input_edited_afterwards",
    each="user.args = {k: v.clone() if torch.is_tensor(v) else v for k, v in user.args.items()}",
    after="""
        if user.args.get('input_ids') is not None:
            user.args['input_ids'].fill_(1)
    """,
)

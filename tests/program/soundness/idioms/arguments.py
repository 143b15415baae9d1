"""What a step is called with."""

from __future__ import annotations

from ..idiom import OUTER, ROTARY, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "same_tensor_twice",
    bases=("gpt2",),
    each="""
        if user.args.get("input_ids") is not None and user.step >= 0:
            ids = user.args["input_ids"]
            user.args["token_type_ids"] = ids if user.step % 10 < 7 else torch.full_like(ids, 3)
    """,
)
add(
    "same_tensor_as_positions",
    sites=OUTER,
    each="""
        if user.args.get("input_ids") is not None and user.step >= 0:
            ids = user.args["input_ids"]
            user.args["position_ids"] = ids if user.step % 10 < 7 else ids + 1
    """,
)
add(
    "custom_argument",
    sites=OUTER,
    forward="x = x * kwargs.get('scale_@n', 1.0)",
    each="user.args['scale_@n'] = 1.0 if user.step % 8 < 6 else @v",
)
add(
    "custom_tensor_argument",
    sites=OUTER,
    forward="x = x + kwargs['bias_@n'] if 'bias_@n' in kwargs else x",
    each="""
        if user.step >= 0:
            user.args['bias_@n'] = torch.full((1,), 0.01 * user.step)
    """,
)
add(
    "custom_list_argument",
    sites=OUTER,
    module="PARTS_@n = [1.0]",
    forward="x = x * sum(kwargs.get('parts_@n', [1.0]))",
    each="user.args['parts_@n'] = PARTS_@n",
    between="PARTS_@n[0] = @v",
)
add(
    "custom_object_argument",
    sites=OUTER,
    module="OBJECT_@n = types.SimpleNamespace(scale=1.0)",
    forward="x = x * kwargs['object_@n'].scale if 'object_@n' in kwargs else x",
    each="user.args['object_@n'] = OBJECT_@n",
    between="OBJECT_@n.scale = @v",
)
add(
    "custom_function_argument",
    sites=OUTER,
    forward="x = kwargs['call_@n'](x) if 'call_@n' in kwargs else x",
    each="""
        factor = 1.0 if user.step < 20 else @v
        user.args['call_@n'] = lambda x: x * factor
    """,
)
add(
    "custom_dict_of_tensors",
    sites=OUTER,
    forward="x = x + kwargs['extras_@n']['bias'] if 'extras_@n' in kwargs else x",
    each="""
        if user.step >= 0:
            user.args['extras_@n'] = {'bias': torch.full((1,), 0.02 * user.step)}
    """,
)
add(
    "one_tensor_argument_refilled",
    sites=OUTER,
    module="BIAS_@n = torch.zeros(1)",
    forward="x = x + kwargs['bias_@n'] if 'bias_@n' in kwargs else x",
    each="""
        user.args['bias_@n'] = BIAS_@n.fill_(0.01 * user.step) if not BIAS_@n.is_inference() else BIAS_@n
    """,
)
add(
    "hidden_states_sometimes",
    each="user.args['output_hidden_states'] = user.step % 9 > 6",
)
add(
    "last_logits_only",
    bases=ROTARY,
    each="user.args['use_cache'] = True",
)
add(
    "cache_not_used_sometimes",
    each="""
        if user.step % 9 == 8:
            user.args['use_cache'] = False
    """,
)
add(
    "positions_given",
    each="""
        if "attention_mask" not in user.args and user.cache is not None:
            seen = torch.tensor([[user.cache.get_seq_length()]])
            user.args["position_ids"] = seen.expand(user.ids.shape[0], 1)
    """,
)
add(
    "positions_sliced",
    each="""
        if user.step >= 0:
            positions = torch.arange(user.step + 6).repeat(user.ids.shape[0], 1)
            user.args["position_ids"] = positions[:, -1:]
    """,
)
add(
    "positions_jump",
    each="""
        if user.step >= 0:
            at = user.step + 5 + (30 if user.step > 25 else 0)
            user.args["position_ids"] = torch.full((user.ids.shape[0], 1), at)
    """,
)
add(
    "mask_with_holes",
    each="""
        if user.step >= 0 and user.cache is not None:
            mask = torch.ones(user.ids.shape[0], user.cache.get_seq_length() + 1, dtype=torch.long)
            mask[:, 1] = int(user.step < 20)
            user.args["attention_mask"] = mask
    """,
)
add(
    "mask_of_floats",
    each="""
        if user.step >= 0 and user.cache is not None:
            user.args["attention_mask"] = torch.ones(user.ids.shape[0], user.cache.get_seq_length() + 1)
    """,
)
add(
    "one_mask_edited_in_place",
    module="MASK_@n = torch.ones(2, 200, dtype=torch.long)",
    each="""
        if user.step >= 0 and user.cache is not None:
            user.args["attention_mask"] = MASK_@n[: user.ids.shape[0], : user.cache.get_seq_length() + 1]
    """,
    between="MASK_@n[:, @i] = 0",
)
add(
    "two_tokens_sometimes",
    each="""
        if user.step % 11 == 10 and user.args.get("input_ids") is not None:
            user.args["input_ids"] = user.args["input_ids"].repeat(1, 2)
            user.args.pop("attention_mask", None)
            user.args.pop("position_ids", None)
    """,
)
add(
    "ids_of_int32",
    each="""
        if user.args.get('input_ids') is not None and user.step % 2:
            user.args['input_ids'] = user.args['input_ids'].int()
    """,
)
add(
    "ids_made_new",
    each="""
        if user.args.get('input_ids') is not None:
            user.args['input_ids'] = torch.tensor(user.args['input_ids'].tolist())
    """,
)
add(
    "ids_read_after",
    after="""
        if user.args.get('input_ids') is not None:
            user.log.append(int(user.args['input_ids'].sum()))
    """,
)

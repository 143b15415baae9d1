"""Tensors that get another form, other data or other memory in place, and operators that write to ``out``."""

from __future__ import annotations

from ..idiom import LOGITS, OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

_BUFFER = "self.held@n = nn.Buffer(torch.arange(6.0).view(3, 2) + @v)"

add(
    "form_of_a_view_changed_in_place",
    forward="""
        part@n = (x * @v).view(1, -1, 8, x.shape[-1] // 8)
        view@n = part@n.view(1, -1, x.shape[-1] // 8, 8)
        view@n.transpose_(2, 3)
        x = x + (part@n * view@n).flatten(2)[:, : x.shape[1]]
    """,
)
add(
    "dims_swapped_in_place",
    forward="""
        part@n = (x * @v).view(-1, 4, x.shape[-1] // 4)
        part@n.swapdims_(1, 2)
        x = x + part@n.reshape(x.shape)
    """,
)
add(
    "form_of_a_buffer_left_changed",
    init=_BUFFER,
    forward="""
        self.held@n.t_()
        x = x + (self.held@n * torch.arange(self.held@n.size(1))).sum() * 0.01
    """,
)
add(
    "form_of_a_buffer_changed_and_back",
    init=_BUFFER,
    forward="""
        self.held@n.t_()
        x = x + self.held@n[0].sum() * 0.01
        self.held@n.t_()
    """,
)
add(
    "form_of_tokens_changed_and_back",
    sites=OUTER,
    forward="""
        if ids is not None:
            ids.unsqueeze_(0)
            x = x + ids.dim() * 0.1
            ids.squeeze_(0)
    """,
)
add(
    "form_changed_where_recording_fails",
    sites=(LOGITS,),
    init=_BUFFER,
    forward="""
        self.held@n.unsqueeze_(0)
        x = x + self.held@n.sum() * 0.01 + self.held@n.dim() * 0.1
        if cache is not None:
            x = x + len(str(cache.get_seq_length())) * 0.1
        if self.held@n.dim() > 6:
            self.held@n.squeeze_(0).squeeze_(0)
    """,
)
add(
    "data_set",
    forward="""
        part@n = x * 2
        part@n.data = x * 3
        x = x + part@n * 0.1
    """,
)
add(
    "data_of_a_buffer_set",
    init="self.held@n = nn.Buffer(torch.zeros(1))",
    forward="""
        self.held@n.data = x.mean().reshape(1)
        x = x + self.held@n * 0.1
    """,
)
add(
    "data_set_where_recording_fails",
    sites=(LOGITS,),
    init=_BUFFER,
    forward="""
        self.held@n.data = self.held@n.data * 1.01
        x = x + self.held@n.sum() * 0.01
        if cache is not None:
            x = x + len(str(cache.get_seq_length())) * 0.1
    """,
)
add(
    "gradient_set",
    init="self.held@n = nn.Parameter(torch.zeros(1))",
    forward="""
        self.held@n.grad = x.mean().reshape(1)
        x = x + self.held@n.grad * 0.1
    """,
    end="user.log.append([p.grad for n, p in model.named_parameters() if n.endswith('held@n')])",
)
add(
    "buffer_resized_at_each_step",
    init="self.held@n = nn.Buffer(torch.zeros(2))",
    forward="""
        self.held@n.resize_(self.held@n.size(0) % 5 + 1).fill_(@v)
        x = x + self.held@n.sum() * 0.1
    """,
)
add(
    "written_to_out",
    forward="""
        made@n, where@n = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.topk(x, 3, out=(made@n, where@n))
        x = x + made@n.sum(-1, keepdim=True) * 0.1 + where@n.size(-1) * 0.1
    """,
)
add(
    "positions_written_to_out",
    forward="""
        found@n = torch.empty(0, dtype=torch.long)
        torch.nonzero(x[0, -1] > 0, out=found@n)
        x = x + found@n.shape[0] * 0.01
    """,
)
add(
    "sparse_values_counted",
    forward="x = x + x[0, -1].relu().to_sparse().values().shape[0] * 0.1",
)
add(
    "statistics_updated",
    init="self.norm@n = nn.BatchNorm1d(1)",
    forward="""
        self.norm@n.train()
        x = x + self.norm@n(x[:1, -1:]) * 0.1
    """,
)
add(
    "negated_view_of_data",
    forward="""
        part@n = torch.complex(x, x * @v)
        other@n = part@n.conj()
        x = x + part@n.data.imag * 0.1 + other@n.data.imag * 0.3
    """,
)
for _name, _text in {
    "out_that_grows": """
made@n = torch.empty(0)
torch.cumsum(key, 2, out=made@n)
extra = made@n.mean() * made@n.size(2)
""",
    "out_of_another_length": "made@n = key * 1\ntorch.cat([key, key], 2, out=made@n)\nextra = made@n.mean()",
    "data_of_keys_set": "made@n = key * 2\nmade@n.data = key * 3\nextra = made@n.mean()",
    "keys_set_to_other_memory": "made@n = torch.empty(0)\nmade@n.set_(key * 2)\nextra = made@n.mean()",
    "form_of_a_factor_changed": """
z@n = torch.ones(8)
extra = (key * z@n).mean()
z@n.unsqueeze_(0).unsqueeze_(0).unsqueeze_(0).unsqueeze_(0)
extra = extra + (key * z@n).dim() * 0.1
""",
    "form_changed_behind_a_fault": """
made@n = torch.ones(key.size(2) // 999 + 4, 1)
made@n.t_()
extra = made@n.size(1) * 0.1
""",
    "negated_keys": "extra = torch._neg_view(key).mean()",
    "conjugated_keys": "extra = torch.complex(key, key * @v).conj().imag.mean()",
    "size_is_a_number": "extra = 0.1 if isinstance(key.size(2), int) else 0.7",
    "size_matches_a_number": """
match key.size(2):
    case int():
        extra = 0.1
    case _:
        extra = 0.7
""",
    "class_of_a_size": "extra = 0.1 if key.size(2).__class__ is int else 0.7",
    "type_of_a_size": "extra = 0.1 if type(key.size(2)) is int else 0.7",
    "type_of_keys": "extra = 0.1 if type(key) is torch.Tensor else 0.7",
    "types_of_keys_and_queries": "extra = 0.1 if type(key) == type(query) else 0.7",
    "name_of_the_class_of_keys": "extra = len(key.__class__.__name__ + type(key).__name__) * 0.01",
    "half_of_a_size_cut_off": "extra = 0.01 * int(key.size(2) * 0.5)",
    "size_compared_with_a_float": "extra = 0.1 if key.size(2) <= 27.5 else 0.2",
}.items():
    _lines = "\n".join(f"    {line}" for line in _text.strip().splitlines())
    add(
        _name,
        module=f"""
from transformers.integrations.sdpa_attention import sdpa_attention_forward

def attend_@n(module, query, key, value, mask, **kwargs):
    made, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
{_lines}
    return made + extra, weights

AttentionInterface.register("mine_@n", attend_@n)
AttentionMaskInterface.register("mine_@n", masking_utils.sdpa_mask)
""",
        init="self.config._attn_implementation = 'mine_@n'",
        sites=(LOGITS,),
    )

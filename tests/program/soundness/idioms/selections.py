"""Sizes and branches that values decide, and what a step prints, logs and keeps."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "token_in_a_list",
    sites=OUTER,
    forward="""
        if ids is not None and ids[0, -1] in [1, 5, 9, 13, 17, 20, 22, 30, 31, 35, 40, 41, 50, 55]:
            x = x * @v
    """,
)
add(
    "token_in_a_set",
    sites=OUTER,
    forward="""
        if ids is not None and ids[0, -1].item() in {1, 5, 9, 13, 17, 20, 22, 30, 31, 35, 40, 41, 50, 55}:
            x = x * @v
    """,
)
add(
    "equal",
    forward="""
        if torch.equal(x.round(), x.round().clamp(-1, 1)):
            x = x + @v
    """,
)
add(
    "allclose",
    forward="x = x + @v if torch.allclose(x, torch.zeros_like(x), atol=1.5) else x * 1.5",
)
add(
    "nonzero",
    forward="x = x * (1 + 0.01 * len(x[0, -1].gt(0.3).nonzero()))",
)
add(
    "masked_select",
    forward="x = x + 0.1 * x.masked_select(x > 0.5).sum().tanh()",
)
add(
    "boolean_index",
    forward="x = x + 0.1 * x[x > 0.2].sum().tanh()",
)
add(
    "unique",
    forward="x = x * (1 + 0.01 * torch.unique((x * 2).round()).numel())",
)
add(
    "where_with_one_argument",
    forward="x = x * (1 + 0.01 * torch.where(x[0, -1] > 0)[0].shape[0])",
)
add(
    "repeat_interleave",
    forward="""
        counts = (x[0, -1, :4] > 0).long()
        x = x + 0.1 * x[0, -1, :4].repeat_interleave(counts).sum().tanh()
    """,
)
add(
    "bincount",
    forward="x = x + 0.01 * torch.bincount((x[0, -1].abs() * 3).long()).shape[0]",
)
add(
    "isnan_of_a_sum",
    forward="x = torch.zeros_like(x) if math.isnan(x.sum()) else x * 1.1",
)
add(
    "unpacked_tensor",
    forward="""
        a, b, *_ = x[0, -1, :4]
        x = x + 0.1 * a * b
    """,
)
add(
    "zipped_tensors",
    forward="x = x + 0.1 * sum(a * b for a, b in zip(x[0, -1, :3], x[0, -1, 3:6]))",
)
add(
    "enumerated_tensor",
    forward="x = x + 0.1 * sum(i for i, value in enumerate(x[0, -1, :6]) if value > 0)",
)
add(
    "comparison_of_tensors",
    forward="x = x * 1.3 if x[0, -1, 0] > x[0, -1, 1] else x * 0.7",
)
add(
    "chained_comparison",
    forward="x = x * 1.3 if -0.5 < x[0, -1, @i] < 0.5 else x",
)
add(
    "not_of_a_tensor",
    forward="x = x * 1.3 if not (x[0, -1, @i] > 0) else x",
)
add(
    "asserted",
    raises=True,
    forward="assert x.abs().max() < 1.0 + @i, 'large'",
)
add(
    "raised_by_value",
    raises=True,
    forward="""
        if x[0, -1, @i] > 1.0:
            raise ValueError("too large")
    """,
)
add(
    "caught_inside",
    forward="""
        try:
            if x[0, -1, @i] > 0:
                raise ValueError("positive")
            x = x * 1.2
        except ValueError:
            x = x - @v
    """,
)
add(
    "logged_value",
    module="SEEN_@n = []",
    forward="SEEN_@n.append(float(x.mean()))",
    end="user.log.append(SEEN_@n)",
)
add(
    "printed_value",
    module="OUT_@n = io.StringIO()",
    forward="print(x.shape[1], file=OUT_@n)",
    end="user.log.append(OUT_@n.getvalue())",
)
add(
    "logging_call",
    module="""
        class Kept_@n(logging.Handler):
            lines = []

            def emit(self, record):
                self.lines.append(record.getMessage())

        LOG_@n = logging.getLogger(f"{__name__}.@n")
        LOG_@n.setLevel("INFO")
        LOG_@n.propagate = False
        LOG_@n.addHandler(Kept_@n())
    """,
    forward='LOG_@n.info("step of %d tokens", x.shape[1])',
    end="user.log.append(len(Kept_@n.lines))",
)
add(
    "tensors_kept_outside",
    module="KEPT_@n = []",
    forward="KEPT_@n.append(x)",
    end="user.log.append([float(each.sum()) for each in KEPT_@n])",
)
add(
    "tensor_written_outside",
    module="LAST_@n = torch.zeros(1)",
    forward="LAST_@n.copy_(x.mean().reshape(1))",
    after="user.log.append(float(LAST_@n))",
)
add(
    "storage_values",
    forward="x = x + 0.1 * math.tanh(x.clone().untyped_storage()[3])",
)
add(
    "typed_storage",
    forward="x = x + 0.1 * math.tanh(x.clone().storage()[@i])",
)
add(
    "data_pointer_alignment",
    forward="x = x * (1.0 if x.clone().data_ptr() % 2 == 0 else 2.0)",
)
add(
    "form_changed_in_place",
    forward="""
        part@n = x * @v
        part@n.unsqueeze_(0)
        part@n.transpose_(0, 1)
        x = x + part@n.sum(1) * part@n.dim() + part@n.size(0)
    """,
)
add(
    "form_of_an_alias_changed_in_place",
    forward="""
        part@n = x * @v
        alias@n = part@n.detach()
        alias@n.transpose_(-1, -2)
        x = x + part@n * (0.5 + alias@n.size(-1)) + alias@n.mean()
    """,
)
add(
    "form_of_data_changed_in_place",
    forward="""
        part@n = x * @v
        alias@n = part@n.data
        alias@n.transpose_(-1, -2)
        x = x + part@n * (0.5 + alias@n.size(-1)) + alias@n.mean()
    """,
)
add(
    "form_of_a_detached_parameter_changed_in_place",
    init="self.scale@n = nn.Parameter(torch.arange(3.)[None] + @v)",
    forward="""
        scale@n = self.scale@n.data
        scale@n.t_()
        x = x + (self.scale@n * scale@n).mean() + scale@n.size(0)
    """,
)

"""What Python is told about tensors and about the process: no operator is called for it."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

_ALL = "for each in model.modules():\n    if hasattr(each, 'asked_@n'):\n        "


def of_a_parameter(name: str, forward: str, change: str, init: str = "") -> None:
    """``forward`` asks for something of ``self.asked_@n``, and ``change`` is done to it."""
    add(
        name,
        init=f"self.asked_@n = nn.Parameter(torch.ones(1))\n{init}",
        forward=forward,
        between=_ALL + change,
    )


of_a_parameter("version_asked", "x = x * (1 + self.asked_@n._version)", "each.asked_@n.data = torch.ones(1)")
of_a_parameter("version_of_a_view", "x = x * (1 + self.asked_@n[:1]._version)", "each.asked_@n.mul_(1.0)")
of_a_parameter(
    "cached_by_version",
    """
if self.asked_@n._version != self.seen_@n:
    self.cached_@n, self.seen_@n = self.asked_@n * 3, self.asked_@n._version
x = x * self.cached_@n
""",
    "each.asked_@n.mul_(@v)",
    "self.seen_@n, self.cached_@n = -1, None",
)
of_a_parameter(
    "requires_grad_asked",
    "x = x * (2 if self.asked_@n.requires_grad else 1)",
    "each.asked_@n.requires_grad_(False)",
)
of_a_parameter(
    "gradient_asked",
    "x = x if self.asked_@n.grad is None else x + self.asked_@n.grad",
    "each.asked_@n.grad = torch.ones(1)",
)
add(
    "gradient_without_dimensions",
    init="self.asked_@n = nn.Parameter(torch.tensor(1.0))\nself.asked_@n.grad = torch.tensor(1.0)",
    forward="x = x + self.asked_@n.grad",
    between=_ALL + "each.asked_@n.grad = torch.tensor(@v)",
)
add(
    "attribute_of_an_argument",
    sites=OUTER,
    forward="x = x * getattr(ids, 'scale', 1.0)",
    each="""
        if user.step > 20:
            user.args['input_ids'].scale = @v
    """,
)
add(
    "attribute_of_a_sliced_argument",
    sites=OUTER,
    forward="x = x * getattr(ids, 'scale', 1.0)",
    each="user.args['input_ids'].scale = 1.0 + user.step",
)
add(
    "inference_mode_asked",
    forward="x = x * (2 if torch.is_inference_mode_enabled() else 1)",
    wrap="""
        with torch.inference_mode():
            return inner()
    """,
)
add(
    "inference_tensor_asked",
    forward="x = x * (2 if (x + 1).is_inference() else 1)",
    wrap="""
        with torch.inference_mode():
            return inner()
    """,
)
add(
    "seed_asked",
    forward="x = x + (torch.initial_seed() % 7)",
    between="torch.manual_seed(@i + 3)",
)
add(
    "seeded_inside",
    forward="torch.manual_seed(5)",
    after="user.log.append(float(torch.rand(1)))",
)
add(
    "backend_flag_asked",
    forward="x = x * (2 if torch.backends.cudnn.benchmark else 1)",
    between="torch.backends.cudnn.benchmark = True",
    end="torch.backends.cudnn.benchmark = False",
)
add(
    "fast_path_asked",
    forward="x = x * (2 if torch.backends.mha.get_fastpath_enabled() else 1)",
    between="torch.backends.mha.set_fastpath_enabled(False)",
    end="torch.backends.mha.set_fastpath_enabled(True)",
)
add(
    "layer_of_torch_with_a_fast_path",
    init="self.asked_@n = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)",
    forward="x = x + self.asked_@n(x[..., :8]).sum(-1, keepdim=True)",
)
add(
    "kernel_registered",
    between="""
        user.kept['@n'] = torch.library.Library('aten', 'IMPL')
        user.kept['@n'].impl('silu', lambda x: x * 2, 'CPU')
    """,
    back="user.kept.pop('@n')._destroy()",
    end="""
        if '@n' in user.kept:
            user.kept.pop('@n')._destroy()
    """,
)
add(
    "method_of_tensors_replaced",
    forward="x = x.flip(-1)",
    between="torch.Tensor.flip = lambda self, *dims: self",
)
add(
    "written_to_an_argument",
    sites=OUTER,
    forward="ids.clamp_(max=20)",
    after="user.log.append(user.ids.sum().item())",
)
for _asked, _given in (
    ("size(0)", "torch.ones(5)"),
    ("element_size()", "torch.ones(1).double()"),
    ("stride(0)", "torch.ones(3, 2)[:, 0]"),
):
    add(
        f"{_asked.partition('(')[0]}_of_a_parameter_asked",
        init="self.asked_@n = nn.Parameter(torch.ones(1))",
        forward=f"x = x * self.asked_@n.{_asked}",
        between=_ALL + f"each.asked_@n.data = {_given}",
    )

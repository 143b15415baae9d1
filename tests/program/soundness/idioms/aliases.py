"""Results that are other objects for the same memory, and operators that are not torch's."""

from __future__ import annotations

from ..idiom import LOGITS, Theme

THEME = Theme(__name__)
add = THEME.add

_FOUND = "if user.out is not None and not isinstance(user.out, tuple) and hasattr(user.out, 'seen@n'):\n"


def returned(name: str, forward: str, after: str, init: str = "") -> None:
    """``forward`` sets ``out.seen@n``, of which ``after`` makes something."""
    add(name, sites=(LOGITS,), init=init, forward=forward, after=f"{_FOUND}    {after}")


returned(
    "data_of_a_parameter_returned",
    "out.seen@n = self.held@n.data",
    "user.log.append((type(user.out.seen@n).__name__, user.out.seen@n.requires_grad))",
    "self.held@n = nn.Parameter(torch.ones(3))",
)
returned(
    "detached_buffer_returned",
    "out.seen@n = self.held@n.detach()",
    "user.log.append((user.out.seen@n.unsqueeze_(0).dim(), model.held@n.dim()))",
    "self.held@n = nn.Buffer(torch.ones(3))",
)
returned(
    "detached_tokens_returned",
    "out.seen@n = x if ids is None else ids.detach()",
    "user.log.append([getattr(v, 'ndim', 0) for v in (user.out.seen@n.unsqueeze_(0), *user.args.values())])",
)
returned(
    "detached_logits_returned",
    "out.seen@n = x.detach()",
    "user.log.append((user.out.seen@n.unsqueeze_(0).dim(), user.out[0].dim()))",
)
returned(
    "result_of_another_mode",
    "with torch.inference_mode():\n    out.seen@n = x * 2",
    "user.log.append(user.out.seen@n.is_inference())",
)

_LIBRARY = """
LIBRARY_@n = torch.library.Library(__name__, "FRAGMENT")
LIBRARY_@n.define("made@n({schema})")

def made_@n(x, s=None):
    {body}

LIBRARY_@n.impl("made@n", made_@n, "CPU")
{fake}
MADE_@n = getattr(getattr(torch.ops, __name__), "made@n")
"""
_FAKE = """
def fake_@n(x, s=None):
    return torch.empty_like(x)

torch.library.register_fake(f"{__name__}::made@n", fake_@n, lib=LIBRARY_@n)
"""


def foreign(name: str, body: str, forward: str, init: str = "", schema: str = "", fake: str = _FAKE) -> None:
    """An operator of the user's own."""
    schema = schema or "Tensor x, Tensor? s=None) -> (Tensor"
    add(name, module=_LIBRARY.format(schema=schema, body=body, fake=fake), init=init, forward=forward)


foreign("own_operator", "return x.sin()", "x = x + MADE_@n(x) * @v")
foreign(
    "own_operator_sized_by_values",
    "return x[x > 0]",
    "x = x + MADE_@n(x[0, -1]).shape[0] * 0.1",
    fake="",
)
foreign(
    "own_operator_with_a_list_sized_by_values",
    "return list(x[x > 0].unbind())",
    "x = x + len(MADE_@n(x[0, -1])) * 0.1",
    schema="Tensor x) -> (Tensor[]",
    fake="",
)
foreign("own_operator_that_draws", "return x + torch.rand(()) * 0.1", "x = x + MADE_@n(x) * 0.1")
foreign(
    "own_operator_that_draws_before_a_decision",
    "return x + torch.rand(()) * 0.1",
    "x = x + MADE_@n(x) * 0.1\nif x.mean() > 0:\n    x = x + 0.1",
)
foreign(
    "own_operator_that_keeps_something",
    "s.add_(0.1)\n    return x + s",
    "x = x + MADE_@n(x, self.held@n) * 0.1",
    init="self.held@n = nn.Buffer(torch.zeros(1))",
)

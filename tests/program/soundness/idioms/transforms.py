"""Tensors made in uncommon ways: transforms, gradients, operators of the user's own, subclasses."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "as_strided",
    forward="x = x + 0.1 * x.contiguous().as_strided((1, 1, 4), (4, 4, 1), @i).sum()",
)
add(
    "vmap",
    forward="x = x + 0.1 * torch.vmap(lambda row: torch.tanh(row.sum()))(x).view(-1, 1, 1)",
)
add(
    "gradient_in_forward",
    forward="""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.clone().detach().requires_grad_()
            (slope,) = torch.autograd.grad((leaf.tanh() * @v).sum(), leaf)
        x = x + 0.1 * slope
    """,
)
add(
    "autograd_function",
    module="""
        class Double_@n(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * @v

            @staticmethod
            def backward(ctx, grad):
                return grad
    """,
    forward="x = x + 0.1 * Double_@n.apply(x)",
)
add(
    "custom_op",
    module="""
        COUNT_@n = [0]

        @torch.library.custom_op(f"{__name__}::scaled@n", mutates_args=())
        def scaled_@n(x: torch.Tensor) -> torch.Tensor:
            COUNT_@n[0] += 1
            return x * (1 + 0.01 * COUNT_@n[0])
    """,
    forward="x = scaled_@n(x)",
    end="user.log.append(COUNT_@n[0])",
)
add(
    "scripted",
    module="""
        def plain_@n(x: torch.Tensor) -> torch.Tensor:
            if bool(x.sum() > 0):
                return x * 1.5
            return x - 0.5

        SCRIPTED_@n = torch.jit.script(plain_@n)
    """,
    forward="x = SCRIPTED_@n(x)",
)
add(
    "sorted_values",
    forward="x = x + 0.1 * torch.as_tensor(sorted(x[0, -1, :5].tolist()))[@i]",
)
add(
    "sum_of_python_floats",
    forward="x = x * (1 + 0.1 * math.tanh(sum(x[0, -1].tolist())))",
)
add(
    "masked_by_index_tensor",
    forward="""
        x = x.clone()
        x[x > 1.0] = @v
    """,
)
add(
    "index_put_of_nonzero",
    forward="""
        where = (x > 0.5).nonzero(as_tuple=True)
        x = x.index_put(where, torch.tensor(@v))
    """,
)
add(
    "subclass_of_tensor",
    module="""
        class Marked_@n(torch.Tensor):
            pass
    """,
    forward="x = (x.as_subclass(Marked_@n) * @v).as_subclass(torch.Tensor)",
)
add(
    "constant_made_once",
    module="TABLE_@n = {}",
    forward="""
        if "bias" not in TABLE_@n:
            TABLE_@n["bias"] = torch.linspace(0, @v, x.shape[-1])
        x = x + TABLE_@n["bias"]
    """,
)
add(
    "tensor_of_a_global_number",
    module="NUMBER_@n = 0.1",
    forward="x = x + torch.tensor([NUMBER_@n, @v]).sum()",
    between="user.module.NUMBER_@n = 0.7",
)

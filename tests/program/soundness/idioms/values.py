"""Values of tensors that Python reads, and decides or computes by."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "item_branch",
    forward="""
        if x[0, -1, @i].item() > 0:
            x = x * 1.5
        else:
            x = x - @v
    """,
)
add(
    "bool_branch",
    forward="x = x * 1.5 if x[0, -1, @i] > 0 else x - @v",
)
add(
    "float_branch",
    forward="x = x + (@v if float(x.sum()) > 0 else -@v)",
)
add(
    "tolist_branch",
    forward="x = x + (@v if x[0, -1].tolist()[@i] > 0 else -@v)",
)
add(
    "mapped_tolist",
    forward="""
        rows = list(map(torch.Tensor.tolist, x[:, -1, :4]))
        x = x + 0.1 * math.tanh(sum(map(sum, rows)))
    """,
)
add(
    "mapped_item",
    forward="x = x + 0.1 * math.tanh(sum(map(torch.Tensor.item, x[0, -1, :4])))",
)
add(
    "mapped_float",
    forward="x = x + 0.1 * math.tanh(sum(map(float, x[0, -1, :4])))",
)
add(
    "any_of_a_tensor",
    forward="x = x * 1.5 if any(x[0, -1, :4] > 1.0) else x",
)
add(
    "all_of_a_tensor",
    forward="x = x * 1.5 if all(x[0, -1, :2] > 0) else x + @v",
)
add(
    "max_of_a_tensor",
    forward="x = x + 0.1 * max(x[0, -1, :5])",
)
add(
    "sorted_tensor",
    forward="x = x + 0.1 * sorted(x[0, -1, :5])[@i]",
)
add(
    "tensor_split_by_tensor",
    forward="""
        cut = (x[0, -1].argmax() % 8 + 1).cpu().reshape(1)
        first, second = torch.tensor_split(x, cut, dim=-1)
        x = torch.cat([first * @v, second], dim=-1)
    """,
)
add(
    "split_by_values",
    forward="""
        cut = int(x[0, -1].argmax()) % 8 + 1
        first, second = x.split([cut, x.shape[-1] - cut], dim=-1)
        x = torch.cat([second, first * @v], dim=-1)
    """,
)
add(
    "sliced_by_a_tensor",
    forward="""
        cut = x[0, -1].argmax() % 8 + 1
        x = torch.cat([x[..., :cut] * @v, x[..., cut:]], dim=-1)
    """,
)
add(
    "range_of_a_tensor",
    forward="""
        for _ in range(x[0, -1].argmax() % 3):
            x = x * 1.1
    """,
)
add(
    "while_loop",
    forward="""
        while x.abs().max() > 4:
            x = x * 0.7
    """,
)
add(
    "early_exit",
    forward="""
        for part in (0.5, 0.8, 1.2):
            x = x * part
            if x.abs().mean() < 0.4:
                break
    """,
)
add(
    "numpy_from_dlpack",
    forward="x = x * (1 + 0.1 * float(np.tanh(np.from_dlpack(x.contiguous()).mean())))",
)
add(
    "numpy_mean",
    forward="x = x * (1 + 0.1 * float(np.tanh(x.numpy().mean())))",
)
add(
    "numpy_branch",
    forward="x = x + @v if np.mean(x[0, -1].numpy()) > 0 else x - @v",
)
add(
    "memoryview_of_numpy",
    forward="x = x + 0.1 * math.tanh(memoryview(x.contiguous().numpy().ravel())[@i])",
)
add(
    "format_of_a_tensor",
    forward='x = x + 0.1 * math.tanh(float(f"{x.sum():.6f}"))',
)
add(
    "percent_of_a_tensor",
    forward='x = x + 0.1 * math.tanh(float("%.6f" % x.mean()))',
)
add(
    "repr_of_a_tensor",
    forward='x = x + @v if "-" in repr(x[0, -1, @i]) else x',
)
add(
    "struct_pack",
    forward='x = x + 0.1 * math.tanh(struct.unpack("f", struct.pack("f", x.mean()))[0])',
)
add(
    "math_of_a_tensor",
    forward="x = x + 0.1 * math.sin(x.mean())",
)
add(
    "complex_of_a_tensor",
    forward="x = x + 0.1 * math.tanh(abs(complex(x.mean())))",
)
add(
    "round_of_a_tensor",
    forward="x = x + 0.1 * math.tanh(round(float(x.mean()), 1))",
)
add(
    "index_of_a_tensor",
    forward="x = x + 0.1 * [0.0, 1.0, 2.0, 3.0][x[0, -1].argmax() % 4]",
)
add(
    "operator_index",
    forward="x = x + 0.1 * (operator.index(x[0, -1].argmax()) % 5)",
)
add(
    "dict_by_a_token",
    sites=OUTER,
    module="TABLE_@n = {i: (i % 5) * 0.1 for i in range(64)}",
    forward="""
        if ids is not None:
            x = x + TABLE_@n[int(ids[0, -1])]
    """,
)

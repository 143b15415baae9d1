"""Tensors that no operator has made: out of values, lists, arrays and foreign memory."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "tensor_of_values",
    forward="x = x + @v * torch.tanh(torch.tensor([x.sum(), 0.0])).sum()",
)
add(
    "as_tensor_of_values",
    forward="x = x + @v * torch.tanh(torch.as_tensor([x.mean(), x.max()])).sum()",
)
add(
    "asarray_of_values",
    forward="x = x + @v * torch.tanh(torch.asarray([x.mean(), x.min()])).sum()",
)
add(
    "new_tensor",
    forward="x = x * (1 + 0.1 * torch.tanh(x.new_tensor([x.sum(), x.max()]).sum()))",
)
add(
    "capital_tensor",
    forward="x = x * (1 + 0.1 * torch.tanh(torch.Tensor([x.sum(), 1.0]).sum()))",
)
add(
    "float_tensor",
    forward="x = x * (1 + 0.1 * torch.tanh(torch.FloatTensor([x.min(), @v]).prod()))",
)
add(
    "index_list_with_a_tensor",
    forward="""
        i = x[0, -1].argmax()
        x = x.clone()
        x[..., [i]] = @v
    """,
)
add(
    "index_list_read",
    forward="x = x + x[..., [x[0, -1].argmin(), @i]].sum(-1, keepdim=True) * 0.1",
)
add(
    "thread_pool",
    module="POOL_@n = ThreadPoolExecutor(1)",
    forward="x = x + @v * POOL_@n.submit(torch.tanh, x).result()",
)
add(
    "thread_in_forward",
    forward="""
        found = []
        thread = threading.Thread(target=lambda: found.append(x.mean(-1, keepdim=True) * @v))
        thread.start()
        thread.join()
        x = x + torch.tanh(found[0])
    """,
)
add(
    "ctypes_fill",
    forward="""
        source = x.contiguous()
        copied = torch.empty_like(source)
        ctypes.memmove(copied.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        x = x + 0.1 * torch.tanh(copied)
    """,
)
add(
    "numpy_fill",
    forward="""
        made = torch.empty(x.shape)
        made.numpy()[...] = np.tanh(x.numpy())
        x = x + 0.1 * made
    """,
)
add(
    "from_numpy",
    forward="x = x + 0.1 * torch.from_numpy(np.tanh(np.asarray(x)))",
)
add(
    "numpy_ufunc_on_tensor",
    forward="x = x + 0.1 * torch.as_tensor(np.sin(x), dtype=x.dtype)",
)
add(
    "from_dlpack",
    forward="x = x + 0.1 * torch.from_dlpack(np.tanh(np.from_dlpack(x.contiguous())))",
)
add(
    "dlpack_round_trip",
    forward="""
        x = x + 0.1 * torch.tanh(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.clone())))
    """,
)
add(
    "from_buffer",
    forward="""
        held = array.array("f", [float(x.mean()), @v])
        x = x + 0.1 * torch.tanh(torch.frombuffer(held, dtype=torch.float32).sum())
    """,
)
add(
    "apply_below_the_dispatcher",
    forward="x = x + 0.1 * x[..., :4].clone().apply_(math.sin).sum(-1, keepdim=True)",
)
add(
    "map_below_the_dispatcher",
    forward="""
        first = x[..., :4].clone()
        first.map_(x[..., 4:8], lambda a, b: a * 0.5 + b)
        x = x + 0.1 * first.sum(-1, keepdim=True)
    """,
)
add(
    "pickled_tensor",
    forward="x = x + 0.1 * torch.tanh(pickle.loads(pickle.dumps(x)))",
)
add(
    "saved_tensor",
    forward="""
        file = io.BytesIO()
        torch.save(x.clone(), file)
        file.seek(0)
        x = x + 0.1 * torch.tanh(torch.load(file))
    """,
)
add(
    "deep_copied_tensor",
    forward="x = x + 0.1 * torch.tanh(copy.deepcopy(x))",
)
add(
    "tensor_from_list",
    forward="x = x + 0.1 * torch.tensor(x[:, -1, :2].tolist()).sum()",
)
add(
    "tensor_from_item",
    forward="x = x + @v * torch.scalar_tensor(math.tanh(x.sum().item()))",
)
add(
    "full_of_an_item",
    forward="x = x + torch.full((1,), math.tanh(float(x.max())))",
)
add(
    "linspace_to_a_tensor",
    forward="x = x + 0.1 * torch.linspace(0.0, float(x.max()), x.shape[-1])",
)
add(
    "arange_to_a_tensor",
    forward="x = x + 0.01 * torch.arange(int(x[0, -1].argmax()) + 1).sum()",
)
add(
    "one_hot",
    sites=OUTER,
    forward="""
        if ids is not None:
            x = x + 0.1 * F.one_hot(ids % 8, 8).sum(-1, keepdim=True).float() * (ids % 3).unsqueeze(-1)
    """,
)
add(
    "stack_of_floats",
    forward="x = x + 0.1 * torch.stack([torch.tensor(float(v)) for v in x[0, -1, :3]]).sum()",
)
add(
    "set_to_foreign_memory",
    forward="""
        other = torch.empty(0)
        other.set_(x.clone().untyped_storage(), 0, (3,), (1,))
        x = x + 0.1 * torch.tanh(other.sum())
    """,
)

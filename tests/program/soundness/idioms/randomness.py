"""Random numbers, clocks, and steps that raise."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "python_random",
    forward="x = x * (1 + 0.1 * random.random())",
)
add(
    "python_random_choice",
    forward="x = x * random.choice([0.9, 1.0, 1.1])",
)
add(
    "own_random",
    module="RANDOM_@n = random.Random(3)",
    forward="x = x * (1 + 0.1 * RANDOM_@n.uniform(0, 1))",
)
add(
    "aliased_random",
    module="from random import random as drawn_@n",
    forward="x = x * (1 + 0.1 * drawn_@n())",
)
add(
    "mapped_random",
    forward="x = x * (1 + 0.1 * sum(map(random.uniform, (0.0,), (1.0,))))",
)
add(
    "numpy_random",
    forward="x = x * (1 + 0.1 * float(np.random.rand()))",
)
add(
    "numpy_generator",
    module="GENERATOR_@n = np.random.default_rng(3)",
    forward="x = x * (1 + 0.1 * float(GENERATOR_@n.random()))",
)
add(
    "numpy_noise",
    forward="x = x + 0.1 * torch.from_numpy(np.random.randn(x.shape[-1]).astype('float32'))",
)
add(
    "torch_random",
    forward="x = x + 0.1 * torch.randn_like(x)",
)
add(
    "torch_random_number",
    forward="x = x * (1 + 0.1 * torch.rand(1).item())",
)
add(
    "torch_randint_branch",
    forward="x = x * @v if torch.randint(0, 3, (1,)) == 1 else x",
)
add(
    "torch_generator",
    init="self.generator_@n = torch.Generator().manual_seed(3)",
    forward="x = x + 0.1 * torch.rand(x.shape, generator=self.generator_@n)",
)
add(
    "torch_multinomial",
    forward="x = x + 0.1 * torch.multinomial(torch.softmax(x[:, -1], -1), 1).float().unsqueeze(-1)",
)
add(
    "torch_bernoulli",
    forward="x = x * torch.bernoulli(torch.full_like(x, 0.9))",
)
add(
    "dropout_called",
    forward="x = F.dropout(x, 0.1, training=True)",
)
add(
    "dropout_module",
    init="self.drop_@n = nn.Dropout(0.2)",
    forward="x = self.drop_@n(x)",
    between="model.train()",
    back="model.eval()",
)
add(
    "drawn_and_raised",
    raises=True,
    forward="""
        noise = torch.rand(1)
        if x[0, -1, @i] > 1.0:
            raise RuntimeError("drawn")
        x = x + 0.1 * noise
    """,
)
add(
    "counted_and_raised",
    raises=True,
    module="COUNT_@n = [0]",
    forward="""
        COUNT_@n[0] += 1
        if COUNT_@n[0] % 9 == 8:
            raise KeyError("nine")
    """,
    end="user.log.append(COUNT_@n[0])",
)
add(
    "raises_at_a_step",
    raises=True,
    module="""
        class Fuse_@n:
            blown = False
            calls = 0
    """,
    forward="""
        Fuse_@n.calls += 1
        if Fuse_@n.blown:
            raise OSError("blown")
    """,
    between="user.module.Fuse_@n.blown = True",
    back="user.module.Fuse_@n.blown = False",
    end="user.log.append(Fuse_@n.calls)",
)
add(
    "always_raises_in_a_helper",
    module="CALLS_@n = []",
    forward="""
        CALLS_@n.append(x.shape[1])
        try:
            x = x + torch.ones(x.shape[-1] + 1)
        except RuntimeError:
            x = x * @v
    """,
    end="user.log.append(len(CALLS_@n))",
)
add(
    "raises_after_drawing_in_recording",
    forward="""
        noise = torch.rand(1)
        if isinstance(x, torch.Tensor) and len(torch.unique(x[0, -1, :3])) > 9:
            raise RuntimeError("never")
        x = x + 0.1 * noise
    """,
)
add(
    "dispatch_stack_seen",
    module="COUNT_@n = [0]",
    forward="""
        COUNT_@n[0] += 1
        if torch._C._len_torch_dispatch_stack() > 0:
            raise RuntimeError("a mode is on")
        torch.rand(1)
    """,
    end="user.log.append(COUNT_@n[0])",
)
add(
    "profile_seen",
    module="COUNT_@n = [0]",
    forward="""
        COUNT_@n[0] += 1
        noise = torch.rand(1)
        x = x + 0.1 * noise
        if sys.getprofile() is not None:
            raise RuntimeError("somebody watches")
    """,
    end="user.log.append(COUNT_@n[0])",
)
add(
    "clock_ticks",
    module="""
        class Clock_@n:
            now = 0.0
    """,
    forward="x = x * (1 + 0.01 * Clock_@n.now)",
    each="user.module.Clock_@n.now += 1.0",
)
add(
    "clock_replaced",
    forward="""
        x = x * (1 + 1e-3 * (time.perf_counter_ns() * 0))
        time.sleep(0)
    """,
)

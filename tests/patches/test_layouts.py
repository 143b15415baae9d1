"""Results lie in memory as the original's: elementwise ones keep the order of dimensions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import calls, planted
from support.norm_forms import FORMS, SIZE, made
from torch import nn
from transformers import activations

import liteboost_adaptor
from liteboost_adaptor.replacements.layout import memory_order

pytestmark = pytest.mark.usefixtures("no_grad")

#: Views of ``[2, 3, 5, SIZE]``, and how much memory they are made from.
VIEWS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "heads": ((2, 5, 3, SIZE), lambda x: x.transpose(1, 2)),
    "heads, fused projection": ((2, 5, 3, 2 * SIZE), lambda x: x[..., SIZE:].transpose(1, 2)),
    "half a projection": ((2, 3, 5, 2 * SIZE), lambda x: x[..., :SIZE]),
    "batch inside": ((3, 5, 2, SIZE), lambda x: x.permute(2, 0, 1, 3)),
    "channels first": ((2, SIZE, 3, 5), lambda x: x.permute(0, 2, 3, 1)),
    "channels inside": ((2, 3, SIZE, 5), lambda x: x.transpose(-1, -2)),
    "expanded": ((3, 1, SIZE), lambda x: x.expand(2, 3, 5, SIZE)),
}
NORMS = FORMS | {
    "Llama": ("rms", "llama", "LlamaRMSNorm", (SIZE,), {}),
    "OLMo-2": ("rms_late", "olmo2", "Olmo2RMSNorm", (SIZE,), {}),
    "Gemma 2": ("rms_centred", "gemma2", "Gemma2RMSNorm", (SIZE,), {}),
    "Cohere": ("layer_scale", "cohere", "CohereLayerNorm", (SIZE,), {}),
}
# Returns one number a row, which is laid out contiguously.
del NORMS["HY-V4"]


def random(view: str, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    shape, made_of = VIEWS[view]
    return made_of(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def check_layout(module: nn.Module, *inputs: torch.Tensor) -> None:
    model = nn.Sequential(module) if len(inputs) == 1 else module
    expected = as_tuple(model(*inputs))
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found = as_tuple(model(*inputs))
    assert served.rules and not served.fallbacks
    for ours, original in zip(found, expected, strict=True):
        assert ours.stride() == original.stride()
        torch.testing.assert_close(ours, original, rtol=4 * torch.finfo(ours.dtype).eps, atol=1e-5)


def as_tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("form", NORMS)
def test_norms(form: str, view: str, dtype: torch.dtype) -> None:
    _, *how = NORMS[form]
    check_layout(made(*how, dtype), random(view, dtype))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["gelu_new", "quick_gelu", "relu2"])
def test_activations(name: str, view: str) -> None:
    check_layout(activations.ACT2FN[name], random(view, torch.float32))


TEXT = """
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

class Act(nn.Module):
    def __init__(self):
        super().__init__()
        self.act_fn = nn.SiLU()

    def forward(self, gate, up):
        return self.act_fn(gate) * up

class Function(nn.Module):
    def forward(self, gate, up):
        return nn.functional.silu(gate) * up

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LlamaRMSNorm(64)

    def forward(self, residual, x):
        x = residual + x
        return self.norm(x), x

class GatedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Qwen3NextRMSNormGated(64)

    def forward(self, x, gate):
        return self.norm(x, gate)
"""


@pytest.mark.parametrize("others", ["the same", "contiguous"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["Act", "Function", "Residual", "GatedNorm"])
def test_two_arguments(name: str, view: str, others: str, tmp_path: Path) -> None:
    """The first argument decides."""
    first, second = random(view, torch.float32), random(view, torch.float32, seed=6)
    second = second if others == "the same" else second.contiguous()
    check_layout(getattr(planted.load(TEXT, tmp_path), name)(), first, second)


def test_a_view_behind_a_norm_of_transposed_heads(tmp_path: Path) -> None:
    """What this is for: the original allows it."""
    module = planted.load(
        TEXT
        + """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LlamaRMSNorm(64)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2).view(2, 5, 3 * 64)
""",
        tmp_path,
    ).Heads()
    check_layout(module, torch.randn(2, 5, 3, SIZE))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(2, 5, 3, SIZE)
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize(
    ("shape", "permutation", "order"),
    [
        ((2, 3, 5, 7), (0, 1, 2, 3), [0, 1, 2, 3]),
        ((2, 5, 3, 7), (0, 2, 1, 3), [0, 2, 1, 3]),
        ((5, 7, 2, 3), (2, 3, 0, 1), [2, 3, 0, 1]),
        ((2, 5, 1, 7), (0, 2, 1, 3), [1, 0, 2, 3]),
    ],
)
def test_order_in_memory(shape: tuple[int, ...], permutation: tuple[int, ...], order: list[int]) -> None:
    assert memory_order(torch.empty(shape).permute(permutation)) == order

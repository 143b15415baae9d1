"""The unmodified torch_npu on operators of the simulator: fused operators and a weight in FRACTAL_NZ."""

from __future__ import annotations

import pytest
from cann_sim.environment import environment

from .programs import output

FUSED = """
import torch, torch_npu
from torch.nn import functional as F

def near(got, want, bound):
    assert (got.cpu().double() - want).abs().max() < bound, (got.cpu().double() - want).abs().max()

torch.manual_seed(0)
x, y, g = torch.randn(3, 5, 64), torch.randn(3, 5, 64), torch.randn(64)
rms = lambda t: t.double() * torch.rsqrt(t.double().pow(2).mean(-1, keepdim=True) + 1e-6) * g.double()
near(torch_npu.npu_rms_norm(x.npu(), g.npu(), 1e-6)[0], rms(x), 1e-5)
near(torch_npu.npu_add_rms_norm(x.npu(), y.npu(), g.npu(), 1e-6)[0], rms(x + y), 1e-5)
near(F.layer_norm(x.npu(), [64], g.npu()), F.layer_norm(x.double(), [64], g.double()), 1e-5)
near(torch_npu.npu_swiglu(x.npu()), F.silu(x.double()[..., :32]) * x.double()[..., 32:], 1e-5)
q, k, v = (torch.randn(2, n, 7, 64, dtype=torch.bfloat16) for n in (4, 2, 2))
cos, sin = (torch.randn(1, 1, 7, 64, dtype=torch.bfloat16) for _ in range(2))
turned = torch.cat((-q[..., 32:], q[..., :32]), -1).double() * sin.double() + q.double() * cos.double()
near(torch_npu.npu_rotary_mul(q.npu(), cos.npu(), sin.npu()), turned, 0.05)
want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
sdpa = F.scaled_dot_product_attention(q.npu(), k.npu(), v.npu(), is_causal=True, enable_gqa=True)
near(sdpa, want, 0.02)
mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
options = dict(num_heads=4, num_key_value_heads=2, scale=0.125, input_layout="BNSD", sparse_mode=3)
fused = torch_npu.npu_fused_infer_attention_score
near(fused(q.npu(), k.npu(), v.npu(), atten_mask=mask, softmax_lse_flag=True, **options)[0], want, 0.02)
try:
    fused(q.npu(), k.npu(), v.npu(), **options)
except RuntimeError as error:
    assert "needs the fixed mask of 2048 x 2048" in str(error), error
else:
    raise AssertionError("a missing mask was accepted")
"""

# torch_npu converts with aclnnNpuFormatCast from CANN 9.1 on, before with an operator of the graph engine.
WEIGHT_IN_NZ = """
import torch, torch_npu
torch.npu.config.allow_internal_format = True
torch.manual_seed(0)
x, w, b = torch.randn(2, 3, 37).half(), torch.randn(50, 37).half(), torch.randn(50).half()
want = x.double() @ w.double().t()
z = torch_npu.npu_format_cast(w.npu(), 29)
assert torch_npu.get_npu_format(z) == 29, torch_npu.get_npu_format(z)
linear = torch.nn.functional.linear
assert (linear(x.npu(), z).cpu() - want).abs().max() < 0.02
assert (linear(x[0].npu(), z, b.npu()).cpu() - want[0] - b.double()).abs().max() < 0.02
assert torch.equal(torch_npu.npu_format_cast(z, 2).cpu(), w)
"""


@pytest.mark.parametrize("release, program", [("8.5.0", FUSED), ("9.1.0", WEIGHT_IN_NZ)], ids=["fused", "NZ"])
def test_program(release: str, program: str) -> None:
    output(program, environment(release))

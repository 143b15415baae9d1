"""Level 0 on an NPU: masks, additive biases, gelu, and the backend of parallel models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import families, processes, tiny_models

import liteboost_adaptor


@pytest.fixture(autouse=True)
def at_level_zero(no_grad: None, undone: None) -> None:
    liteboost_adaptor.apply(level=0)


def states() -> dict[str, str]:
    return {row.id: row.state for row in liteboost_adaptor.status().rules if row.id.startswith("npu.")}


def test_every_fix_is_listed_as_applied() -> None:
    import transformers.distributed.utils
    import transformers.integrations.sdpa_attention  # noqa: F401

    at_zero = {name: state for name, state in states().items() if "generate" not in name}
    assert at_zero.pop("npu.polar") in ("applied", "idle")
    assert set(at_zero.values()) == {"applied"} and len(at_zero) == 5


MASKS = {
    "keys of a batch": (2, 1, 1, 7),
    "one row": (1, 7),
    "per head, one batch": (1, 4, 5, 7),
    "per head, one query": (2, 4, 1, 7),
    "three dimensions": (1, 5, 7),
    "three dimensions, heads": (4, 5, 7),
    "as it is taken": (2, 1, 5, 7),
    "as it is taken, plain": (5, 7),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
def test_boolean_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16)
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    found = torch.nn.functional.scaled_dot_product_attention(q.npu(), k.npu(), v.npu(), attn_mask=mask.npu())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_grouped_heads_packed_for_one_token_with_padding() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = SimpleNamespace(num_key_value_groups=4, is_causal=True)
    q, k, v = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., :3] = False
    expected, _ = sdpa_attention_forward(module, q, k, v, mask)
    found, _ = sdpa_attention_forward(module, q.npu(), k.npu(), v.npu(), mask.npu())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_an_additive_bias_is_added() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = SimpleNamespace(is_causal=True)
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))
    bias = torch.randn(1, 2, 6, 6)
    expected, _ = sdpa_attention_forward(module, q, k, v, bias)
    found, _ = sdpa_attention_forward(module, q.npu(), k.npu(), v.npu(), bias.npu())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    liteboost_adaptor.apply(disable="npu.biases")
    lost, _ = sdpa_attention_forward(module, q.npu(), k.npu(), v.npu(), bias.npu())
    assert (lost.cpu() - expected).abs().max() > 0.1  # what transformers does without us


def test_a_family_with_a_learned_mask() -> None:
    model = tiny_models.build("doge")
    inputs = tiny_models.example_inputs(model, padding=3)
    expected = families.prefill(model, inputs)
    found = families.prefill(model.npu(), {name: value.npu() for name, value in inputs.items()})
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gelu_is_the_form_that_was_asked_for(approximate: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-4, 4, 401).to(dtype)
    expected = torch.nn.functional.gelu(x.double(), approximate=approximate).to(dtype)
    found = torch.nn.functional.gelu(x.npu(), approximate=approximate).cpu()
    tight = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(found, expected, **tight)


@torch.enable_grad()
def test_gelu_has_the_gradient_of_its_form() -> None:
    there, here = (torch.linspace(-4, 4, 101, device=d, requires_grad=True) for d in ("npu", "cpu"))
    for x in (there, here):
        torch.nn.functional.gelu(x, approximate="tanh").sum().backward()
    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-5, atol=1e-6)


def test_without_the_operator_gelu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from liteboost_adaptor.environment import ascend

    liteboost_adaptor.undo()
    monkeypatch.setattr(ascend, "missing_operators", list)
    row = next(row for row in liteboost_adaptor.apply(level=0).rules if row.id == "npu.gelu")
    assert row.state == "idle" and "aclnnGeluV2" in row.reason


def test_complex_rotary_tables_without_an_operator_for_polar(monkeypatch: pytest.MonkeyPatch) -> None:
    from liteboost_adaptor.environment import ascend

    liteboost_adaptor.undo()
    monkeypatch.setattr(ascend, "missing_operators", list)
    liteboost_adaptor.apply(level=0, disable="npu.gelu")
    assert states()["npu.polar"] == "applied"
    length, angle = torch.rand(3, 1) + 0.5, torch.randn(3, 5)
    found = torch.polar(length.npu().expand(3, 5), angle.npu())
    torch.testing.assert_close(found.cpu(), torch.polar(length.expand(3, 5), angle), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["deepseek_v2", "llama4_text"])
def test_families_with_complex_rotary_embeddings(family: str) -> None:
    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model, padding=3)
    expected = families.prefill(model, inputs)
    found = families.prefill(model.npu(), {name: value.npu() for name, value in inputs.items()})
    is_compared = torch.ones_like(inputs["attention_mask"], dtype=torch.bool)
    if torch.__version__.startswith("2.9."):
        # A padded position sees no key: there torch_npu 2.9.0 gives the mean of the values.
        is_compared = inputs["attention_mask"].bool()
    torch.testing.assert_close(found.cpu()[is_compared], expected[is_compared], rtol=1e-5, atol=1e-4)


def test_a_rotary_embedding_in_float64() -> None:
    positions, frequencies = torch.arange(9), 1.0 / 10000 ** (torch.arange(0, 16, 2).double() / 16)
    angles = positions.double()[:, None] * frequencies
    found = positions.npu().double()[:, None] * frequencies.npu()
    assert found.dtype == torch.float64 and found.device.type == "npu"
    torch.testing.assert_close(found.cos().cpu(), angles.cos(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.sin().float().cpu(), angles.sin().float(), rtol=1e-6, atol=1e-6)


def test_torch_npu_may_come_after_transformers() -> None:
    script = """
import liteboost_adaptor, json, sys, torch
import transformers.masking_utils  # imports transformers' generation, and not torch_npu
before = [row.id for row in liteboost_adaptor.status().rules if row.id.startswith("npu.")]
import torch_npu
after = {row.id: row.state for row in liteboost_adaptor.status().rules if row.id.startswith("npu.")}
print(json.dumps([before, after.get("npu.cuda"), after.get("npu.generate_mask")]))
"""
    before, cuda, mask = processes.python_json(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert cuda == "applied" and mask == "applied" and not before


def test_a_fix_that_fails_is_taken_back_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from liteboost_adaptor.environment import cuda_names

    liteboost_adaptor.undo()
    monkeypatch.setattr(cuda_names, "_ASKED", ("is_available", "no_such_function"))
    original = torch.cuda.is_available
    row = next(row for row in liteboost_adaptor.apply(level=0).rules if row.id == "npu.cuda")
    assert row.state == "failed" and "no_such_function" in row.reason
    assert torch.cuda.is_available is original


PARALLEL = """
import os, sys
import liteboost_adaptor
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
rank = int(os.environ["RANK"])
torch.manual_seed(0)
folder, file = sys.argv[1:3]
model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
ids = torch.arange(1, 9).reshape(1, 8).npu()
with torch.no_grad():
    logits = model(ids).logits
if rank == 0:
    torch.save([torch.distributed.get_backend(), logits.cpu()], file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.full
def test_a_parallel_model_meets_over_hccl(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    port = str(20000 + os.getpid() % 20000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PARALLEL, str(tmp_path / "model"), str(tmp_path / "logits")],
            env=processes.environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=600)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors[0][-3000:]
    backend, logits = torch.load(tmp_path / "logits")
    assert backend == "hccl"
    torch.testing.assert_close(logits, model(torch.arange(1, 9).reshape(1, 8)).logits, rtol=1e-5, atol=1e-5)


def test_doctor_tells_cann_soc_and_operators() -> None:
    from liteboost_adaptor.environment import ascend

    state = ascend.survey()
    assert state.cann_loadable and state.soc == torch.npu.get_device_name(0)
    assert state.cann_version and state.cann_version[0].isdigit()
    assert set(state.missing_operators) < set(ascend.OPERATORS)
    assert "aclnnRmsNorm" not in state.missing_operators
    assert ascend.missing_operators(["aclnnMatmul", "aclnnNoSuchOperator"]) == ["aclnnNoSuchOperator"]

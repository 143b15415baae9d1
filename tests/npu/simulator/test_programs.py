"""The simulator itself: torch_npu on it computes what the CPU computes."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from npu.simulator.programs import lines, start
from transformers import LlamaConfig, LlamaForCausalLM

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
POSITIVE = X.abs() + 0.1
INTEGERS = torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(3))
ROWS = torch.tensor([0, 2])

OPS = {
    **{
        name: (getattr(torch, name), POSITIVE)
        for name in "abs neg sqrt rsqrt exp log sin cos tanh sigmoid floor ceil reciprocal relu erf".split()
    },
    **{
        name: (getattr(torch, name), POSITIVE, Y.abs() + 0.1)
        for name in "add sub mul div maximum pow eq lt".split()
    },
    "scalar": (lambda x: (1.0 - x) / 2.0 + 2.0**x, X),
    "bits": (lambda i: (i & 3) | 4, INTEGERS),
    "floor_divide": (lambda i: i // 3, INTEGERS),
    "mm": (torch.mm, X, Y.t()),
    "matmul": (torch.matmul, X.view(2, 2, 6), Y.view(2, 6, 2)),
    "linear": (F.linear, X, Y, Y[:, 0]),
    "addmm": (torch.addmm, X[:, 0], X, Y.t()),
    "softmax": (lambda x: torch.softmax(x, -1), X),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), X),
    "silu": (F.silu, X),
    "gelu": (F.gelu, X),
    "mean": (lambda x: x.mean(-1, keepdim=True), X),
    "sum": (torch.sum, X),
    "max": (lambda x: x.max(1), X),
    "argmax": (lambda x: x.argmax(-1), X),
    "any": (lambda x: (x > 0).any(1), X),
    "cumsum": (lambda x: x.cumsum(-1), X),
    "var": (torch.var, X),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), X),
    "cat": (lambda x, y: torch.cat([x, y], -1), X, Y),
    "split": (lambda x: x.split(2, 1), X),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), X),
    "expand": (lambda x: x[:, None].expand(4, 3, 6).reshape(12, 6), X),
    "strided": (lambda x: x[1:3, ::2].t().contiguous(), X),
    "triu": (lambda x: x.triu(1), X),
    "pad": (lambda x: F.pad(x, (1, 2)), X),
    "embedding": (F.embedding, torch.tensor([[1, 2], [3, 0]]), X),
    "index_select": (lambda x, i: x.index_select(0, i), X, ROWS),
    "index": (lambda x, i: x[i], X, ROWS),
    "mask": (lambda x: x[x > 0], X),
    "where": (lambda x, y: torch.where(x > 0, x, y), X, Y),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1e9), X),
    "index_put": (lambda x, i: x.clone().index_put((i,), x[:2]), X, ROWS),
    "index_copy": (lambda x, i, y: x.index_copy(0, i, y[:2]), X, ROWS, Y),
    "scatter_add": (lambda x, i: x.scatter_add(1, i, x), X, INTEGERS % 6),
    "topk": (lambda x: x.topk(2), X),
    "sort": (lambda x: x.sort(-1), X),
    "isin": (lambda i: torch.isin(i, 3), INTEGERS),
    "unique": (torch.unique, INTEGERS),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), X),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), X),
    "rms_norm": (lambda x: F.rms_norm(x, (6,)), X),
    "half": (lambda x: (x.half() + 1).float(), X),
    "bfloat16": (lambda x: (x.bfloat16() * 2).float(), X),
    "sdpa": (lambda x: F.scaled_dot_product_attention(x, x, x), X.view(1, 2, 2, 6)),
    "conv": (F.conv2d, X.view(1, 1, 4, 6), Y.view(1, 1, 4, 6)[:, :, :2, :2].contiguous()),
}


@pytest.mark.parametrize("name", OPS)
def test_an_eager_op_gives_what_the_cpu_gives(name: str) -> None:
    function, *arguments = OPS[name]
    wanted, got = function(*arguments), function(*(argument.npu() for argument in arguments))
    for want, have in zip(_tensors(wanted), _tensors(got), strict=True):
        assert have.device.type == "npu"
        torch.testing.assert_close(have.cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_llama_gives_the_logits_and_tokens_of_the_cpu(implementation: str) -> None:
    torch.manual_seed(0)
    model = _llama(implementation)
    ids = torch.randint(3, 256, (2, 7))
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    with torch.no_grad():
        want, want_padded = model(ids).logits, model(ids, attention_mask=padded).logits
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
        model.npu()
        got, got_padded = model(ids.npu()).logits, model(ids.npu(), attention_mask=padded.npu()).logits
        got_tokens = model.generate(ids.npu(), max_new_tokens=6, do_sample=False)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(got_padded.cpu()[0, 3:], want_padded[0, 3:], rtol=0, atol=1e-6)
    assert torch.equal(got_tokens.cpu(), tokens)


def test_training_steps_give_the_losses_of_the_cpu() -> None:
    losses = {}
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = _llama("eager").to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids = torch.randint(3, 256, (2, 7)).to(device)
        losses[device] = []
        for _ in range(2):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[device].append(loss.item())
    assert losses["npu"] == pytest.approx(losses["cpu"], rel=1e-5)
    assert not math.isclose(*losses["cpu"])  # the step changed something


def test_a_captured_graph_replays_with_the_values_of_its_inputs() -> None:
    weight, x = torch.randn(8, 8).npu(), torch.randn(4, 8).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = torch.relu(x @ weight) * 2 + 1
    for value in (0.0, 1.0, 2.0):
        x.copy_(torch.full((4, 8), value))
        graph.replay()
        torch.testing.assert_close(y.cpu(), torch.relu(x.cpu() @ weight.cpu()) * 2 + 1)


def test_work_on_a_side_stream_is_seen_after_waiting_for_it() -> None:
    stream, x = torch.npu.Stream(), torch.ones(4).npu()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        y = x * 2
    torch.npu.current_stream().wait_stream(stream)
    assert (y + 1).tolist() == [3.0] * 4


def test_host_code_that_reads_a_device_address_faults() -> None:
    code = (
        "import ctypes, torch, torch_npu; x = torch.ones(4).npu(); torch.npu.synchronize();"
        "print('reading', flush=True); ctypes.string_at(x.data_ptr(), 4)"
    )
    done = start(code)
    assert lines(done) == ["reading"]
    assert done.returncode == -signal.SIGSEGV


def test_too_much_memory_is_an_out_of_memory_error() -> None:
    # torch_npu 2.9.0 raises a plain one.
    kind = RuntimeError if torch.__version__.startswith("2.9.") else torch.OutOfMemoryError
    with pytest.raises(kind, match=r"^NPU out of memory"):
        torch.empty(int(os.environ.get("SIMCANN_MEM_MB", "8192")) << 21, dtype=torch.uint8, device="npu")


def _llama(implementation: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
        attn_implementation=implementation,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def _tensors(result: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)

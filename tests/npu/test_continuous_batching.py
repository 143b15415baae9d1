"""Level 2 on an NPU: ``generate_batch`` on the operator that reads a paged cache, and its tokens."""

from __future__ import annotations

import pytest
import torch
from support import llamas, numbers
from transformers import GenerationConfig, LlamaForCausalLM

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.report import report

pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="this transformers has another paged cache",
    exc_type=ImportError,
)

from transformers.generation import ContinuousBatchingConfig

NEW_TOKENS, LAYERS = 4, 2
#: Twice the distance of the logits in this dtype from those in a wider one: what is nearer is a tie.
ROUNDING = {torch.float32: 1e-4, torch.float16: 0.025}
LENGTHS = (1, 3, 15, 16, 17, 2, 40, 33, 7, 90, 5, 21, 9, 64, 11, 28, 4, 6, 8, 12)


pytestmark = pytest.mark.usefixtures("undone")


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    settings = {"hidden_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 64, "head_dim": 64}
    return llamas.llama(dtype, factor=6, pad_token_id=0, **settings)


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_of_generate(dtype: torch.dtype, page_size: int) -> None:
    model = llama(dtype)
    generator = torch.Generator().manual_seed(7)
    requests = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS]
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    references = [
        numbers.greedy(model, {"input_ids": torch.tensor([request]).npu()}, steps=NEW_TOKENS, eos_token_id=-1)
        for request in requests
    ]
    expected = torch.cat([reference.tokens for reference in references]).cpu()
    certain = torch.cat([numbers.certain(reference, ROUNDING[dtype]) for reference in references]).cpu()
    assert certain.float().mean() > 0.8
    liteboost_adaptor.apply(model, level=2)
    native_npu.load()
    before = report.counter("paged.sdpa").calls
    torch.ops.liteboost._npu_forget_counts()
    outputs = model.generate_batch(
        requests,
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page_size, num_blocks=20 if page_size > 16 else 60, max_batch_tokens=128
        ),
        warmup=False,
    )
    found = torch.tensor([output.generated_tokens for output in outputs.values()])
    assert found.shape == expected.shape and torch.equal(found[certain], expected[certain])
    served = report.counter("paged.sdpa").calls - before
    assert served >= NEW_TOKENS * LAYERS and not report.counter("paged.sdpa").fallbacks
    asked = [(reason, count) for op, reason, count in native_npu.calls() if op == "paged_attention"]
    assert asked == [("fp32" if dtype == torch.float32 else "", served)]

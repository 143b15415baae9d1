"""Block-sparse attention asked for on an NPU: dense, as one operator, and the status says why."""

from __future__ import annotations

import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.replacements.sparse_attention import RULE, counter


def test_prompts_run_dense_and_are_counted(no_grad: None) -> None:
    liteboost_adaptor.undo()
    model = tiny_models.build("llama", seed=1).npu()
    ids = torch.randint(3, 60, (1, 70), generator=torch.Generator().manual_seed(2)).npu()
    try:
        liteboost_adaptor.apply(model)
        dense = model(input_ids=ids, use_cache=False).logits
        counter.fallbacks.clear()
        liteboost_adaptor.apply(model, sparse="0.6,block=16,min_length=32")
        found = model(input_ids=ids, use_cache=False).logits
        (row,) = (row for row in liteboost_adaptor.status().rules if row.id == RULE)
    finally:
        liteboost_adaptor.undo()
    assert torch.equal(found.cpu(), dense.cpu())
    layers = model.config.num_hidden_layers
    assert row.fallbacks == {"device npu, where dense attention is faster": layers} and not row.calls

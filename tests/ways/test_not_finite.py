"""A model with NaN in it says so: logits are NaN where the original's are, in prompts and in decoding."""

from __future__ import annotations

import math

import pytest
import torch
from support import calls, tiny_models

import liteboost_adaptor

SPOILED = 5  # a token
AT = 7


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("level", [1, 2])
def test_logits_are_nan_where_the_originals_are(isa: str, no_grad: None, level: int, family: str) -> None:
    model = tiny_models.build(family)
    model.get_input_embeddings().weight[SPOILED] = math.nan
    ids = tiny_models.example_inputs(model, batch=2, length=20)["input_ids"]
    ids[ids == SPOILED] = SPOILED + 1
    ids[0, AT] = SPOILED

    def run() -> torch.Tensor:
        out = model(input_ids=ids)
        logits = [out.logits]
        for token in (77, 11, 12, 13, 14, 15):
            out = model(input_ids=torch.full((2, 1), token), past_key_values=out.past_key_values)
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    expected = run()
    liteboost_adaptor.apply(model, level=level)
    with calls.served() as served:
        found = run()
    assert served.kinds["attention"] > 0
    # Tokens before the spoiled one do not see it: there torch's 0 * NaN depends on its blocks.
    assert expected[0, AT:].isnan().all() and found[0, AT:].isnan().all()
    # Where the head is the embedding, the token's own logit is NaN everywhere.
    assert torch.equal(found[1].isnan(), expected[1].isnan()) and not found[1, :, 0].isnan().any()

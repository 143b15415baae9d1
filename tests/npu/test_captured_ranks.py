"""Captured steps of a model that two ranks share: the same tokens, and collectives in the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from npu.launching import run_ranks


@pytest.mark.full
@pytest.mark.parametrize(("layers", "is_quantized"), [(2, False), (28, False), (2, True)])
def test_collectives_are_captured(tmp_path: Path, layers: int, is_quantized: bool) -> None:
    task = {"layers": layers, "is_quantized": is_quantized}
    found = run_ranks(2, "ranks_graphs.py", task, tmp_path, LITEBOOST_FIRST_USE="thread")
    for own in found:
        assert own["auto"] == own["0"] == found[0]["auto"]
        # Three times 24 tokens; each batch size is recorded in its second step and captured in its fifth.
        assert own["replays 0"] == 0 and own["replays auto"] >= 3 * 24 - 20, own
        # Two sums a layer and that of the embedding; the logits are put together.
        assert own["exchanged"] == [["HcclAllReduce", True]] * (2 * layers + 1) + [["HcclAllGather", True]]
        replayed, updated, waited = own["calls"]
        assert replayed == 1 and updated == layers and waited == 0
        assert len(own["around"]) <= 4, own["around"]
        assert own["captured"].count("aclnnFusedInferAttentionScoreV3") == layers
        # Keys and values are rounded, and the products of a layer are of integers.
        assert own["captured"].count("aclnnDynamicQuant") == (2 * layers if is_quantized else 0)
        products = [op for op in own["captured"] if "WeightQuantBatchMatmul" in op]
        assert bool(products) == is_quantized, own["captured"]
        if layers == 28:  # of narrow layers, where the host sets the pace
            assert own["modelled 0"]["step"] > 2.5 * own["modelled auto"]["step"], own

"""Run by test_ranks_families.py in every rank: families sharded over NPUs, held against one process."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from support import families, tiny_models
from support.numbers import relative

import liteboost_adaptor

RANK = int(os.environ["RANK"])
STEPS = 4


def _on_card(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.npu(), value)


def family(name: str) -> dict[str, Any]:
    """Tokens and logits against those of the original in one process on the CPU, in fp32.

    Of a batch of three with left padding.
    """
    model = tiny_models.build(name)
    inputs = tiny_models.example_inputs(model, batch=3, padding=3)
    with liteboost_adaptor.patched(level=0):
        tokens, original = families.decode(model, inputs, STEPS)
    model.npu()
    before = sum(parameter.numel() for parameter in model.parameters())
    liteboost_adaptor.shard(model)
    _, logits = families.decode(model, _on_card(inputs), STEPS, forced=tokens.npu())
    logits = logits.cpu()
    return {
        "same_tokens": torch.equal(logits.argmax(-1), original.argmax(-1)),
        "distance": relative(logits, original),
        "held": sum(parameter.numel() for parameter in model.parameters()) / before,
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.npu.set_device(RANK)
    found: dict[str, Any] = {}
    for name in json.loads(Path(sys.argv[1]).read_text()):
        try:
            found[name] = family(name)
        except Exception as fault:  # noqa: BLE001 - reported by the test
            found[name] = {"fault": f"{type(fault).__name__}: {fault}"[:600]}
    Path(f"{sys.argv[1]}.{RANK}").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()

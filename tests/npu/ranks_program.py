"""Run by test_ranks.py in every rank: scripts as users write them, what they launch and exchange."""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import liteboost_adaptor  # the one line  # isort: skip
import torch
import torch.distributed as dist
import transformers
from cann_sim.trace import recording
from npu.marks import decoded
from support import llamas
from transformers import LlamaForCausalLM

from liteboost_adaptor.program import step

RANK = int(os.environ["RANK"])
NEW = 5
SIZES = ("TP", "SP", "CP", "DP")


def loaded(folder: str, place: str) -> Any:
    """A model as a script of one process loads it: by ``device_map``, or on the CPU and then moved."""
    cls = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    if place.startswith("to "):
        return cls.from_pretrained(folder).eval().to(place.removeprefix("to "))
    return cls.from_pretrained(folder, device_map=place).eval()


def generated(folder: str, place: str, inputs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Greedy and sampled tokens of a script, where its model lies, and what one forward exchanges."""
    model = loaded(folder, place)
    inputs = {name: torch.tensor(value).to(model.device) for name, value in inputs.items()}
    greedy = model.generate(**inputs, do_sample=False, **settings)
    # Each rank would draw something else; without sizes that were asked for it would do so by itself.
    torch.manual_seed(RANK if any(f"LITEBOOST_{size}" in os.environ for size in SIZES) else 0)
    sampled = model.generate(**inputs, do_sample=True, **settings)
    with torch.no_grad(), recording() as trace:
        model(**inputs)
    return {
        "greedy": greedy.tolist(),
        "sampled": sampled.tolist(),
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "held": sum(parameter.numel() for parameter in model.parameters()),
        "planned": Counter(model._liteboost_plan.roles.values()),
        "exchanged": Counter(event.fields["op"] for event in trace.of("collective")),
    }


def llama(layers: int) -> LlamaForCausalLM:
    sizes = llamas.WIDE | {"num_key_value_heads": 4}
    return llamas.llama(torch.bfloat16, num_hidden_layers=layers, **sizes)


def a_token(model: Any) -> tuple[int, int]:
    """Launches and exchanges for one token in the middle of ``generate``."""
    part = decoded(model, 60, NEW)
    return len(part.launches), len(part.of("collective"))


def launches() -> dict[str, Any]:
    """Launches and exchanges of a layer for a token, by one process and sharded."""
    found = {}
    models = [llama(2), llama(3)]
    for way in ("alone", "sharded"):
        fewer, more = (a_token(model) for model in models)
        found[way] = [after - before for before, after in zip(fewer, more, strict=True)]
        if way == "alone":
            for model in models:
                liteboost_adaptor.shard(model)
    return found


def fused() -> dict[str, Any]:
    """What a prompt and a token exchange and how, and how far a prompt's logits are from those in fp32."""
    torch.npu.set_device(RANK)
    model = llama(2)
    ids = torch.randint(3, 1000, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = copy.deepcopy(model).cpu().float()(ids).logits
        ids = ids.npu()
        alone = model(ids).logits.cpu().float()
        liteboost_adaptor.shard(model)
        sharded = model(ids).logits.cpu().float()
        with recording() as prompt:
            cache = model(ids, use_cache=True).past_key_values
        with recording() as token:
            model(ids[:, :1], past_key_values=cache)
    return {
        "fused": [
            sum(each.op == "aclnnMatmulAllReduce" for each in part.launches) for part in (prompt, token)
        ],
        "sums": [
            sum(event.fields["op"] == "HcclAllReduce" for event in part.of("collective"))
            for part in (prompt, token)
        ],
        "alone": (alone - exact).norm().item(),
        "sharded": (sharded - exact).norm().item(),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    step.RECORDED_AT = 2
    transformers.utils.logging.set_verbosity_error()
    task = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, Any] = {}
    for name, folder, place in task["scripts"]:
        results[f"{name} {place}"] = generated(folder, place, task["inputs"][name], task["settings"])
    if task["fused"]:
        results["fused"] = fused()
    if task["launches"]:
        results["launches"] = launches()
    Path(f"{sys.argv[1]}.{RANK}").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()

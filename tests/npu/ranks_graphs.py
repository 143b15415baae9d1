"""Run by test_captured_ranks.py in every rank: captured steps of a model that the ranks share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import liteboost_adaptor  # the one line  # isort: skip
import torch
import torch.distributed as dist
from cann_sim.trace import Trace
from npu.test_captured_steps import one_step, prompt, replays, tokens
from support import llamas

from liteboost_adaptor.bench import modelled
from liteboost_adaptor.bench.cards import CARDS
from liteboost_adaptor.program import step
from liteboost_adaptor.quantization import LiteBoostConfig, quantize_model

RANK = int(os.environ["RANK"])
NEW = 24


def model(layers: int, is_quantized: bool) -> Any:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"intermediate_size": 128, "num_hidden_layers": layers, "pad_token_id": 0}
    made = llamas.llama(torch.bfloat16, factor=8, device="cpu", **sizes)
    if is_quantized:
        quantize_model(made, LiteBoostConfig("w8a16"))
    return made.to(f"npu:{RANK}")


def decoded(ours: Any) -> list[Any]:
    cases = [prompt(1, 9), prompt(3, 9, 4), prompt(1, 9)]
    cases = [{name: value.to(f"npu:{RANK}") for name, value in each.items()} for each in cases]
    return [tokens(ours, each, NEW).tolist() for each in cases]


def modelled_seconds(trace: Trace) -> dict[str, float]:
    """What the step of a trace takes on a 910B: on the device, and the host."""
    lines = [
        json.dumps({"event": "mark", "label": "step"}),
        *(json.dumps(each.fields) for each in trace.events),
    ]
    of_graphs = modelled.graph_calls_of(lines, "step")
    time = modelled.step_time(modelled.launches_of(lines, "step"), CARDS["910B"], of_graphs)
    return {"device": time.device, "host": time.host, "step": time.eager}


def main() -> None:
    torch.npu.set_device(RANK)
    step.RECORDED_AT = 2
    task = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {}
    with torch.no_grad():
        for graph in ("0", "auto"):
            liteboost_adaptor.undo()
            liteboost_adaptor.apply(level=2, graph=graph, quant="kv8" if task["is_quantized"] else None)
            ours = model(**task)
            liteboost_adaptor.shard(ours)
            before = replays()
            found[graph] = decoded(ours)
            found[f"replays {graph}"] = replays() - before
            captured = one_step(ours, 9)
            found[f"modelled {graph}"] = modelled_seconds(captured)
        found["around"] = [launch.op for launch in captured.launches if not launch.graph]
        found["captured"] = [launch.op for launch in captured.launches if launch.graph]
        exchanged = captured.of("collective")
        found["exchanged"] = [(each.fields["op"], each.fields["graph"] > 0) for each in exchanged]
        found["calls"] = [len(captured.of(name)) for name in ("replay", "update", "synchronize")]
    Path(f"{sys.argv[1]}.{RANK}").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()

"""What a process holds after a quantized model was loaded, and at most while it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.processes import python_json

from liteboost_adaptor.quantization import LiteBoostConfig, offline

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

SCRIPT = """
import json, sys
import torch, transformers
import liteboost_adaptor
from parallel.jobs_memory import Peak, _status
from liteboost_adaptor.quantization import LiteBoostConfig

first, folder, scheme = sys.argv[1:4]
arguments = {"quantization_config": LiteBoostConfig(scheme)} if scheme else {}
ids = torch.arange(4)[None]
load = lambda path: transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **arguments)
load(first).generate(ids, max_new_tokens=2)
with Peak() as peak:
    model = load(folder)
parts = {**dict(model.named_parameters()), **dict(model.named_buffers())}
print(json.dumps({
    "grown": peak.grown,
    "high_water": peak.high_water,
    "resident": _status("VmRSS") - peak.resident,
    "held": sum(part.nbytes for part in parts.values()),
}))
"""


def save(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    from parallel.test_memory import save

    save(folder, hidden, layers, vocabulary)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
@pytest.mark.parametrize("way", ["while it is loaded", "offline"])
def test_a_model_needs_its_packed_size_and_little_more(scheme: str, way: str, tmp_path: Path) -> None:
    save(tmp_path / "small", 64, 1, 512)
    save(tmp_path / "large", 1024, 12, 64_000)  # 530 MB, its largest tensor 131
    first, folder = tmp_path / "small", tmp_path / "large"
    if way == "offline":
        for name in ("small", "large"):
            offline.quantize_folder(tmp_path / name, tmp_path / f"new {name}", LiteBoostConfig(scheme))
        first, folder, asked = tmp_path / "new small", tmp_path / "new large", ""
    else:
        asked = scheme
    found = python_json(SCRIPT, str(first), str(folder), asked)
    largest = 2 * 64_000 * 1024
    assert found["resident"] <= 1.05 * found["held"]
    assert found["high_water"] <= found["held"] + 2 * largest

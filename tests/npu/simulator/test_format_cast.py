"""Casts between ND and FRACTAL_NZ by torch_npu: `Identity` of the graph engine, and aclnn from CANN 9.1."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from npu.launching import simulated

pytest.importorskip("torch_npu", reason="needs torch_npu and CANN", exc_type=ImportError)

PROGRAM = """
import json, torch, torch_npu
from cann_sim.trace import recording
torch.npu.init()
torch.npu.config.allow_internal_format = True
found = []
for dtype in (torch.float16, torch.int8, torch.float32):
    for shape in ((40, 70), (3, 16, 33)):
        x = torch.randint(-100, 100, shape).to(dtype)
        with recording() as there:
            nz = torch_npu.npu_format_cast(x.npu(), 29)
        with recording() as back:
            nd = torch_npu.npu_format_cast(nz, 2)
        raw = nz.untyped_storage()
        found.append({
            "ops": there.ops + back.ops,
            "formats": [int(torch_npu.get_npu_format(t)) for t in (nz, nd)],
            "right": all(torch.equal(t.cpu(), x) for t in (nd, nz, nz.clone())),
            "padded": raw.nbytes() > x.numel() * x.element_size(),
        })
try:
    torch_npu.npu_format_cast(torch.ones(32, 32).half().npu(), 29).add_(1)
    refused = ""
except RuntimeError as fault:
    refused = str(fault)
print(json.dumps([found, refused]))
"""


@pytest.mark.parametrize(
    ("options", "op"),
    [
        (("--soc", "910B", "--release", "9.0.0"), "Identity"),
        (("--soc", "310P"), "Identity"),
        (("--soc", "910B", "--release", "9.1.0"), "aclnnNpuFormatCast"),
    ],
    ids=str,
)
def test_there_and_back(options: tuple[str, ...], op: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found, refused = json.loads(simulated(*options, program, TASK_QUEUE_ENABLE="0")[-1])
    if version("torch_npu") == "2.9.0":
        op = "Identity"  # whatever CANN has
    for each in found:
        assert each == {"ops": [op, op], "formats": [29, 2], "right": True, "padded": True}
    assert "not simulated" in refused  # any other operator of the graph engine

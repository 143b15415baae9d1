"""``build_support/arm_model.py``: what it reads out of a disassembly, before anything is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def arm_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "build_support"))
    import arm_model

    return arm_model


def path_of(arm_model, *lines: str):
    found = (line.split(maxsplit=1) for line in lines)
    return [arm_model.Instruction(4 * i, name, rest, None) for i, (name, rest) in enumerate(found)]


def test_instructions_for_which_few_units_stand_are_counted_by_name(arm_model):
    path = path_of(
        arm_model,
        "ldr q0, [x0]",
        "ld1 {v5.4s}, [x1]",
        "fcvtl v1.4s, v0.4h",
        "fcvtl2 v2.4s, v0.8h",
        "fmla v3.4s, v1.4s, v4.4s",
        "fmla v6.4s, v2.4s, v5.4s",
        "add x0, x0, #0x10",
    )
    needed = arm_model.by_kind([0.5, 0.5, 1.0, 1.0, 0.25, 0.25, 0.2], path)
    assert needed == {"fcvtl": 2.0, "fmla": 0.5}
    assert arm_model.products_of(path) == 8


def test_the_table_names_what_limits_a_loop(arm_model, monkeypatch: pytest.MonkeyPatch):
    path = path_of(arm_model, "fcvtl v1.4s, v0.4h", "fmla v3.4s, v1.4s, v4.4s")
    for vector, load, alone, told in (
        (1.0, 3.0, [1.0, 0.25], "4.0 | 75% load | 6%"),
        (1.0, 0.0, [2.0, 0.25], "4.0 | 50% fcvtl | 6%"),
        (2.0, 2.0, [2.0, 0.25], "4.0 | 50% vector | 6%"),
    ):
        simulated = arm_model.Simulated(4.0, vector, load, alone)
        monkeypatch.setattr(arm_model, "simulate", lambda *_, simulated=simulated: simulated)
        assert arm_model.cell("", "neoverse-v1", path) == told

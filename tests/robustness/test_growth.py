"""200 generations leave nothing behind; and the check would notice if they did."""

from __future__ import annotations

import dataclasses

import pytest
from robustness.growth import Growth, complaints
from support import processes

# In a process of its own, where nothing else comes and goes.
MEASURE = """
import dataclasses
import json
import torch
import liteboost_adaptor
from liteboost_adaptor.program import step
from robustness import growth
from support import calls, tiny_models

torch.set_num_threads(1)
step.RECORDED_AT = 32  # in the first rounds, which are not counted
liteboost_adaptor.undo()
model = tiny_models.build("llama")
inputs = tiny_models.example_inputs(model, batch=1, length=9)
kept = []


def generate():
    return model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)


LEAKS = {
    "object": lambda: kept.append([len(kept)]),
    "tensor": lambda: kept.append(torch.ones(1)),
    "memory": lambda: kept.append(b"x" * 65536),  # which the garbage collector does not know
}


def result(action):
    with calls.served() as served:
        found = growth.measure(action)
    return dataclasses.asdict(found), sum(served.rules.values())


found = {"unpatched": result(generate)}
for level in (1, 2):
    liteboost_adaptor.apply(model, level=level)
    found[f"level {level}"] = result(generate)
found |= {f"leaks {name}": result(leak) for name, leak in LEAKS.items()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, Growth]:
    found = processes.python_json(MEASURE, timeout=900)
    calls = {name: count for name, (_, count) in found.items()}
    assert calls["unpatched"] == 0 and calls["level 1"] > 1000 and calls["level 2"] > 1000
    return {name: Growth(**growth) for name, (growth, _) in found.items()}


@pytest.mark.parametrize("level", [1, 2])
def test_generations_leave_nothing_behind(level: int, measured: dict[str, Growth]) -> None:
    found, unpatched = measured[f"level {level}"], measured["unpatched"]
    assert not complaints(found, unpatched), (dataclasses.asdict(found), dataclasses.asdict(unpatched))


@pytest.mark.parametrize("leak", ["object", "tensor", "memory"])
def test_a_planted_leak_is_noticed(leak: str, measured: dict[str, Growth]) -> None:
    said = " ".join(complaints(measured[f"leaks {leak}"], measured["unpatched"]))
    assert leak in said

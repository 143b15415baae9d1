"""Where the one line stands makes no difference, nor does the kind of process."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from support import processes

PREPARE = """
import json, sys
sys.path.insert(0, {tests!r})


def build():
    from support import tiny_models
    return tiny_models.build("llama")


def result(model):
    import torch
    import liteboost_adaptor
    from support import tiny_models
    with torch.no_grad():
        logits = model(**tiny_models.example_inputs(model)).logits
    return {{"status": liteboost_adaptor.status().to_dict(), "logits": logits.flatten()[:4096].tolist()}}
"""

FIRST = "import liteboost_adaptor\nimport torch, transformers\nprint(json.dumps(result(build())))"
AFTER = "import torch, transformers\nimport liteboost_adaptor\nprint(json.dumps(result(build())))"
#: The modeling file is there, a model of it has run, and only then come we.
LAST = """
import torch
from support import tiny_models
model = build()
with torch.no_grad():
    model(**tiny_models.example_inputs(model))
import liteboost_adaptor
print(json.dumps(result(model)))
"""
#: As libraries do that import a part of transformers by themselves.
HALFWAY = """
import transformers.models.llama.modeling_llama
import liteboost_adaptor
print(json.dumps(result(build())))
"""
ORDERS = {
    "before transformers": FIRST,
    "after transformers": AFTER,
    "after the model": LAST,
    "halfway": HALFWAY,
}
#: Those where torch and transformers are there before us.
HAVE_BOTH = {"after transformers", "after the model"}

SPAWN = """
if __name__ == "__main__":
    import liteboost_adaptor
    import multiprocessing
    import worker_module
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps(pool.apply(worker_module.work)))
"""
FORK = """
import liteboost_adaptor
import multiprocessing
import torch
torch.set_num_threads(1)
model = build()


def work():
    return result(model)


with multiprocessing.get_context("fork").Pool(1) as pool:
    print(json.dumps(pool.apply(work)))
"""


@functools.cache
def outcome(order: str) -> dict[str, Any]:
    prepare = PREPARE.format(tests=str(processes.TESTS))
    return processes.python_json(prepare + ORDERS[order], is_forked=order in HAVE_BOTH)


#: What waits for continuous batching, one more token or a large tensor is not called by a forward pass.
WAITING = {
    *("paged.sdpa", "paged.eager", "paged.requests", "paged.manager"),
    *("step.program", "memory.caching_allocator"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_gives_the_same_status_and_logits(order: str) -> None:
    reference, found = outcome("before transformers"), outcome(order)
    assert found["status"] == reference["status"]
    assert found["logits"] == reference["logits"]
    applied = {row["id"]: row["calls"] for row in found["status"]["rules"] if row["state"] == "applied"}
    assert applied.keys() == {
        "attention.sdpa",
        "linear.call",
        "mlp.silu",
        "norm.rms",
        "norm.residual",
        "rope.half",
        "cache.append",
        *WAITING,
    }
    assert {rule for rule, calls in applied.items() if not calls} == WAITING


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_worker_processes_give_the_same(method: str, tmp_path) -> None:
    prepare = PREPARE.format(tests=str(processes.TESTS))
    if method == "spawn":
        # A spawned worker imports its function anew: that module has the one line, as a user's would.
        work = prepare + "\nimport liteboost_adaptor\n\n\ndef work():\n    return result(build())\n"
        (tmp_path / "worker_module.py").write_text(work, encoding="utf-8")
        script = f"import json, sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + SPAWN
    else:
        script = prepare + FORK
    found = processes.python_json(script, is_forked=method == "fork")
    reference = outcome("before transformers")
    assert found["status"] == reference["status"]
    assert found["logits"] == reference["logits"]


def test_status_survives_json() -> None:
    status = outcome("before transformers")["status"]
    assert json.loads(json.dumps(status)) == status


THREADS = """
import liteboost_adaptor
import threading
import torch
from support import tiny_models
models = [build() for _ in range(4)]
logits = [None] * 8


def work(number):
    model = models[number % 4]
    with torch.no_grad():
        logits[number] = model(**tiny_models.example_inputs(model)).logits


threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
apart = [float((found - logits[0]).abs().max()) for found in logits]
rows = {row.id: row.targets for row in liteboost_adaptor.status().rules if row.state == "applied"}
fallbacks = {row.id: row.fallbacks for row in liteboost_adaptor.status().rules if row.fallbacks}
print(json.dumps([apart, fallbacks, rows["norm.rms"], len(liteboost_adaptor.status().models)]))
"""


def test_threads_that_use_models_first_at_the_same_time() -> None:
    prepare = PREPARE.format(tests=str(processes.TESTS))
    assert processes.python_json(prepare + THREADS, is_forked=True) == [[0.0] * 8, {}, 20, 4]


HOOK = """
import liteboost_adaptor
from liteboost_adaptor.huggingface import runtime as module


def broken(settings):
    raise OSError("the hook is out of order")


module.runtime.start = broken
import transformers.modeling_utils
from transformers import LlamaForCausalLM
rows = [[row.state, row.reason] for row in liteboost_adaptor.status().rules if row.id.startswith("hook")]
print(json.dumps([LlamaForCausalLM.__name__, rows]))
"""


def test_a_hook_that_throws_leaves_the_import_intact_and_one_failed_row() -> None:
    prepare = PREPARE.format(tests=str(processes.TESTS))
    name, rows = processes.python_json(prepare + HOOK)
    assert name == "LlamaForCausalLM"
    assert rows == [["failed", "OSError: the hook is out of order"]]


UNDO_FIRST = """
import liteboost_adaptor
liteboost_adaptor.undo()
model = build()
found = result(model)
rules = [row for row in found["status"]["rules"] if row["targets"]]
liteboost_adaptor.apply()
again = result(model)
print(json.dumps([rules, sum(row["calls"] > 0 for row in again["status"]["rules"])]))
"""


def test_undo_before_transformers_is_imported_holds_until_apply() -> None:
    prepare = PREPARE.format(tests=str(processes.TESTS))
    assert processes.python_json(prepare + UNDO_FIRST) == [[], 7]

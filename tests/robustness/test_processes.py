"""Models bound in one process and used in others: forked, spawned, and as a DataLoader's workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import processes

TOLERANCE = 2e-5

PREPARE = """
import json
import multiprocessing
import sys
sys.path.insert(0, {folder!r})
import torch
import liteboost_adaptor
from shared_work import build, calls, expected, generate, same
"""
#: A module of its own, because a spawned process imports what it unpickles.
SHARED = """
import torch
from support import numbers, tiny_models

TOLERANCE = {tolerance}


def build():
    return tiny_models.build("llama")


def generate(model):
    return numbers.greedy(model, numbers.padded_inputs(model), steps=4)


def expected():
    import liteboost_adaptor
    with liteboost_adaptor.patched(level=0):
        return generate(build())


def same(found, reference):
    return numbers.relative(found.logits, reference.logits) <= TOLERANCE and same_tokens(found, reference)


def same_tokens(found, reference):
    return torch.equal(found.tokens, reference.tokens)


def calls():
    import liteboost_adaptor
    return sum(row.calls for row in liteboost_adaptor.status().rules)


def spawned(model, reference, queue):
    # The one line is in this process too, as a user's script has it at its top.
    import liteboost_adaptor
    torch.set_num_threads(1)
    queue.put([type(model).__name__, same(generate(model), reference), calls() > 0])


def spawned_without_us(model, reference, queue):
    import sys
    torch.set_num_threads(1)
    found = same(generate(model), reference)
    queue.put([type(model).__module__, found, "liteboost_adaptor.api" in sys.modules])


class Dataset(torch.utils.data.Dataset):
    # Each item is a result of the model, computed in the worker.
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        before = calls()
        found = generate(self.model)
        return {{"logits": found.logits, "tokens": found.tokens, "calls": calls() - before}}
"""


def run(script: str, tmp_path: Path, **environment: str) -> Any:
    (tmp_path / "shared_work.py").write_text(SHARED.format(tolerance=TOLERANCE), encoding="utf-8")
    text = PREPARE.format(folder=str(tmp_path)) + script
    return processes.python_json(text, timeout=400, is_forked=True, **environment)


# The parent's OpenMP threads are not in a forked child: one that waits for them hangs for ever. The usual way
# out, torch's own as well, is one thread in the child; our ops must then start none either.
FORK = """
def forked(work):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work, args=(there,))
    process.start()
    return here, process


def received(here):
    return here.recv() if here.poll(120) else "hangs"


def served_model():
    model = build()
    liteboost_adaptor.apply(model)
    return model


def fork(parent_threads):
    torch.set_num_threads(parent_threads)
    reference, model = expected(), served_model()
    big = torch.randn(512, 1024)
    torch.ops.liteboost.rms_norm(big, None, 1e-6)  # on all threads, so that there are some to be lost
    own = same(generate(model), reference)

    def child(pipe):
        torch.set_num_threads(1)
        before = calls()
        ours = torch.ops.liteboost.rms_norm(big, None, 1e-6).isfinite().all().item()
        pipe.send([same(generate(model), reference), calls() > before, ours])

    results = []
    for number in range(3):
        here, process = forked(child)
        results.append(received(here))
        process.join(10)
        process.kill()
    return [own, results, same(generate(model), reference)]
"""

FORKS_OF_ONE_THREAD = """
def fork_and_change():
    reference, model = expected(), served_model()

    def child(pipe):
        liteboost_adaptor.undo(model)
        before = calls()
        found = same(generate(model), reference)
        pipe.send([found, calls() - before])
        liteboost_adaptor.apply(model)
        pipe.send([same(generate(model), reference), calls() > before])

    here, process = forked(child)
    results = [received(here) for _ in range(2)]
    process.join(10)
    before = calls()
    return [results, same(generate(model), reference), calls() > before]


def data_loader():
    import shared_work

    reference, model = expected(), served_model()
    loader = torch.utils.data.DataLoader(
        shared_work.Dataset(model), num_workers=2, batch_size=None, multiprocessing_context="fork"
    )
    found = [
        [
            torch.equal(item["tokens"], reference.tokens),
            shared_work.numbers.relative(item["logits"], reference.logits),
        ]
        for item in loader
    ]
    return [found, same(generate(model), reference)]


def fork_while_binding():
    import threading

    reference, model = expected(), served_model()
    stop = threading.Event()

    def change():
        while not stop.is_set():
            liteboost_adaptor.apply(model)
            liteboost_adaptor.undo(model)

    def child(pipe):
        mine = build()
        liteboost_adaptor.apply(mine)
        pipe.send(same(generate(mine), reference))

    thread = threading.Thread(target=change)
    thread.start()
    results = []
    for number in range(6):
        here, process = forked(child)
        results.append(received(here))
        process.kill()
    stop.set()
    thread.join()
    return results


print(json.dumps([fork(1), fork_and_change(), data_loader(), fork_while_binding()]))
"""


@pytest.fixture(scope="module")
def of_one_thread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What parents of one thread and their forked children did, one parent after the other in a process."""
    found = run(FORK + FORKS_OF_ONE_THREAD, tmp_path_factory.mktemp("forks"))
    return dict(zip(("fork", "change", "loader", "while binding"), found, strict=True))


def check_forks(found: list[Any]) -> None:
    own, children, afterwards = found
    assert own and afterwards
    assert children == [[True, True, True]] * 3


def test_forked_children_generate_with_the_parents_model(of_one_thread: dict[str, Any]) -> None:
    check_forks(of_one_thread["fork"])


def test_forked_children_of_a_parent_with_two_threads(tmp_path: Path) -> None:
    check_forks(run(FORK + "print(json.dumps(fork(2)))", tmp_path, OMP_NUM_THREADS="2"))


def test_a_child_undoes_and_applies_without_the_parent_noticing(of_one_thread: dict[str, Any]) -> None:
    assert of_one_thread["change"] == [[[True, 0], [True, True]], True, True]


def test_workers_of_a_data_loader(of_one_thread: dict[str, Any]) -> None:
    found, afterwards = of_one_thread["loader"]
    assert len(found) == 4 and afterwards
    for same_tokens, error in found:
        assert same_tokens and error <= TOLERANCE


def test_forks_while_another_thread_binds(of_one_thread: dict[str, Any]) -> None:
    """A lock held by another thread at the moment of the fork would stay locked in the child."""
    assert of_one_thread["while binding"] == [True] * 6


SPAWN = """
if __name__ == "__main__":
    import shared_work
    torch.set_num_threads(1)
    reference, model = expected(), build()
    liteboost_adaptor.apply(model)
    generate(model)
    context = multiprocessing.get_context("spawn")
    results = []
    for work in (shared_work.spawned, shared_work.spawned_without_us):
        queue = context.Queue()
        process = context.Process(target=work, args=(model, reference, queue))
        process.start()
        results.append(queue.get(timeout=300))
        process.join(10)
    print(json.dumps([results, same(generate(model), reference)]))
"""


def test_spawned_processes_unpickle_a_bound_model(tmp_path: Path) -> None:
    (ours, plain), afterwards = run(SPAWN, tmp_path)
    assert ours == ["LlamaForCausalLM", True, True]
    assert plain == ["transformers.models.llama.modeling_llama", True, False]
    assert afterwards

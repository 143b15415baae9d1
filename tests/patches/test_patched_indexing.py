"""Indexing of tensors that somebody has replaced, in its own process: Python never takes it back whole."""

from __future__ import annotations

from support import processes

SCRIPT = """
import json
from liteboost_adaptor import watch
from patches import test_patched_callees as callees
pair = callees.Pair("llama")
places = [place for place in watch.watched_places() if place.name in callees.INDEXING]
print(json.dumps([[str(place) for place in places], [pair.fault(place) for place in places]]))
"""


def test_indexing_replaced_after_binding() -> None:
    places, faults = processes.python_json(SCRIPT, is_forked=True)
    assert "torch.Tensor.__getitem__" in places
    assert not any(faults), faults

"""One variant generating on the simulated NPU, with a mark in the trace for each token.

Started by path (see `worker`), under the simulator, with its options as JSON in the first argument.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def _worker() -> Any:
    """`bench.worker` by path: a variant without the package must not import it."""
    spec = importlib.util.spec_from_file_location("worker", Path(__file__).with_name("worker.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _recorded_after(variant: str) -> int:
    """Tokens to warm up with: a step is recorded, and its program captured, when it has come so often."""
    if variant != "level2":
        return 0
    from liteboost_adaptor.program import graph, step

    return step.RECORDED_AT + graph.CAPTURED_AT + 4


class Marks:
    """A logits processor that marks where the work for each token ends; it launches nothing."""

    def __init__(self) -> None:
        self.token = 0
        self.runtime = ctypes.CDLL("libascendcl.so")

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Everything up to the next call belongs to the next token."""
        self.token += 1
        self.runtime.simcann_mark(f"token {self.token}".encode())
        return scores


def main() -> None:
    """Generate once to warm up and once for the trace."""
    options = json.loads(sys.argv[1])
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()
    ]
    worker = _worker()
    import torch

    variant = worker.Variant(options)
    variant.model.to("npu")
    variant.prompt = variant.prompt.to("npu")
    from transformers import LogitsProcessorList

    new, variant.new = variant.new, max(variant.new, _recorded_after(options["variant"]))
    variant._generate()
    variant.new = new
    runtime = ctypes.CDLL("libascendcl.so")
    torch.npu.synchronize()
    runtime.simcann_trace_start(options["trace"].encode())
    variant._generate(logits_processor=LogitsProcessorList([Marks()]))
    torch.npu.synchronize()
    runtime.simcann_trace_stop()


if __name__ == "__main__":
    main()

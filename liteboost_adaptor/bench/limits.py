"""What the machine can do at best: bytes read and floating-point operations per second.

Measured in a process of its own, a little in every round, so that the limits see the same disturbances as
the variants. The best of all measurements counts: a limit is what was reached once. Both limits of a virtual
machine may halve for seconds, so those of the moment are noted beside every round, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import native

READ_BYTES = 2 << 30
GEMM_SIZE = 4096
#: A shape that takes longer is measured in the first round only.
SLOW_SECONDS = 2.0


class ReadLimit:
    """Read bandwidth over a buffer far larger than any cache."""

    def __init__(self, read_bytes: int = READ_BYTES) -> None:
        columns = 1 << 12
        rows = max(read_bytes // (4 * columns), 1)
        # Written once, so that every page is there; ones, so that no sum is slowed down by denormals.
        self.matrix = torch.ones(rows, columns)
        self.vector = torch.ones(columns)
        self.best = 0.0

    def measure(self) -> float:
        """Best gigabytes per second of one pass of each way to read the buffer; `best` is that of all."""
        now = 0.0
        for read in self._ways():
            begin = time.perf_counter()
            read()
            elapsed = time.perf_counter() - begin
            now = max(now, self.matrix.nbytes / elapsed / 1e9)
        self.best = max(self.best, now)
        return now

    def _ways(self) -> Iterable[Callable[[], Any]]:
        flat = self.matrix.view(-1)
        yield flat.sum
        yield flat.max
        # A matrix-vector product is the pattern of decode itself, and the best reader some libraries have.
        yield lambda: torch.mv(self.matrix, self.vector)
        stream_sum = getattr(torch.ops.liteboost, "_stream_sum", None)
        if stream_sum is not None:
            yield lambda: stream_sum(flat)


class GemmLimit:
    """Best rate of a matrix product over the model's own shapes and a large square, in the model's dtype.

    Of ``torch.mm`` and our ``linear``, because torch has no good product for every dtype on every CPU (fp16
    without AVX512-FP16, bf16 without AVX512-BF16), and a limit has to be one.
    """

    def __init__(
        self, rows: int, shapes: Iterable[tuple[int, int]], dtype: torch.dtype, size: int = GEMM_SIZE
    ) -> None:
        """
        Args:
            rows: Rows of the left operand: batch times prompt.
            shapes: ``(in_features, out_features)`` of the model's products.
            dtype: Of all operands.
            size: Of the square product.
        """
        self.shapes = sorted({(rows, *shape) for shape in shapes} | {(size, size, size)})
        self.dtype = dtype
        self.best = 0.0
        self.slow: set[tuple[int, int, int]] = set()

    def measure(self) -> float:
        """Best gigaflops per second of one pass over every shape; `best` is that of all."""
        now = 0.0
        for shape in self.shapes:
            if shape in self.slow:
                continue
            rows, in_features, out_features = shape
            left = torch.ones(rows, in_features, dtype=self.dtype)
            # Transposed as nn.Linear keeps its weight, which is what a model's products look like.
            weight = torch.ones(out_features, in_features, dtype=self.dtype)
            # Each twice: the first call of a shape chooses and builds a kernel.
            for product in (torch.mm, torch.mm, torch.ops.liteboost.linear, torch.ops.liteboost.linear):
                begin = time.perf_counter()
                product(left, weight.t() if product is torch.mm else weight)
                elapsed = time.perf_counter() - begin
                now = max(now, 2 * rows * in_features * out_features / elapsed / 1e9)
                if elapsed > SLOW_SECONDS:
                    self.slow.add(shape)
                    break
        self.best = max(self.best, now)
        return now


def handlers(options: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """What the limits process answers: ``ready``, ``now`` with both limits at this moment, and ``best`` with
    the best of each so far."""
    torch.set_num_threads(options["threads"])
    native.require("bench")
    read = ReadLimit(options["read_bytes"])
    gemm = GemmLimit(
        options["rows"],
        [tuple(shape) for shape in options["gemm_shapes"]],
        getattr(torch, options["dtype"]),
        options["gemm_size"],
    )
    return {
        "ready": dict,
        "now": lambda: {"read_gb_s": read.measure(), "gemm_gflops": gemm.measure()},
        "best": lambda: {"read_gb_s": read.best, "gemm_gflops": gemm.best},
    }

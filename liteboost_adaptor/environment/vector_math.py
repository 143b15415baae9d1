"""Elementary functions of MKL, set up before several threads can be the first to call one.

torch's ``cos``, ``sin``, ``exp`` and others of contiguous tensors are MKL's on x86. MKL looks at the CPU at
the first call of any of them, and guards that by nothing: of threads whose first calls meet, one may be given
the loops of low accuracy, whose cosine is off by 1.5e-4 (torch 2.13; about once in 500 processes whose 8
threads call it together). Rotary embeddings of such a call are wrong in the 4th digit, and so are its logits.
"""

from __future__ import annotations

import torch

#: Elements of the call: ATen takes MKL's loops whatever their number.
_ELEMENTS = 16


def set_up() -> None:
    """Have MKL look at the CPU now; later calls, of any function and thread, find it done. Takes 0.6 ms."""
    torch.exp(torch.zeros(_ELEMENTS, dtype=torch.float32, device="cpu"))

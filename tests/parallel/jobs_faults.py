"""Ranks that end while others count on them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from parallel import ranks
from parallel.jobs import _quiet, _raised
from transformers import AutoModelForCausalLM

from liteboost_adaptor.parallel.runtime import heartbeat


def one_ends(folder: str, when: str) -> None:
    """Rank 1 ends before a prompt, or raises at the third token; what rank 0 says, and how long after."""
    _quiet()
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(5, 17)[None]
    forwards = []

    def planted(*_: Any) -> None:
        forwards.append(time.monotonic())
        if len(forwards) == 3 and os.environ["RANK"] == "1":
            raise ValueError("planted in rank 1")

    if when == "token":
        model.register_forward_pre_hook(planted)
    if os.environ["RANK"] == "1":
        if when == "prompt":
            os._exit(3)
        model.generate(ids, max_new_tokens=40, pad_token_id=0)
    start = time.monotonic()
    text = _raised(lambda: model.generate(ids, max_new_tokens=40, pad_token_id=0))
    ranks.report({"text": text, "seconds": time.monotonic() - start})
    os._exit(0)  # the process group would wait for the rank that is gone


def waits_for_missing(folder: str, seconds: float) -> dict[str, Any]:
    """What loading says where ranks are missing, and how long after; they wait ``seconds``, 0: as ever."""
    _quiet()
    ranks.wait_as_usual()
    heartbeat.timeouts.start = seconds or heartbeat.timeouts.start
    start = time.monotonic()
    text = _raised(lambda: AutoModelForCausalLM.from_pretrained(folder))
    return {"text": text, "seconds": time.monotonic() - start}


def loads(folder: str, names: list[str]) -> str:
    """What loading says where each rank loads a model of its own."""
    _quiet()
    name = names[int(os.environ["RANK"])]
    return _raised(lambda: AutoModelForCausalLM.from_pretrained(f"{folder}/{name}"))

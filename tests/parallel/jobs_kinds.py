"""What ranks do while one of them does something else: it raises, ends, stops, or is given others."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parallel import ranks
from parallel.jobs import _quiet
from transformers import AutoModelForCausalLM, LogitsProcessor, StoppingCriteria

from liteboost_adaptor.parallel import from_pretrained
from liteboost_adaptor.parallel.checkpoint import saving
from liteboost_adaptor.parallel.runtime import heartbeat

TOKENS = 24
#: The token before which something happens; by then steps are recorded.
LATE = 12


class Planted(Exception):
    """What a rank raises."""


def _act(what: str) -> None:
    if what == "raise":
        raise Planted("planted")
    if what == "exit":
        os._exit(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])


class _Chosen(LogitsProcessor):
    """Acts at a token, or chooses another one."""

    def __init__(self, at: int, what: str) -> None:
        self.at, self.what, self.calls = at, what, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            if self.what == "inputs":
                return scores.roll(1, -1)
            _act(self.what)
        return scores


class _Ends(StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((ids.shape[0],), ids.shape[1] > LATE + 12, device=ids.device)


def ids(which: int = 0) -> torch.Tensor:
    """A prompt."""
    return torch.arange(5, 17)[None] + which


def generated(model: Any, which: int = 0, **settings: Any) -> list[int]:
    """Tokens of a prompt."""
    wanted = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids(which), **{**wanted, **settings})[0].tolist()


@torch.no_grad()
def looped(model: Any, at: int, action: Callable[[], None]) -> list[int]:
    """The same by a loop of a script's own, which calls ``action`` before a token."""
    text, cache, step = ids(), None, ids()
    for number in range(TOKENS):
        if number == at:
            action()
        out = model(step, past_key_values=cache, use_cache=True)
        cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
        text = torch.cat([text, step], 1)
    return text[0].tolist()


def reference(folder: str) -> dict[str, Any]:
    """What one process computes."""
    _quiet()
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {
        "tokens": generated(model),
        "others": generated(model, 1),
        "short": generated(model, max_new_tokens=TOKENS - 2),
        "ended": generated(model, stopping_criteria=[_Ends()]),
        "rolled": generated(model, logits_processor=[_Chosen(LATE, "inputs")]),
    }


def scenario(folder: str, target: str, who: int, where: str, what: str, wait: float) -> Any:
    """Rank ``who`` does ``what`` at ``where``; each rank reports what became of each of its calls."""
    _quiet()
    ranks.wait_as_usual()
    if wait:
        heartbeat.timeouts.start = heartbeat.timeouts.absent = wait
    rank = int(os.environ["RANK"])
    did = what if rank == who else ""
    outcomes: list[dict[str, Any]] = []

    def tried(name: str, action: Callable[[], Any]) -> Any:
        start, found = time.monotonic(), None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = action()
                outcome: dict[str, Any] = {"value": found if isinstance(found, (list, str)) else None}
            except Planted:
                outcome = {"planted": True}
            except Exception as fault:  # noqa: BLE001 - reported
                outcome = {"error": f"{type(fault).__name__}: {fault}"}
        outcome["warned"] = sum("LITEBOOST_TP=1" in str(each.message) for each in said)
        outcomes.append({"call": name, "seconds": time.monotonic() - start, **outcome})
        return found

    model = _loaded(folder, where, did, tried)
    if model is not None:
        _calls(model, target, where, did, tried)
    Path(f"{target}.done.{rank}").touch()
    # A script that goes on with something else is alive, and has nothing to say.
    others = [other for other in range(int(os.environ["WORLD_SIZE"])) if other != who]
    deadline = time.monotonic() + 90
    while did and time.monotonic() < deadline:
        if all(Path(f"{target}.done.{other}").exists() for other in others):
            break
        time.sleep(0.1)
    return {"outcomes": outcomes}


def _loaded(folder: str, where: str, did: str, tried: Any) -> Any:
    if where == "start" and did:
        if did in ("raise", "skip"):
            return None
        _act(did)
    if where == "load" and did and did != "inputs":
        read = from_pretrained._read_tensors

        def planted(*arguments: Any) -> Any:
            found = read(*arguments)
            _act(did)
            return found

        from_pretrained._read_tensors = planted
    name = "other" if where == "load" and did == "inputs" else "llama"
    return tried("load", lambda: AutoModelForCausalLM.from_pretrained(f"{folder}/{name}"))


def _calls(model: Any, target: str, where: str, did: str, tried: Any) -> None:
    if where == "between" and did:
        if did == "skip":
            return
        _act(did)
    settings: dict[str, Any] = {}
    if where in ("prompt", "decode") and did in ("raise", "exit", "kill", "stop"):
        settings["logits_processor"] = [_Chosen(1 if where == "prompt" else LATE, did)]
    if where == "decode" and did == "inputs":
        settings["logits_processor"] = [_Chosen(LATE, did)]
    if where == "decode" and did == "ends":
        settings["stopping_criteria"] = [_Ends()]
    if where == "prompt" and did == "settings":
        settings["max_new_tokens"] = TOKENS - 2
    which = 1 if where == "prompt" and did == "inputs" else 0
    if where == "loop":
        tried("loop", lambda: looped(model, LATE if did else -1, lambda: _act(did)))
    else:
        tried("first", lambda: generated(model, which, **settings))
    if where == "save":
        if did == "skip":
            return
        _plant_in_saving(did)
        tried("save", lambda: model.save_pretrained(f"{target}-{os.environ['RANK']}"))
    tried("second", lambda: generated(model))


def _plant_in_saving(did: str) -> None:
    local = saving.Tensors.local

    def planted(self: Any, name: str) -> Any:
        if "layers.1" in name and did:
            _act(did)
        return local(self, name)

    saving.Tensors.local = planted

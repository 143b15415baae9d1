"""What a helper process runs: it compares the kinds it is asked for, one after the other (see `helper`)."""

from __future__ import annotations

import importlib
import os
import queue
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from .. import native_npu
from . import facts
from .compare import compare

#: Seconds without a request after which it ends: its context holds memory of the device.
IDLE_SECONDS = 60.0


def main(descriptor: int, device: str) -> None:
    """Answer requests, ``(op, kind)``, until the pipe is closed.

    The answers: ``("ready", facts.identity())`` once; then ``("result", Result)``, ``("memory", words)``,
    ``("raised", words)``; ``("idle", None)`` before it ends by itself.

    Args:
        descriptor: Of the pipe to the process that has started this one.
        device: ``"npu:0"`` and on.
    """
    connection = Connection(descriptor)
    try:
        _prepare(device)
    except Exception as fault:  # noqa: BLE001  (the other side says it)
        connection.send(("raised", _words(fault)))
        return
    connection.send(("ready", facts.identity()))
    requests: queue.Queue[tuple[str, str]] = queue.Queue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    while True:
        try:
            op, kind = requests.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            connection.send(("idle", None))
            return
        answer = _answer(op, kind, device)
        connection.send(answer)
        if answer[0] == "result" and answer[1].fault:
            os._exit(1)  # without what torch_npu would do on a device that is lost


def _prepare(device: str) -> None:
    importlib.import_module("torch_npu")
    status = native_npu.load()
    if status is None or not status.loaded:
        raise RuntimeError(status.sentence if status else "it finds no NPU")
    torch.npu.set_device(device)
    _touch(device)


def _read(connection: Connection, requests: queue.Queue[tuple[str, str]]) -> None:
    """Hand on requests; end the process when there can be no more, whatever it is doing."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def _answer(op: str, kind: str, device: str) -> tuple[str, Any]:
    try:
        result = compare(op, kind, device)
    except torch.OutOfMemoryError as fault:
        return "memory", _words(fault)
    except Exception as fault:  # noqa: BLE001  (the other side raises it)
        return "raised", _words(fault)
    try:
        _touch(device)
    except RuntimeError as fault:
        first = (f"{each.case}: {each.fault}" for each in result.figures if each.fault)
        words = f"lost the device, {next(first, f'after the last case: {_words(fault)}')}"
        return "result", replace(result, fault=f"the helper process that compared it {words} ({kind})")
    return "result", result


def _touch(device: str) -> None:
    """Something that succeeds on every device that is there.

    Raises:
        RuntimeError: It is not.
    """
    torch.npu.synchronize()
    torch.zeros(1).to(device).cpu()


def _words(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}"

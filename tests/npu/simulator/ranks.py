"""Ranks of a communicator as processes of this machine."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import queue
import traceback

import torch
from cann_sim.call import folder


def _hccl() -> ctypes.CDLL:
    ctypes.CDLL(str(folder() / "libascendcl.so")).aclInit(None)
    return ctypes.CDLL(str(folder() / "libhccl.so"))


def open_group(ranks: int, rank: int, root: bytes) -> str:
    """The name of a communicator of this rank, as HcclGetCommName gives it."""
    hccl = _hccl()
    communicator = ctypes.c_void_p()
    assert hccl.HcclCommInitRootInfo(ranks, root, rank, ctypes.byref(communicator)) == 0
    name = ctypes.create_string_buffer(256)
    assert hccl.HcclGetCommName(communicator, name) == 0
    return name.value.decode()


def _rank(body, ranks, rank, root, results) -> None:
    torch.set_num_threads(1)
    try:
        answer = io.BytesIO()  # bytes: a tensor in a queue is shared memory of a process that ends
        torch.save(body(open_group(ranks, rank, root), rank), answer)
        results.put((rank, None, answer.getvalue()))
    except BaseException:  # noqa: BLE001 reported by the parent
        results.put((rank, traceback.format_exc(), None))


def on_ranks(ranks: int, body) -> list:
    """What ``body(group, rank)`` returns on each rank."""
    root = ctypes.create_string_buffer(4108)
    assert _hccl().HcclGetRootInfo(root) == 0
    context = multiprocessing.get_context("fork")  # torch is imported already
    results = context.Queue()
    arguments = [(body, ranks, rank, root.raw, results) for rank in range(ranks)]
    processes = [context.Process(target=_rank, args=a, daemon=True) for a in arguments]
    for process in processes:
        process.start()
    try:
        answers = {
            rank: (error, value) for rank, error, value in (results.get(timeout=60) for _ in processes)
        }
    except queue.Empty:
        raise AssertionError("a rank did not answer") from None
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    for rank, (error, _) in answers.items():
        assert error is None, f"rank {rank}: {error}"
    return [torch.load(io.BytesIO(answers[rank][1])) for rank in range(ranks)]

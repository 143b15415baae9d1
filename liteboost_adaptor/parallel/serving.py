"""``transformers serve`` over several ranks: rank 0 talks to the clients, the others follow it.

Each rank runs the whole program, up to the server: the model is loaded, and sharded, by all of them. Rank 0
goes on and listens. The others wait for what they have to do with it, which rank 0 writes into the store that
the ranks share: begin continuous batching under these settings, and end. The batches themselves are agreed on
by `continuous_batching`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ..errors import ParallelError
from ..huggingface.runtime import runtime
from ..quantization.identifiers import PLAN
from .runtime import groups
from .runtime.heartbeat import LivenessMonitor, StoreUnavailable

_SERVER = "transformers.cli.serving.server"
_KEY = "serving"
_POLL_INTERVAL_S = 0.2
_BEGIN, _END = "begin", "end"


def hook_server() -> None:
    """Let the ranks of a server share one port."""
    runtime.hooks.set_attribute(_SERVER, "build_server", _wrap)


def _wrap(build_server: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build_server)
    def build_of_rank(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(build_server).bind(*args, **kwargs).arguments
        models, state = given["model_manager"], given["generation_state"]
        _check(models, state)
        if groups.world().heartbeat.rank:
            _follow(models, state)
        _lead(models, state)
        return build_server(*args, **kwargs)

    return build_of_rank


def _check(models: Any, state: Any) -> None:
    """Refuse servers whose requests the ranks could not work on together.

    Raises:
        ParallelError: That, with what to do.
    """
    size = groups.world().heartbeat.size
    if not models.force_model or not state._continuous_batching:
        missing = "--continuous-batching" if models.force_model else "a model on its command line"
        raise ParallelError(
            f"transformers serve was started in {size} processes without {missing}, and ranks share the "
            "batches of one model only. Start: run --tp N transformers serve MODEL --continuous-batching."
        )
    for loaded in models.loaded_models.values():
        plan = vars(loaded.model).get(PLAN)
        if plan is None or plan.world_size != size:
            raise ParallelError(
                f"transformers serve was started in {size} processes, and {type(loaded.model).__name__} is "
                "not sharded over all of them: models are at level 2, where status() says what is not. "
                "Start one process, or as many as LITEBOOST_TP says at level 2."
            )


class _Commands:
    """What rank 0 tells the others, in order, by the store that all share."""

    def __init__(self) -> None:
        self._store, self._number = groups.world().heartbeat.store, 0

    def put(self, command: str, value: Any = None) -> None:
        self._store.put(f"{_KEY}/{self._number}", pickle.dumps((command, value)))
        self._number += 1

    def get(self) -> tuple[str, Any] | None:
        found = self._store.get(f"{_KEY}/{self._number}")
        if found is None:
            return None
        self._number += 1
        command: tuple[str, Any] = pickle.loads(found)
        return command


def _lead(models: Any, state: Any) -> None:
    """Tell the other ranks when the server of this one begins continuous batching, and when it ends."""
    commands = _Commands()
    get_manager, use, shutdown = state.get_manager, state.use_continuous_batching, models.shutdown

    def manager_of(*args: Any, **kwargs: Any) -> Any:
        manager = get_manager(*args, **kwargs)
        if "init_cb" not in vars(manager):
            begin = manager.init_cb

            def init_cb(model: Any, settings: Any) -> None:
                if manager._cb is None:
                    commands.put(_BEGIN, settings)
                begin(model, settings)

            vars(manager)["init_cb"] = init_cb
        return manager

    def use_continuous_batching(model: Any, modality: Any) -> bool:
        if use(model, modality):
            return True
        raise ParallelError(
            f"{type(model).__name__} is sharded over processes, which share the batches of texts only. "
            "Start the server in one process."
        )

    def end() -> None:
        # The server ends in its main thread; `/reset`, which unloads models, is answered in another one.
        if threading.current_thread() is not threading.main_thread():
            raise ParallelError(
                "the model is sharded over processes, and stays loaded until the server ends. Restart it."
            )
        try:
            state.shutdown()
        finally:
            commands.put(_END)
            shutdown()

    vars(state).update(get_manager=manager_of, use_continuous_batching=use_continuous_batching)
    vars(models)["shutdown"] = end


def _follow(models: Any, state: Any) -> NoReturn:
    """Work on the batches of rank 0 until it ends; then this process ends, too."""
    commands = _Commands()
    heartbeat = groups.world().heartbeat
    monitor = LivenessMonitor(heartbeat, _KEY, "", math.inf, False, None)
    (name,) = models.loaded_models
    manager = state.get_manager(name, use_cb=True)
    reason = ""
    with _left_to_rank_0():
        try:
            while not reason:
                command, settings = commands.get() or ("", None)
                if command == _BEGIN:
                    manager.init_cb(models.loaded_models[name].model, settings)
                elif command == _END:
                    break
                else:
                    reason = monitor.reason([0]) or _fault_of(manager)
                    _drop_texts(manager)
                    time.sleep(_POLL_INTERVAL_S)
        except StoreUnavailable as fault:
            reason = str(fault)
        state.shutdown()
        models.shutdown()
    if reason:
        raise ParallelError(f"rank {heartbeat.rank} has followed the server of rank 0, and ends: {reason}")
    sys.exit(0)


def _fault_of(manager: Any) -> str:
    fault = manager._cb.background_thread_status.fatal_error if manager._cb is not None else None
    return "" if fault is None else f"its batches have ended ({fault})"


def _drop_texts(manager: Any) -> None:
    """Forget the texts that rank 0 gives to its clients; nobody reads them here."""
    with contextlib.suppress(queue.Empty):
        while manager._cb is not None:
            manager._cb.output_router.output_queue.get_nowait()


@contextlib.contextmanager
def _left_to_rank_0() -> Iterator[None]:
    """Leave SIGTERM and Ctrl-C, which all ranks get, to rank 0: it answers what is running, and ends then."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)

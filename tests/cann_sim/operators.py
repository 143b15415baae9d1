"""The operators that the simulator has, and the kinds of their arguments."""

from __future__ import annotations

import ctypes


def operators() -> dict[str, list[str]]:
    """Every operator -> the kinds of its arguments in order, such as ``["tensor", "double", "tensor"]``.

    To compare with the types that a caller passes: a wrong number, order or width of arguments is an error
    that no compiler sees. For programs that run on the simulator.
    """
    library = _library()
    found: dict[str, list[str]] = {}
    while (name := library.simcann_operator(len(found))) is not None:
        found[name.decode()] = library.simcann_signature(name).decode().split(",")
    return found


def cache_hits() -> int:
    """Executors taken from the executor cache so far (``SIMCANN_EXEC_CACHE=1``)."""
    return _library().simcann_cache_hits()


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libopapi.so")
    library.simcann_operator.argtypes, library.simcann_operator.restype = [ctypes.c_size_t], ctypes.c_char_p
    library.simcann_signature.argtypes, library.simcann_signature.restype = [ctypes.c_char_p], ctypes.c_char_p
    library.simcann_cache_hits.restype = ctypes.c_size_t
    return library

"""What runs exported folders: ``liteboost-run`` as a process, and its C functions."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from liteboost_adaptor import native
from liteboost_adaptor.export import manifest

LIBRARY = "libliteboost_run.so"
STATUSES = ("OK", "BAD_FOLDER", "BAD_LIBRARY", "BAD_ARGUMENT", "FULL", "FAILED")


def folder_of_kernels() -> Path:
    """Where the library lies, and the runner beside it."""
    path = native.load().path
    assert path is not None
    return path.parent


def run(folder: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(folder_of_kernels() / "liteboost-run"), str(folder), "--threads", "1", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=600)


def tokens(folder: Path, prompt: Sequence[int], count: int, *arguments: str) -> list[int]:
    """``count`` greedy tokens behind ``prompt``, by the program."""
    given = " ".join(map(str, prompt))
    done = run(folder, "--ids", "-", "--ignore-stop", "--max-new", str(count), *arguments, given=given)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def generated(model: torch.nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """The same by `generate`."""
    config = model.generation_config
    former, config.eos_token_id = config.eos_token_id, None
    try:
        ids = torch.tensor([list(prompt)])
        result = model.generate(ids, max_new_tokens=count, do_sample=False, use_cache=True)
    finally:
        config.eos_token_id = former
    return result[0, len(prompt) :].tolist()


def prompt(model: torch.nn.Module, count: int) -> list[int]:
    """Some tokens, none of which stands for padding or an end."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(5, vocabulary, (count,), generator=torch.Generator().manual_seed(count))
    return ids.tolist()


def sign(folder: Path) -> None:
    """Write the checksums anew, as somebody does who has changed a file on purpose."""
    files = sorted(each for each in folder.rglob("*") if each.is_file() and each.name != manifest.CHECKSUMS)
    lines = [
        f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.relative_to(folder)}\n" for each in files
    ]
    (folder / manifest.CHECKSUMS).write_text("".join(lines), encoding="utf-8")


class Sampling(ctypes.Structure):
    """``liteboost_sampling``."""

    _fields_ = (
        ("sample", ctypes.c_int),
        ("temperature", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("repetition_penalty", ctypes.c_double),
        ("seed", ctypes.c_uint64),
    )


class RunnerError(Exception):
    """A C function has failed; its status and words."""


class Model:
    """A folder that is open, by the C functions, in this process."""

    def __init__(self, folder: Path, library: Path | None = None) -> None:
        """Open ``folder`` by ``library``: the one beside the kernels that are loaded, unless one is named."""
        self._library = ctypes.CDLL(str(library or folder_of_kernels() / LIBRARY))
        self._library.liteboost_error.restype = ctypes.c_char_p
        self._model = ctypes.c_void_p()
        self._call("open", str(folder).encode(), None, ctypes.byref(self._model))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"liteboost_{name}")(*arguments)
        if status:
            raise RunnerError(f"{STATUSES[status]}: {self._library.liteboost_error().decode()}")

    def close(self) -> None:
        self._library.liteboost_close(self._model)

    def reset(self) -> None:
        self._call("reset", self._model)

    def prefill(self, ids: Sequence[int]) -> None:
        given = (ctypes.c_int64 * len(ids))(*ids)
        self._call("prefill", self._model, given, ctypes.c_size_t(len(ids)))

    def next(self) -> tuple[int, bool]:
        token, stops = ctypes.c_int64(), ctypes.c_int()
        self._call("next", self._model, ctypes.byref(token), ctypes.byref(stops))
        return token.value, bool(stops.value)

    def sample(self, **settings: float) -> None:
        how = Sampling()
        self._call("sampling_of", self._model, ctypes.byref(how))
        for name, value in settings.items():
            setattr(how, name, value)
        self._call("sample", self._model, ctypes.byref(how))

    def logits(self) -> torch.Tensor:
        found, count = ctypes.POINTER(ctypes.c_float)(), ctypes.c_size_t()
        self._call("logits", self._model, ctypes.byref(found), ctypes.byref(count))
        return torch.tensor(found[: count.value])

    def length(self) -> tuple[int, int]:
        length, longest = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("length", self._model, ctypes.byref(length), ctypes.byref(longest))
        return length.value, longest.value

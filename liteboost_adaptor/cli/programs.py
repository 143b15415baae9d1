"""How a program is found and started so that it, and what it starts, imports this package first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import child_environment
from ..errors import ConfigError

#: Holds the `sitecustomize` that Python runs as it starts.
STARTUP = Path(__file__).resolve().parents[1] / "startup"
_TORCHRUN = "torch.distributed.run"
_HAS_US = "import importlib.util, sys; sys.exit(importlib.util.find_spec('liteboost_adaptor') is None)"


@dataclass(frozen=True)
class Command:
    """A program.

    Attributes:
        file: What is executed.
        argv: Its arguments, its own name first.
        for_torchrun: How ``torchrun`` is told of it.
    """

    file: str
    argv: list[str]
    for_torchrun: list[str]

    def in_ranks(self, size: int) -> Command:
        """It in ``size`` processes of this host."""
        launcher = ["-m", _TORCHRUN, "--standalone", f"--nproc-per-node={size}"]
        return _of_python([*launcher, *self.for_torchrun])


def of_module(name: str, arguments: Sequence[str]) -> Command:
    """``python -m name``."""
    return _of_python(["-m", name, *arguments], ["--module", name, *arguments])


def of_name(name: str, arguments: Sequence[str]) -> Command:
    """A command or a script, as a shell and Python find them.

    Raises:
        FileNotFoundError: There is none, or nothing but a file that is no script.
        ConfigError: It runs on a Python that would not import this package.
    """
    is_path = os.sep in name
    found = None if is_path or name.endswith(".py") else _which(name)
    if found is None and not os.path.exists(name):
        what = "no such file" if is_path or name.endswith(".py") else "no such command"
        places = "there" if is_path else f"beside {sys.executable}, on PATH and here"
        raise FileNotFoundError(
            f"{name}: {what}. Looked {places}. Install it, or give the path of a script; "
            "a module is named by -m."
        )
    if found is None and not (is_path and _is_command(Path(name))):
        return _of_python([name, *arguments], [name, *arguments])
    file = found or name
    _check_interpreter(Path(file))
    return Command(file, [name, *arguments], ["--no-python", file, *arguments])


def environment(**changes: str | None) -> dict[str, str]:
    """The environment of this process with ``changes``, in which any Python imports this package first."""
    merged = child_environment(**changes)
    others = [entry for entry in merged.get("PYTHONPATH", "").split(os.pathsep) if entry != str(STARTUP)]
    return merged | {"PYTHONPATH": os.pathsep.join([str(STARTUP), *others]).rstrip(os.pathsep)}


def _of_python(arguments: Sequence[str], for_torchrun: Sequence[str] = ()) -> Command:
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ConfigError(
            "run starts programs through PYTHONPATH, which -I, -E and -S turn off. Leave these options out."
        )
    return Command(
        sys.executable, [sys.executable, *_interpreter_options(), *arguments], list(for_torchrun or arguments)
    )


def _interpreter_options() -> list[str]:
    """What stands before ``-m liteboost_adaptor``, or ``liteboost``, in the command line of this process."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if options and options[-1] == sys.argv[0]:
        return options[:-1]
    if len(options) < 2 or options[-1] != "liteboost_adaptor" or not options[-2].endswith("m"):
        return []
    flags = options[-2].removesuffix("m")
    return [*options[:-2], *([flags] if flags != "-" else [])]


def _which(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def _is_command(path: Path) -> bool:
    return path.is_file() and path.suffix != ".py" and os.access(path, os.X_OK)


def _check_interpreter(file: Path) -> None:
    """Refuse a command whose Python would not import this package.

    Raises:
        ConfigError: That, with what to do.
    """
    with open(file, "rb") as content:
        line = content.readline(4096)
    words = line.removeprefix(b"#!").decode(errors="replace").split() if line.startswith(b"#!") else []
    if not words or "python" not in Path(words[0]).name:
        return
    if any(word.startswith("-") and set(word) & set("IES") for word in words[1:]):
        raise ConfigError(
            f"{file} starts Python with {' '.join(words[1:])}, which ignores PYTHONPATH, by which run works. "
            "Name its module: run -m MODULE."
        )
    if words[0] != sys.executable and subprocess.run([words[0], "-c", _HAS_US], check=False).returncode:
        raise ConfigError(
            f"{file} runs on {words[0]}, which has no liteboost_adaptor. Install it there, or the program "
            "here."
        )

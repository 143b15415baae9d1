"""Processes forked from a server that has imported torch and transformers, so that a start costs little.

Our own package is imported by each of them, under the variables that it is given.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

#: What the server has imported: all that most of them need and that is none of ours.
_IMPORTED = (
    "pytest",
    "torch.distributed",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "support.tiny_models",
)


@functools.cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


def start(
    function: Callable[..., None],
    *arguments: Any,
    environment: dict[str, str],
    output: Path,
    errors: Path | None = None,
    daemon: bool = True,
) -> Any:
    """A process in which ``function`` is called under ``environment``, as a ``multiprocessing.Process``.

    Args:
        output: The file to which its output is appended, and what it says of errors, too, without ``errors``.
        daemon: It ends with this process, and may not use ``multiprocessing`` itself.
    """
    files = str(output), str(errors or output)
    process = _server().Process(target=_main, args=(environment, *files, function, arguments), daemon=daemon)
    process.start()
    return process


def python(
    script: str, *arguments: str, environment: dict[str, str], timeout: float
) -> CompletedProcess[str]:
    """Run ``script`` as ``python -c`` does, but in a process that has imported torch and transformers."""
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        files = {"output": output, "errors": errors}
        process = start(_script, script, arguments, environment=environment, daemon=False, **files)
        try:
            process.join(timeout)
            status = process.exitcode
        finally:
            process.kill()
            process.join()
        said = [
            file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
            for file in (output, errors)
        ]
    if status is None:
        raise TimeoutExpired(script, timeout, *said)
    return CompletedProcess(["-c", *arguments], status, *said)


def _script(script: str, arguments: tuple[str, ...]) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<string>", "exec"), vars(main))


def _main(
    environment: dict[str, str],
    output: str,
    errors: str,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    for place, name in ((1, output), (2, errors)):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), place)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    # The server had its own number of threads from the variable.
    sys.modules["torch"].set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    status = 0
    try:
        function(*arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
        status = 1
    with contextlib.suppress(ValueError):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)

"""Runs scripts of one variant: a process that has imported transformers, and a fork of it for each script.

Started by path, not as a module of the package: the variant without us must not import the package, whose
import registers hooks. So the scripts beside it are loaded under a name of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

#: What scripts use, imported before the first: both variants would pay as much for it.
_IMPORTED = (
    *("accelerate", "accelerate.hooks", "transformers.generation.utils", "transformers.pipelines"),
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bert", "clip", "distilbert", "llama", "llava", "roberta", "t5", "whisper")
    ),
)


def _seconds() -> float:
    """Processor time of this process and all its threads."""
    times = os.times()
    return times.user + times.system


def _run(script: Any, folder: Path) -> dict[str, Any]:
    before, began = _seconds(), time.perf_counter()
    numbers = [float(each) for each in script.run(folder)]
    return {"cpu_s": _seconds() - before, "wall_s": time.perf_counter() - began, "numbers": numbers}


def _forked(script: Any, folder: Path) -> None:
    """Run the script in a child, which writes the answer."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    answer: dict[str, Any] = {}
    try:
        answer = _run(script, folder)
    except Exception as raised:  # noqa: BLE001 - the answer says so
        answer = {"error": f"{type(raised).__name__}: {raised}"}
    finally:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        os._exit(0)


def scripts() -> dict[str, Any]:
    """Those of the modules beside this file, by name."""
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        "everyday", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["everyday"] = package
    spec.loader.exec_module(package)
    return importlib.import_module("everyday.scripts").SCRIPTS


def main() -> None:
    """Answer requests, a line each: the name of a script and the folder of its model.

    The arguments are modules to import before all others: the package, where it is measured.
    """
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for module in _IMPORTED:
        importlib.import_module(module)
    logging = importlib.import_module("transformers.utils").logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = scripts()
    for line in sys.stdin:
        name, folder = json.loads(line)
        _forked(found[name], Path(folder))


if __name__ == "__main__":
    # What libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()

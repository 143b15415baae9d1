"""The environment variables under which a program runs on the simulator."""

from __future__ import annotations

import os
from collections.abc import Iterable

from .build import libraries, torch_libraries
from .releases import DEFAULT_RELEASE, DEFAULT_SOC, SOCS


def environment(
    release: str | None = None,
    soc: str | None = None,
    without: Iterable[str] = (),
    broken: bool = False,
    base: dict[str, str] | None = None,
) -> dict[str, str]:
    """``base`` (the present environment) with the simulator of ``release`` and ``soc`` in the library path.

    ``soc`` is a key of `releases.SOCS`, or a name of the runtime's own such as ``Ascend910B4``.
    """
    variables = dict(os.environ if base is None else base)
    release = release or variables.get("SIMCANN_VERSION") or DEFAULT_RELEASE
    soc = soc or variables.get("SIMCANN_SOC") or DEFAULT_SOC
    folder = libraries(release, soc, without, broken)
    variables["SIMCANN_VERSION"] = release
    variables["SIMCANN_SOC"] = SOCS.get(soc, soc)
    paths = [str(folder), str(torch_libraries()), variables.get("LD_LIBRARY_PATH", "")]
    variables["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    # A failure in the task queue is raised at some later call; 1 and 2 are for tests of the queue itself.
    variables.setdefault("TASK_QUEUE_ENABLE", "0")
    variables.setdefault("OMP_NUM_THREADS", "1")
    # Set, torch_npu looks for an installed CANN there.
    variables.pop("ASCEND_HOME_PATH", None)
    return variables

"""Level 0 on a machine without CANN: a torch_npu that cannot be loaded must not stop the program.

torch imports every installed device backend by itself, so a torch_npu without CANN makes ``import torch``
fail. With that turned off transformers fails next: it imports torch_npu wherever it is installed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from .. import config
from . import ascend

_MODULE = "torch_npu"
_undo: list[Callable[[], None]] = []
_notes: list[str] = []


def prepare() -> str | None:
    """Run as if torch_npu were not installed where it is, but CANN cannot be loaded.

    Call it before torch is imported. It tells torch to load no device backends
    (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``) and hides torch_npu: ``sys.modules["torch_npu"] = None`` is how
    Python spells a module that cannot be imported, and ``find_spec``, which transformers and accelerate
    ask, then says that it is not installed. `release` undoes both. Who turned the autoload on explicitly
    gets torch's own error.

    Returns:
        One sentence for the status, None where nothing was done. It is also said as a warning, once.
    """
    if _MODULE in sys.modules or not ascend.torch_npu_installed():
        return None
    fault = ascend.cann_fault()
    asked = config.torch_backend_autoload()
    if fault is None or (asked is not None and asked != "0" and "torch" not in sys.modules):
        return None
    if asked is None:
        config.set_torch_backend_autoload(False)
        _undo.append(config.unset_torch_backend_autoload)
    sys.modules[_MODULE] = None  # type: ignore[assignment]
    _undo.append(_unhide)
    sentence = explanation(fault)
    _notes.append(sentence)
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)
    return sentence


def release() -> None:
    """Undo `prepare`: torch_npu can be imported again and the autoload is as it was."""
    while _undo:
        _undo.pop()()
    _notes.clear()


def notes() -> list[str]:
    """What `prepare` did, in sentences for the status; empty when there was nothing to do."""
    return list(_notes)


def _unhide() -> None:
    # Unless someone has put a module there since.
    if sys.modules.get(_MODULE, sys) is None:
        del sys.modules[_MODULE]


def explanation(fault: str) -> str:
    """What was found, what was done about it and what the user can do."""
    folder = ascend.cann_folder()
    if folder:
        remedy = (
            f"CANN is in {folder}: `source {folder}/set_env.sh` before starting Python makes the NPU usable."
        )
    else:
        remedy = "To use an NPU install CANN and source its set_env.sh; without one, uninstall torch_npu."
    return (
        f"torch_npu {ascend.torch_npu_version()} is installed, but CANN cannot be loaded ({fault}); "
        f"the program runs without it (TORCH_DEVICE_BACKEND_AUTOLOAD=0, torch_npu hidden). {remedy}"
    )

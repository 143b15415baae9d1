"""What there is of Ascend on this machine, found without importing torch_npu.

Importing it is what must be avoided: without CANN the import fails half-way, after it has replaced functions
of the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .. import config

#: What libtorch_npu.so of torch_npu 2.13.0 needs from CANN (`readelf -d`).
CANN_LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_op_compiler.so",
)
#: Where CANN's installers put it; each has a set_env.sh.
CANN_FOLDERS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend")


#: Operators that our kernels and fixes call, each in the newest form; `doctor` says which this CANN has.
OPERATORS = (
    *("aclnnRmsNorm", "aclnnAddRmsNorm", "aclnnGemmaRmsNorm", "aclnnLayerNorm", "aclnnAddLayerNorm"),
    *("aclnnRotaryPositionEmbedding", "aclnnApplyRotaryPosEmb", "aclnnApplyRotaryPosEmbV2", "aclnnPolar"),
    *("aclnnSwiGlu", "aclnnGeGluV3", "aclnnGeluV2", "aclnnFlashAttentionScore"),
    *(
        "aclnnFusedInferAttentionScoreV2",
        "aclnnFusedInferAttentionScoreV3",
        "aclnnFusedInferAttentionScoreV4",
    ),
    *("aclnnScatterPaKvCache", "aclnnInplaceScatterUpdate", "aclnnMatmul", "aclnnMatmulWeightNz"),
    *(
        "aclnnMoeGatingTopK",
        "aclnnGroupedMatmulV4",
        "aclnnRecurrentGatedDeltaRule",
        "aclnnChunkGatedDeltaRule",
    ),
)


@dataclass(frozen=True)
class AscendState:
    """NPU, CANN and torch_npu as they are found.

    Attributes:
        torch_npu: Its version, None where it is not installed.
        cann_loadable: The dynamic loader finds every CANN library torch_npu needs.
        cann_fault: The loader's words for the first it does not find.
        cann_folder: An installation of CANN on disk, whether or not its environment is set.
        devices: NPU device files, ``/dev/davinci0`` and on.
        cann_version: As CANN's runtime gives it.
        soc: As CANN's runtime calls the NPU; None before torch_npu has opened it.
        missing_operators: Those of `OPERATORS` that this CANN does not have; None where there is no CANN.
    """

    torch_npu: str | None
    cann_loadable: bool
    cann_fault: str | None
    cann_folder: str | None
    devices: tuple[str, ...]
    cann_version: str | None = None
    soc: str | None = None
    missing_operators: tuple[str, ...] | None = None


def survey() -> AscendState:
    """Look for NPUs, CANN and torch_npu. Imports neither torch nor torch_npu."""
    fault = cann_fault()
    return AscendState(
        torch_npu=torch_npu_version(),
        cann_loadable=fault is None,
        cann_fault=fault,
        cann_folder=cann_folder(),
        devices=tuple(sorted(str(path) for path in Path("/dev").glob("davinci[0-9]*"))),
        cann_version=_cann_version() if fault is None else None,
        soc=_soc() if fault is None else None,
        missing_operators=tuple(missing_operators(OPERATORS)) if fault is None else None,
    )


def _cann_version() -> str | None:
    version = ctypes.create_string_buffer(4096)  # a struct that begins with the version, and grows
    ask = getattr(ctypes.CDLL("libascendcl.so"), "aclsysGetCANNVersion", None)
    known = ask is not None and ask(ctypes.c_int(0), version) == 0
    return version.value.decode(errors="replace") if known and version.value else None


def _soc() -> str | None:
    ask = getattr(ctypes.CDLL("libascendcl.so"), "aclrtGetSocName", None)
    if ask is None:
        return None
    ask.restype = ctypes.c_char_p
    name = ask()
    return name.decode(errors="replace") if name else None


def torch_npu_installed() -> bool:
    """Whether ``import torch_npu`` would find anything."""
    return importlib.util.find_spec("torch_npu") is not None


def torch_npu_version() -> str | None:
    """The version of torch_npu, ``"unknown"`` if it has no metadata, None where it is not installed."""
    try:
        return metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        return "unknown" if torch_npu_installed() else None


@functools.cache
def cann_fault() -> str | None:
    """Why CANN cannot be loaded, in the words of the dynamic loader; None when it can.

    The loader is asked, not the environment: LD_LIBRARY_PATH, ld.so.conf and what is already in the process
    all count. Where CANN is there its libraries stay loaded, as torch_npu is about to load them anyway.
    """
    for library in CANN_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError as fault:
            return str(fault)
    return None


def missing_operators(names: Iterable[str]) -> list[str]:
    """Those of the aclnn operators ``names`` that this CANN lacks, by their symbols, not its version."""
    libraries = _operator_libraries()
    return [name for name in names if not any(hasattr(lib, f"{name}GetWorkspaceSize") for lib in libraries)]


@functools.cache
def _operator_libraries() -> tuple[ctypes.CDLL, ...]:
    """Libraries with aclnn operators: one until CANN 8.5, from then on one for each family of operators."""
    parts = [
        part for folder in config.ascend_folders() for part in Path(folder, "lib64").glob("libopapi_*.so")
    ]
    found = []
    for library in ("libopapi.so", *map(str, sorted(parts))):
        with contextlib.suppress(OSError):
            found.append(ctypes.CDLL(library))
    return tuple(found)


def cann_folder() -> str | None:
    """An installation of CANN on disk, the one whose environment is set before any other."""
    places = [*config.ascend_folders(), *CANN_FOLDERS]
    return next((place for place in places if (Path(place) / "set_env.sh").is_file()), None)

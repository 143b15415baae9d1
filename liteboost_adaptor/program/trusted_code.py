"""Which Python code and which C functions are known to do nothing that a recorded step could miss.

Known is a function of torch, of ours, or of the libraries that models are written with, in a file as its
release shipped it (the digest in the distribution's RECORD), and a few modules of the standard library. Any
other function has to be read (`bytecode`).
"""

from __future__ import annotations

import csv
import functools
import hashlib
import sys
import types
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch

from ..watch import rewritten

#: Libraries that models are written with: known where their files are as released.
LIBRARIES = frozenset({"transformers", "accelerate", "peft", "safetensors", "einops", "packaging"})
#: By which configurations check what they are given, known where it is as released, too.
_CHECKS = "huggingface_hub.dataclasses"
#: Known whatever their files say: who builds torch from source has no release to compare with.
OURS = frozenset({"torch", "torch_npu", "liteboost_adaptor"})
#: Libraries below those: what known code keeps in them is no part of a step.
_BELOW = frozenset(
    {
        *(
            "huggingface_hub",
            "hf_xet",
            "httpx",
            "httpx2",
            "httpcore",
            "requests",
            "urllib3",
            "tqdm",
            "filelock",
        ),
        *("yaml", "regex", "tokenizers", "numpy", "sympy", "wrapt", "pydantic", "rich", "jinja2"),
    }
)
#: Modules of the standard library that may be called by code that has to be read: they keep nothing.
_STANDARD = frozenset(
    {
        *("abc", "collections", "contextlib", "copy", "copyreg", "dataclasses", "enum", "functools"),
        *("itertools", "math", "numbers", "operator", "re", "reprlib", "sre_compile", "sre_parse"),
        *("string", "types", "typing", "weakref", "_collections_abc", "_weakrefset", "_py_abc"),
        *("importlib", "_frozen_importlib", "_frozen_importlib_external", "zipimport", "keyword"),
    }
)
#: Modules of torch that tell of the process, or change it.
_STATEFUL = (
    *("torch.random.", "torch.backends.", "torch.distributed.", "torch.multiprocessing.", "torch.hub."),
    *("torch.utils.data.", "torch.utils.tensorboard.", "torch.serialization.", "torch.monitor."),
    *("torch.profiler.", "torch.package.", "torch.cuda.memory.", "torch.cuda.random."),
)
#: Of these, functions whose answer stays or is compared (`state`), and what sets back what it has set.
_OF_THE_BUILD = frozenset({"is_available", "is_built", "is_initialized", "sdp_kernel"})
_BUILTINS = frozenset(
    {
        *("abs", "all", "any", "bin", "callable", "chr", "divmod", "format", "getattr", "hasattr", "hex"),
        *("isinstance", "issubclass", "iter", "len", "max", "min", "next", "oct", "ord", "pow", "repr"),
        *("round", "setattr", "delattr", "sorted", "sum", "vars"),
    }
)
#: Modules in C whose functions depend on nothing but their arguments.
_C_MODULES = frozenset({"math", "_operator", "operator", "itertools", "_functools", "_collections", "cmath"})
_C_TYPES = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, slice, range),
    *(zip, map, filter, enumerate, reversed, super, property, staticmethod, classmethod, object, type),
    *(types.MappingProxyType, types.SimpleNamespace, types.MethodType, functools.partial),
)
_METHODS_OF: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, slice, range, type, object),
    *(torch.Tensor, torch.Size, torch.dtype, torch.device, BaseException, types.MappingProxyType),
    *(type({}.keys()), type({}.values()), type({}.items()), type(None), types.GeneratorType),
)


#: What `dataclasses` defines: the methods that all have.
_OF_DATACLASSES = "__create_fn__.<locals>.__"


@functools.lru_cache(maxsize=8192)
def package(module: str) -> str:
    return module.split(".")[0]


def is_fixed(module: str) -> bool:
    """Whether ``module`` belongs to torch or to us."""
    return package(module) in OURS


def is_standard(module: str) -> bool:
    return package(module) in sys.stdlib_module_names


def is_below(module: str) -> bool:
    """Whether ``module`` is none that models are written in or with."""
    return is_standard(module) or package(module) in _BELOW


def is_harmless(module: str) -> bool:
    """Whether ``module`` of the standard library may be called by code that has to be read."""
    return package(module) in _STANDARD


def is_stateful(module: str, function: str) -> bool:
    """Whether what a function of Python's library, or of torch's, gives may be another the next time."""
    if is_standard(module):
        return not is_harmless(module)
    return f"{module}.".startswith(_STATEFUL) and function not in _OF_THE_BUILD


def is_known(code: types.CodeType, names: dict[str, Any]) -> bool:
    """Whether ``code``, whose globals are ``names``, need not be read."""
    module = names.get("__name__") or ""
    if type(module) is not str:
        return False
    if is_fixed(module) or is_standard(module):
        return True  # who may call the standard library is decided where it is called (`watch`)
    if package(module) not in LIBRARIES and module != _CHECKS:
        return False
    if code.co_filename == "<string>" and code.co_qualname.startswith(_OF_DATACLASSES):
        return True
    if not _is_as_released(package(module), code.co_filename):
        return False
    # Who compiles a text of his own may name any file, and run it among any names.
    return code in rewritten or code in _codes_in(code.co_filename)


@functools.lru_cache(maxsize=512)
def _codes_in(filename: str) -> frozenset[types.CodeType]:
    """What a file that is as released defines, as Python compiles it, or has kept it compiled."""
    try:
        code = SourceFileLoader("released", filename).get_code("released")
    except (OSError, SyntaxError, ImportError, ValueError):
        return frozenset()
    return frozenset(with_nested(code)) if code is not None else frozenset()


def with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code``, and that of all functions which are made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_nested(constant)


@functools.lru_cache(maxsize=4096)
def _is_as_released(library: str, filename: str) -> bool:
    recorded = _records(library).get(filename)
    if recorded is None:
        return False
    try:
        digest = hashlib.sha256(Path(filename).read_bytes()).digest()
    except OSError:
        return False
    return urlsafe_b64encode(digest).rstrip(b"=").decode() == recorded


@functools.cache
def _records(library: str) -> dict[str, str]:
    """File -> digest, of what the installed release of ``library`` lists."""
    try:
        distribution = metadata.distribution(library)
        text = distribution.read_text("RECORD") or ""
    except metadata.PackageNotFoundError:
        return {}
    root = Path(str(distribution.locate_file("")))
    rows = (row for row in csv.reader(text.splitlines()) if len(row) == 3)
    return {str(root / name): digest[7:] for name, digest, _ in rows if digest.startswith("sha256=")}


def is_plain_function(function: Any) -> bool:
    """Whether a function in C depends on its arguments alone, and changes nothing else."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        if owner.__name__ == "builtins":
            return name in _BUILTINS
        return owner.__name__ in _C_MODULES or is_fixed(owner.__name__)
    if owner is not None:
        cls = owner if isinstance(owner, type) else type(owner)
        return isinstance(owner, _METHODS_OF) or is_fixed(cls.__module__) or _is_plain_owner(cls)
    definer = getattr(function, "__objclass__", None)
    if definer is not None:
        return issubclass(definer, _METHODS_OF) or is_fixed(definer.__module__) or _is_plain_owner(definer)
    module = getattr(function, "__module__", None)
    return type(module) is str and (module in _C_MODULES or is_fixed(module))


def _is_plain_owner(cls: type) -> bool:
    return cls.__module__ in ("collections", "_collections", "itertools", "enum", "types", "functools")


def is_plain_class(cls: type) -> bool:
    """Whether to call a class in C makes an object of its arguments and does nothing else."""
    if cls in _C_TYPES or cls.__module__ in ("collections", "itertools", "_collections"):
        return True
    return is_fixed(cls.__module__) or issubclass(cls, BaseException)


def is_from_elsewhere(function: Any) -> bool:
    """Whether a function in C is neither Python's own, nor torch's, nor NumPy's: an extension's."""
    module = getattr(function, "__module__", None)
    if type(module) is not str:
        owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
        module = owner.__module__
    return not (
        module in ("builtins", "_jit_internal")
        or is_standard(module)
        or is_fixed(module)
        or package(module) in (*LIBRARIES, "numpy", "tokenizers", "sympy", "wrapt")
    )

"""Versions and processor of this machine, read without importing any of the packages."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

#: Packages whose versions a bug report needs.
PACKAGES = ("torch", "torch_npu", "transformers", "accelerate", "safetensors", "wrapt", "rich", "typer")

#: What each instruction set of the kernels asks of the CPU, in the names of /proc/cpuinfo.
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_AVX512_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_X86_FLAGS = {
    "baseline": frozenset[str](),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx_bf16": _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
}
_DOTPROD = frozenset({"atomics", "asimdrdm", "asimddp"})
_ARM_FLAGS = {
    "baseline": frozenset[str](),
    "dotprod": _DOTPROD,
    "i8mm_bf16": _DOTPROD | {"i8mm", "bf16"},
}
#: By name of the machine: where /proc/cpuinfo lists them, and what each instruction set asks for.
ISA_FLAGS = {
    "x86_64": ("flags", _X86_FLAGS),
    "AMD64": ("flags", _X86_FLAGS),
    "aarch64": ("Features", _ARM_FLAGS),
}


def package_versions() -> dict[str, str | None]:
    """Version of each of `PACKAGES`, None where it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name as the kernel gives it, else the architecture."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_isas() -> list[str]:
    """Instruction sets of the kernels this CPU can run, the weakest first."""
    if platform.machine() not in ISA_FLAGS:
        return ["baseline"]
    key, flags_of = ISA_FLAGS[platform.machine()]
    flags = set(_cpuinfo().get(key, "").split())
    return [name for name, needed in flags_of.items() if needed <= flags]


def isas_left_out(build_info: Mapping[str, Any]) -> str | None:
    """What to say of instruction sets of this CPU beyond the best of the kernels; None where there are none.

    Args:
        build_info: What the kernels were built with. A compiler may be too old for the last sets, and with
            LITEBOOST_ISAS=native they were left out where the CPU that compiled had none.
    """
    found = cpu_isas()
    ranks = [found.index(isa) for isa in build_info.get("isas", ()) if isa in found]
    missing = ", ".join(found[ranks[-1] + 1 :]) if ranks else ""
    if not missing:
        return None
    compiler = build_info.get("compiler", "the compiler")
    return (
        f"this CPU has {missing}, the kernels have not: {compiler}, with which they were built, knows none, "
        "or they were built for another CPU (LITEBOOST_ISAS=native)"
    )


def _cpuinfo() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; empty where there is none."""
    try:
        block = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}

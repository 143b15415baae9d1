"""Which instruction set runs: the least of the user's limit, torch's limit, and what the CPU has."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest
import torch
from support.processes import python_json

from liteboost_adaptor import config

pytestmark = pytest.mark.usefixtures("native_only")

ops = torch.ops.liteboost
IS_X86 = platform.machine() in ("x86_64", "AMD64")
ORDER = list(config.X86_ISAS if IS_X86 else config.ARM_ISAS)

SHOW = """
import json, torch
from liteboost_adaptor import native
status = native.load()
print(json.dumps([torch.ops.liteboost._isa(), torch.ops.liteboost._isas()]))
"""


AVX512_BF16 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni", "avx512_bf16"}


def has_flags(wanted: set[str]) -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            flags = next(line for line in file if line.startswith("flags")).split()
    except (OSError, StopIteration):
        return False
    return wanted <= set(flags)


def built_isas() -> list[str]:
    return list(json.loads(ops._build_info())["isas"])


def test_the_best_is_used_by_default() -> None:
    isas = ops._isas()
    assert isas == built_isas()[: len(isas)]
    assert ops._isa() == isas[-1]


def test_detection_agrees_with_the_kernels_list_of_flags() -> None:
    if IS_X86 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        # Linux lists the tiles that it saves for a process that asks. Not all need be compiled.
        tiles = AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
        for isa, flags in (("avx512_bf16", AVX512_BF16), ("amx_bf16", tiles)):
            assert (isa in ops._isas()) == (isa in built_isas() and has_flags(flags))


def test_limit_and_lift() -> None:
    for isa in ops._isas():
        ops._limit_isa(isa)
        assert ops._isa() == isa
    ops._limit_isa("")
    assert ops._isa() == ops._isas()[-1]


@pytest.mark.parametrize("name", ["sse", "AVX2", "avx", "default"])
def test_unknown_name_lists_the_allowed(name: str) -> None:
    before = ops._isa()
    with pytest.raises(ValueError, match=f"name must be one of baseline.*got '{name}'"):
        ops._limit_isa(name)
    assert ops._isa() == before


@pytest.mark.parametrize(("capability", "best"), [("default", "baseline"), ("avx2", "avx2")])
def test_torchs_own_limit_is_respected(capability: str, best: str) -> None:
    if not IS_X86 or best not in ops._isas():
        pytest.skip(f"this CPU has no {best}, or is none whose instruction sets torch limits")
    isa, isas = python_json(SHOW, ATEN_CPU_CAPABILITY=capability)
    assert isa == best and isas == [each for each in ORDER[: ORDER.index(best) + 1] if each in built_isas()]


def test_every_list_has_the_same_names() -> None:
    kernels = Path(__file__).parents[2] / "kernels"
    lists = re.findall(r"enum class Isa : int32_t \{ (.*) \};", (kernels / "common/isa.h").read_text())
    expected = [config.X86_ISAS, config.ARM_ISAS, ("baseline",)]
    assert [tuple(found.split(", ")) for found in lists] == expected
    flags = re.findall(r"set\(LB_FLAGS_(\w+)", (kernels / "CMakeLists.txt").read_text())
    assert tuple(flags) == config.ISA_NAMES


def test_environment_variable_limits() -> None:
    for name in {ops._isas()[0], ops._isas()[-1]}:
        assert python_json(SHOW, LITEBOOST_ISA=name) == [name, ops._isas()]


def test_results_of_the_instruction_sets_agree() -> None:
    x, y, weight = (*torch.randn(2, 33, 1000).bfloat16(), torch.randn(1000).bfloat16())
    results = []
    for isa in ops._isas():
        ops._limit_isa(isa)
        results.append((ops.rms_norm(x, weight, 1e-6), ops.gated_activation(x, y)))
    ops._limit_isa("")
    for result in results:
        for ours, first in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, first, rtol=2**-7, atol=1e-6)
            assert (ours != first).double().mean() < 0.005


def test_build_info_in_library_and_file_agree() -> None:
    from liteboost_adaptor import native

    path = native.load().path
    inside = json.loads(ops._build_info())
    assert {"torch", "cxx11_abi", "compiler", "processor", "isas"} <= set(inside)
    if "torch_minor" in inside:  # of a wheel: for all releases of a minor version, whatever device
        assert inside["torch_minor"] == native.minor_version(torch.__version__)
        assert inside["torch_minor"] == native.minor_version(inside["torch"])
    else:
        assert inside["torch"] == torch.__version__
    assert json.loads((path.parent / "_build_info.json").read_text()) == inside

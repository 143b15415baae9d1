"""What the instruction-set objects hold: no instruction beyond their set, no symbol others could link to."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest
from support import kernel_build

from liteboost_adaptor.config import X86_ISAS
from liteboost_adaptor.environment import machine

BF16_OR_VNNI = r"vdpbf16ps|vcvtne(2)?ps2bf16|vpdp(bu|wu|bs|ws)[su]ds?"
TILES = r"tdp\w+|(ld|st)tilecfg|tile\w+"
AVX = r"v[a-z0-9]+"
# What only AVX-512 encodes: its registers, its masks, and the upper sixteen of the narrower ones.
AVX512_OPERAND = r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2[0-9]|3[01])"


@pytest.fixture(scope="module")
def isas(host_build: Path) -> list[str]:
    found = kernel_build.built_isas(host_build)
    if "avx2" not in found:
        pytest.skip(f"instruction sets of x86-64 only; built here: {', '.join(found)}")
    return found


def objects(folder: Path, isa: str) -> list[Path]:
    found = sorted(folder.glob(f"CMakeFiles/lb_isa_{isa}.dir/**/*.o"))
    families = {path.parent.name for path in (kernel_build.ROOT / "kernels").glob("*/*_cpu_isa.cpp")}
    assert {path.parent.name for path in found} == families
    return found


def instructions(path: Path) -> list[tuple[str, str]]:
    """Mnemonic and operands of every instruction of an object."""
    objdump = kernel_build.find("objdump", why="disassembles the objects; Debian has it in binutils")
    text = kernel_build.run([objdump, "--disassemble", "--no-show-raw-insn", str(path)])
    # Prefixes such as `data16` and `cs` stand where a mnemonic does, in padding only.
    return re.findall(r"^\s+[0-9a-f]+:\s+(\S+)\s*(.*)$", text, re.MULTILINE)


def mnemonics(path: Path) -> set[str]:
    return {mnemonic for mnemonic, _ in instructions(path)}


def matching(pattern: str, names: set[str]) -> set[str]:
    return {name for name in names if re.fullmatch(pattern, name)}


def test_baseline_has_no_avx(host_build: Path, isas: list[str]) -> None:
    for path in objects(host_build, "baseline"):
        names = mnemonics(path)
        assert "mulps" in names  # that something was disassembled
        assert not matching(AVX, names), path


#: Their loops multiply and round, and add up nothing.
WITHOUT_SUMS = ("rope", "int8_attention")


def test_avx2_has_no_avx512(host_build: Path, isas: list[str]) -> None:
    for path in objects(host_build, "avx2"):
        listing = instructions(path)
        is_vectorised = any(mnemonic.startswith(("vfmadd", "vpmadd")) for mnemonic, _ in listing)
        if path.name.startswith(WITHOUT_SUMS):
            is_vectorised = any(mnemonic == "vmulps" and "%ymm" in operands for mnemonic, operands in listing)
        assert is_vectorised, path
        assert not [line for line in listing if re.search(AVX512_OPERAND, line[1])], path


@pytest.mark.parametrize("lesser", ["baseline", "avx2", "avx512"])
def test_bf16_and_vnni_are_in_their_objects_only(host_build: Path, isas: list[str], lesser: str) -> None:
    for path in objects(host_build, lesser):
        assert not matching(BF16_OR_VNNI, mnemonics(path)), path


def test_bf16_is_used_where_it_may_be(host_build: Path, isas: list[str]) -> None:
    found = set.union(*(mnemonics(path) for path in objects(host_build, "avx512_bf16")))
    assert matching(BF16_OR_VNNI, found)


@pytest.mark.parametrize("x86_isa", X86_ISAS)
def test_tiles_are_in_their_objects_only(host_build: Path, isas: list[str], x86_isa: str) -> None:
    if x86_isa not in isas:
        pytest.skip(f"the compiler knows no {x86_isa}")
    found = set.union(*(mnemonics(path) for path in objects(host_build, x86_isa)))
    expected = (
        {"tdpbf16ps", "tdpbssd", "tdpbsud", "tilerelease", "tilezero"} if x86_isa == "amx_bf16" else set()
    )
    assert expected <= matching(TILES, found) and bool(matching(TILES, found)) == bool(expected)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="tiles are of x86-64")
def test_a_compiler_without_tiles_offers_none(tmp_path: Path) -> None:
    # What CMake finds out of a compiler such as GCC 10.
    folder = kernel_build.configure(tmp_path, "-DLB_COMPILER_HAS_TILES=OFF")
    assert kernel_build.built_isas(folder) == list(X86_ISAS[:-1])
    kernel_build.build(folder, "detect_isa")
    best = kernel_build.run([str(folder / "csrc" / "detect_isa")]).strip()
    here = [isa for isa in machine.cpu_isas() if isa != "amx_bf16"]
    assert best == here[-1]


def test_native_is_the_best_of_this_cpu(tmp_path: Path) -> None:
    folder = kernel_build.configure(tmp_path, "-DLITEBOOST_ISAS=native")
    best = machine.cpu_isas()[-1]
    assert kernel_build.built_isas(folder) == [best]
    kernel_build.build(folder, "detect_isa")
    assert kernel_build.run([str(folder / "csrc" / "detect_isa")]).strip() == best


def test_no_symbol_of_an_object_can_serve_another(host_build: Path, isas: list[str]) -> None:
    nm = kernel_build.find("nm", why="lists symbols; Debian has it in binutils")
    for isa in isas:
        own = f"liteboost::{isa}::"
        for path in objects(host_build, isa):
            for line in kernel_build.run([nm, "--demangle", "--defined-only", str(path)]).splitlines():
                _, kind, name = line.split(" ", 2)
                # Lower case is local. Weak (W, V) and unique (u) ones are what a linker merges.
                if kind.isupper() or kind in "uvw":
                    assert name.startswith(own), f"{path.name} for {isa} defines {kind} {name}"
                    assert kind not in "WVuvw", f"{path.name} for {isa} has the mergeable symbol {name}"


def test_only_these_objects_get_instruction_set_flags(host_build: Path, isas: list[str]) -> None:
    # CMake writes one list for a whole project, of which the kernels may be a part.
    lists = [folder / "compile_commands.json" for folder in (host_build, host_build.parent)]
    commands = json.loads(next(path for path in lists if path.exists()).read_text())
    flagged = {
        re.search(r"lb_isa_\w+|vec_test_\w+", entry["output"] if "output" in entry else entry["command"])
        for entry in commands
        if re.search(r" -m(amx|avx|fma|f16c|sse|arch|tune)", entry["command"])
    }
    assert None not in flagged
    assert not [entry for entry in commands if "march=" in entry["command"]]

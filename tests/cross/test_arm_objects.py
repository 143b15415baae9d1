"""What objects for aarch64 hold: no instruction beyond their set, and the products they are made for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import kernel_build

from liteboost_adaptor.config import ARM_ISAS

#: Mnemonics that an instruction set is the first to have.
ADDED = {
    "dotprod": r"[su]dot|(cas|swp|(ld|st)(add|clr|eor|set|[su]max|[su]min))\w*|sqrdml[as]h",
    "i8mm_bf16": r"bf\w+dot|bfdot|bfmmla|bfmlal[bt]|bfcvt\w*|[su]mmla|us(dot|mmla)|sudot",
}
#: Of nobody: SVE, arithmetic in f16, and what Armv8.3 to 8.6 have beside these products.
BEYOND_ALL = r"fcmla|fcadd|fmlal2?|fmlsl2?|fjcvtzs|ldapu?r\w*|ld1rq\w*|whilel\w+|cnt[bhwd]|ptrue|rdvl|addvl"
SVE_REGISTER = r"\bz\d+\.[bhsdq]|\bp\d+/[mz]"
F16_ARITHMETIC = r"f(add|sub|mul|mla|mls|div|max|min|sqrt)\w*"
#: Families whose loops multiply bytes or pairs of bf16, and by what.
MULTIPLIES = {
    ("int8_linear", "dotprod"): {"sdot"},
    ("int8_linear", "i8mm_bf16"): {"sdot", "smmla"},
    ("quantized_linear", "dotprod"): {"sdot"},
    ("quantized_linear", "i8mm_bf16"): {"sdot"},
    ("linear", "i8mm_bf16"): {"bfdot"},
    ("attention", "dotprod"): {"sdot"},
    ("attention", "i8mm_bf16"): {"bfdot", "bfmmla", "sdot"},
}
FAMILIES = sorted(path.parent.name for path in (kernel_build.ROOT / "kernels").glob("*/*_cpu_isa.cpp"))


def instructions(build: Path, family: str, isa: str) -> list[tuple[str, str]]:
    """Mnemonic and operands of every instruction of an object, which is compiled if it is not there."""
    name = f"CMakeFiles/lb_isa_{isa}.dir/{family}/{family}_cpu_isa.cpp.o"
    # Only Ninja has objects among its targets.
    kernel_build.build(build, name if (build / "build.ninja").exists() else f"lb_isa_{isa}")
    objdump = kernel_build.find(
        "aarch64-linux-gnu-objdump", why="Debian has it in binutils-aarch64-linux-gnu"
    )
    text = kernel_build.run([objdump, "--disassemble", "--no-show-raw-insn", str(build / name)])
    return re.findall(r"^\s+[0-9a-f]+:\t(\S+)\s*(.*)$", text, re.MULTILINE)


def holds_its_instruction_set(build: Path, family: str, isa: str) -> None:
    found = instructions(build, family, isa)
    names = {mnemonic for mnemonic, _ in found}
    assert len(found) > 100 and names & {"fmul", "fmla"}, "not disassembled"
    beyond = [BEYOND_ALL, *(ADDED[other] for other in ARM_ISAS[ARM_ISAS.index(isa) + 1 :])]
    assert not {name for name in names if re.fullmatch("|".join(beyond), name)}
    assert not [line for line in found if re.search(SVE_REGISTER, line[1])]
    assert not [
        line
        for line in found
        if re.fullmatch(F16_ARITHMETIC, line[0]) and re.search(r"\.[48]h|\bh\d", line[1])
    ]
    assert MULTIPLIES.get((family, isa), set()) <= names


@pytest.mark.parametrize("arm_isa", ARM_ISAS)
def test_instructions_of_a_family(aarch64_build: Path, arm_isa: str) -> None:
    holds_its_instruction_set(aarch64_build, "int8_linear", arm_isa)


@pytest.mark.full
@pytest.mark.parametrize("arm_isa", ARM_ISAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_instructions_of_every_family(aarch64_build: Path, family: str, arm_isa: str) -> None:
    holds_its_instruction_set(aarch64_build, family, arm_isa)

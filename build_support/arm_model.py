"""Models the hot loops of the aarch64 objects with llvm-mca and prints a table, as in docs/arm.md.

    python build_support/arm_model.py BUILD

BUILD is a folder that a cross build has compiled (``CMakeFiles/lb_isa_<isa>.dir``; docs/arm.md says how). A
loop is found in the disassembly of the object: the innermost one of a function that has the most products. It
is then simulated alone, with every load in the first cache: what the table says is modelled, not measured.
Needs LLVM 17 or newer, whose model of Neoverse V1 is its own (Debian: llvm-19), and binutils for aarch64.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MCA = ("llvm-mca-19", "llvm-mca-18", "llvm-mca-17", "llvm-mca")
OBJDUMP = "aarch64-linux-gnu-objdump"
CPUS = ("neoverse-v1", "neoverse-n1", "tsv110")
#: What each CPU has of the instruction sets.
LEVELS = {
    "neoverse-v1": ("baseline", "dotprod", "i8mm_bf16"),
    "neoverse-n1": ("baseline", "dotprod"),
    "tsv110": ("baseline", "dotprod"),
}
#: Products and additions of one instruction.
PRODUCTS = {"fmla": 4, "sdot": 16, "udot": 16, "usdot": 16, "smmla": 32, "bfdot": 8, "bfmmla": 16}
ITERATIONS = 200
#: Older ones model Neoverse V1 as a Cortex-A57.
OLDEST_LLVM = 17


class ModelError(RuntimeError):
    """A program or a loop that is asked for is not there."""


@dataclass(frozen=True)
class Loop:
    """Where a loop is: a function of an object, by a pattern of its demangled name.

    Attributes:
        name: What the table calls it.
        isa: Instruction set of the object.
        family: Folder in ``kernels/``.
        function: Pattern searched for in the demangled name.
        longest: Take every branch that makes an iteration longer, not shorter.
        uses: Instruction that the loop has, where the function has loops for several types.
        lacks: Pattern of those it has not.
    """

    name: str
    isa: str
    family: str
    function: str
    longest: bool = False
    uses: str = ""
    lacks: str = "never"

    def is_it(self, path: list[Instruction]) -> bool:
        """Whether these are the instructions of an iteration."""
        names = {each.mnemonic for each in path}
        return (not self.uses or self.uses in names) and not any(re.match(self.lacks, each) for each in names)


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly; ``target`` is where a branch leads, if it is one."""

    address: int
    mnemonic: str
    operands: str
    target: int | None

    @property
    def is_conditional(self) -> bool:
        """Whether the next instruction may be reached from this one though it branches."""
        return self.target is not None and self.mnemonic != "b"

    @property
    def is_vector(self) -> bool:
        """Whether it calculates with vectors; those that load and store have units of their own."""
        return bool(re.search(r"\bv\d", self.operands)) and not re.match(r"ld|st", self.mnemonic)

    @property
    def products(self) -> int:
        """How many products a vector instruction adds."""
        return PRODUCTS.get(self.mnemonic, 0) if self.is_vector else 0

    @property
    def text(self) -> str:
        """As an assembler takes it; a branch leads nowhere in particular."""
        if self.target is None:
            return f"{self.mnemonic} {self.operands}"
        registers = self.operands.rpartition(",")[0]
        return f"{self.mnemonic} {registers + ', ' if registers else ''}loop"


#: Its loops are part of the other function, or not, as the compiler likes.
ONE_ROW = r"run_one_row<|run_any"
LOOPS = (
    Loop("w8a16, 1 row", "dotprod", "quantized_linear", r"limb_pass<.*W8Limbs, .*bf16, 1>"),
    Loop("w8a16, 1 row, third limb", "dotprod", "quantized_linear", r"limb_pass<.*W8Limbs, .*bf16, 1>", True),
    Loop("w8a16, 2 rows", "dotprod", "quantized_linear", r"limb_pass<.*W8Limbs, .*bf16, 2>"),
    Loop("w4a16, 1 row", "dotprod", "quantized_linear", r"limb_pass<.*W4Limbs, .*bf16, 1>"),
    Loop("w4a16, 1 row, third limb", "dotprod", "quantized_linear", r"limb_pass<.*W4Limbs, .*bf16, 1>", True),
    Loop("w4a16, 2 rows", "dotprod", "quantized_linear", r"limb_pass<.*W4Limbs, .*bf16, 2>"),
    Loop("w4a8, 1 row", "dotprod", "quantized_linear", r"int8_pass<.*bf16, 1, false>"),
    Loop("w4a8, 4 rows", "dotprod", "quantized_linear", r"int8_pass<.*bf16, 4, false>"),
    Loop("linear bf16, 1 row", "i8mm_bf16", "linear", ONE_ROW, uses="bfdot"),
    Loop("linear bf16, 4 rows", "i8mm_bf16", "linear", r"run_rows<.*bf16, 4>"),
    Loop("linear bf16, 1 row", "dotprod", "linear", ONE_ROW, uses="shll"),
    Loop("linear bf16, 4 rows", "dotprod", "linear", r"run_rows<.*bf16, 4>"),
    Loop("linear f16, 1 row", "dotprod", "linear", ONE_ROW, uses="fcvtl"),
    Loop("linear f16, 4 rows", "dotprod", "linear", r"run_rows<.*::f16, 4>"),
    Loop("linear fp32, 1 row", "dotprod", "linear", ONE_ROW, lacks="shll|fcvtl|bfdot"),
    Loop("linear fp32, 4 rows", "dotprod", "linear", r"run_rows<float, 4>"),
    Loop("w8a8, 1 row", "dotprod", "int8_linear", r"few(_any|_rows<.*bf16, 1>)"),
    Loop("w8a8, 4 rows", "dotprod", "int8_linear", r"few_rows<.*bf16, 4>"),
    Loop("w8a8, many rows", "dotprod", "int8_linear", r"\btile<.*bf16>|panels_any"),
    Loop("w8a8, many rows", "i8mm_bf16", "int8_linear", r"\btile<.*bf16>|panels_any"),
    Loop("attention, prefill, fp32", "dotprod", "attention", r"multiply_tile<.*Words32, 6, 4>"),
    Loop("attention, prefill, bf16", "i8mm_bf16", "attention", r"multiply_tile<.*WordsBf16, 6, 4>"),
    Loop(
        "attention, kv8, keys, 1 query",
        "dotprod",
        "attention",
        r"dot_int8_rows<1>|run_task<.*WordsOfInt8.*lambda",
    ),
    Loop("attention, kv8, keys, 2 queries", "dotprod", "attention", r"dot_int8_rows<2>"),
    Loop("attention, kv8, values, 1 query", "dotprod", "attention", r"weigh_some_channels<1, true>"),
    Loop("attention, kv8, values, 2 queries", "dotprod", "attention", r"weigh_some_channels<2, true>"),
    Loop("experts, bf16, 4 rows", "dotprod", "experts", r"columns<.*bf16>"),
    Loop("delta rule, 1 token", "dotprod", "delta_rule", r"run_chunk<.*, 1, 4>"),
    Loop("delta rule, chunk", "dotprod", "delta_rule", r"run_chunk<.*, 4, 2>"),
    Loop("w8, fp32, 1 row", "baseline", "quantized_linear", r"float_pass<.*W8, float, 1>"),
    Loop("w8, fp32, 4 rows", "baseline", "quantized_linear", r"float_pass<.*W8, float, 4>"),
    Loop("w4, fp32, 1 row", "baseline", "quantized_linear", r"float_pass<.*W4, float, 1>"),
    Loop("w4, fp32, 4 rows", "baseline", "quantized_linear", r"float_pass<.*W4, float, 4>"),
)


def run(command: list[str], text: str | None = None) -> str:
    """The output of a command; its errors are ours."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def find_mca() -> str:
    """An llvm-mca that is new enough."""
    for path in filter(None, map(shutil.which, MCA)):
        version = re.search(r"LLVM version (\d+)", run([path, "--version"]))
        if version and int(version[1]) >= OLDEST_LLVM:
            return path
    raise ModelError(
        f"asked for llvm-mca of LLVM {OLDEST_LLVM} or newer, found none; install Debian's llvm-19"
    )


def find_objdump() -> str:
    """A disassembler for aarch64."""
    if path := shutil.which(OBJDUMP):
        return path
    raise ModelError(f"asked for {OBJDUMP}, found none; install Debian's binutils-aarch64-linux-gnu")


@dataclass
class Function:
    """The instructions of one function."""

    code: list[Instruction]

    @cached_property
    def index(self) -> dict[int, int]:
        """Places in ``code``, by address."""
        return {each.address: place for place, each in enumerate(self.code)}

    def loops(self) -> list[tuple[int, int]]:
        """First and last place of each loop that has no other inside which multiplies."""
        found = [
            (self.index[each.target], place)
            for place, each in enumerate(self.code)
            if each.target in self.index and self.index[each.target] <= place
        ]
        multiply = [ends for ends in found if products_of(self.path(*ends, longest=False)) > 0]
        return [
            (a, b)
            for a, b in multiply
            if not any((c, d) != (a, b) and a <= c and d <= b for c, d in multiply)
        ]

    def path(self, first: int, last: int, longest: bool) -> list[Instruction]:
        """One iteration, from ``first`` to the branch back at ``last``; empty where there is none."""
        best: dict[int, list[int]] = {last: [last]}
        for place in range(last - 1, first - 1, -1):
            each = self.code[place]
            follows = [place + 1] if each.target is None or each.is_conditional else []
            if each.target in self.index:
                follows.append(self.index[each.target])
            ways = [best[after] for after in follows if place < after <= last and after in best]
            if ways:
                best[place] = [place, *(max(ways, key=len) if longest else min(ways, key=len))]
        return [self.code[place] for place in best.get(first, [])]

    def hot_loop(self, asked: Loop) -> list[Instruction]:
        """The loop that multiplies most in an iteration, of those that are asked for."""
        paths = [self.path(first, last, asked.longest) for first, last in self.loops()]
        paths = [path for path in paths if asked.is_it(path)]
        return max(paths, key=products_of, default=[])


def products_of(path: list[Instruction]) -> int:
    """How many products an iteration adds."""
    return sum(each.products for each in path)


def functions(objdump: str, path: Path) -> dict[str, Function]:
    """Each function of an object, by its demangled name."""
    listing = run([objdump, "--disassemble", "--demangle", "--no-show-raw-insn", str(path)])
    found: dict[str, Function] = {}
    code: list[Instruction] = []
    for line in listing.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            code = found.setdefault(head[1], Function([])).code
        elif each := re.match(r"\s+([0-9a-f]+):\t(\S+)\s*(.*)$", line):
            operands = re.sub(r"\s*<.*>$", "", re.sub(r"\s*//.*$", "", each[3]))
            is_branch = re.fullmatch(r"b|b\.\w+|cbn?z|tbn?z", each[2])
            target = int(operands.rpartition(",")[2].strip(), 16) if is_branch else None
            code.append(Instruction(int(each[1], 16), each[2], operands, target))
    return found


@dataclass(frozen=True)
class Simulated:
    """One iteration of a loop.

    Attributes:
        cycles: It takes.
        vector: Cycles for which it occupies each vector unit, were they all equally busy.
        load: The same of the units that load.
        alone: Cycles that each instruction needs where there is no other.
    """

    cycles: float
    vector: float
    load: float
    alone: list[float]


def simulate(mca: str, cpu: str, lines: list[str]) -> Simulated:
    """Run a loop in llvm-mca."""
    command = [mca, "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+dotprod,+bf16,+i8mm", "--json"]
    text = run([*command, f"-iterations={ITERATIONS}"], "loop:\n" + "\n".join(lines) + "\n")
    found = json.loads(text)
    region, names = found["CodeRegions"][0], found["TargetInfo"]["Resources"]
    usage = dict.fromkeys(range(len(names)), 0.0)
    for each in region["ResourcePressureView"]["ResourcePressureInfo"]:
        if each["InstructionIndex"] == len(lines):
            usage[each["ResourceIndex"]] = float(each["ResourceUsage"])

    def mean(pattern: str) -> float:
        units = [usage[place] for place, name in enumerate(names) if re.search(pattern, name)]
        return sum(units) / len(units)

    alone = [float(each["RThroughput"]) for each in region["InstructionInfoView"]["InstructionList"]]
    cycles = region["SummaryView"]["TotalCycles"] / ITERATIONS
    return Simulated(cycles, mean(r"UnitV\d|FSU\d"), mean(r"UnitL|LdSt"), alone)


def by_kind(alone: list[float], path: list[Instruction]) -> dict[str, float]:
    """Cycles that vector instructions of each name need; ``fcvtl2``, of upper halves, is ``fcvtl``."""
    needed: dict[str, float] = {}
    for time, each in zip(alone, path, strict=True):
        if each.is_vector:
            name = each.mnemonic.removesuffix("2")
            needed[name] = needed.get(name, 0.0) + time
    return needed


def cell(mca: str, cpu: str, path: list[Instruction]) -> str:
    """Cycles of an iteration, and the shares of the units' and of the multipliers' limit."""
    found = simulate(mca, cpu, [each.text for each in path])
    multiply = sum(time for time, each in zip(found.alone, path, strict=True) if each.products)
    limits = [(found.vector, "vector"), (found.load, "load")]
    limits += [(time, name) for name, time in by_kind(found.alone, path).items()]
    busiest, unit = max(limits, key=lambda limit: round(limit[0], 2))
    return f"{found.cycles:.1f} | {busiest / found.cycles:.0%} {unit} | {multiply / found.cycles:.0%}"


def runs(loop: Loop, cpu: str) -> bool:
    """Whether a CPU takes this loop, and none of the same name of a better instruction set."""
    levels = LEVELS[cpu]
    same = [levels.index(each.isa) for each in LOOPS if each.name == loop.name and each.isa in levels]
    return loop.isa in levels and levels.index(loop.isa) == max(same)


def table(build: Path, cpus: tuple[str, ...], only: str) -> list[str]:
    """The table's lines."""
    mca, objdump = find_mca(), find_objdump()
    columns = "".join(f" | {cpu}: cycles | units | multipliers" for cpu in cpus)
    lines = [
        f"| loop | instruction set | products{columns} |",
        "|---|---|---:|" + "---:|---:|---:|" * len(cpus),
    ]
    for loop in LOOPS:
        if not re.search(only, loop.name):
            continue
        folder = build / f"CMakeFiles/lb_isa_{loop.isa}.dir/{loop.family}"
        path = folder / f"{loop.family}_cpu_isa.cpp.o"
        if not path.exists():
            raise ModelError(f"asked for {path}, found nothing; build target lb_isa_{loop.isa} for aarch64")
        found = [each for name, each in functions(objdump, path).items() if re.search(loop.function, name)]
        code = max((each.hot_loop(loop) for each in found), key=products_of, default=[])
        if not code:
            raise ModelError(f"asked for a loop of {loop.function}, found none in {path}; correct LOOPS")
        cells = [cell(mca, cpu, code) if runs(loop, cpu) else " | | " for cpu in cpus]
        lines.append(f"| {loop.name} | {loop.isa} | {products_of(code)} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Print the table; the status is 1 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "build", type=Path, help="folder with CMakeFiles/lb_isa_<isa>.dir, compiled for aarch64"
    )
    parser.add_argument("--cpus", nargs="+", choices=CPUS, default=CPUS)
    parser.add_argument("--only", default="", help="pattern of the loops' names")
    asked = parser.parse_args()
    try:
        sys.stdout.write("\n".join(table(asked.build, tuple(asked.cpus), asked.only)) + "\n")
    except ModelError as error:
        sys.stderr.write(f"arm_model: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

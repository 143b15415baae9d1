"""Imports point one way, names in rule files resolve, files stay short, and our import costs little."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest
from support import processes

import liteboost_adaptor
from liteboost_adaptor.engine import catalogue

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(liteboost_adaptor.__file__).resolve().parent
LONGEST, LONGEST_FUNCTION = 500, 80

#: Parts of the package, from those nobody stands under to those nobody stands on.
LAYERS = (
    ("errors", "memory", "python_kernels", "setting_values", "summary", "thread_pool"),
    ("config", "outputs"),
    ("report", "watch"),
    ("native",),
    ("native_npu",),
    ("native_build",),
    ("ops",),
    ("eligibility",),
    ("kv_cache",),
    ("replacements",),
    ("program",),
    ("huggingface", "environment"),
    ("checkpoint",),
    ("quantization",),
    ("parallel",),
    ("rule_ids",),
    ("api",),
    ("status_file",),
    ("bench", "audit", "export", "selftest"),
    ("cli",),
    ("__main__",),
    ("startup",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
#: Beside the order above: the engine knows no model and no op, and only those who bind models, or set
#: something on its undo stack, know it.
ENGINE_IMPORTS = {"config", "errors", "python_kernels", "report", "watch"}
#: Packages of a part, and "" for its own modules: each may import those before it.
WITHIN = {
    "parallel": ("runtime", "tensor", "sequence", "data", "checkpoint", ""),
    "quantization": ("schemes", "layers", "formats", "checkpoint", "calibration", ""),
}
#: Of these, three stand beside each other.
SIBLINGS = {
    "parallel": {"sequence", "data", "checkpoint"},
    "quantization": {"formats", "checkpoint", "calibration"},
}
ENGINE_IMPORTERS = {
    *("kv_cache", "huggingface", "environment", "quantization", "parallel"),
    *("api", "bench", "audit", "cli", "", "engine"),
}


def part_of(file: Path) -> str:
    """The first name below the package: a module or a folder; empty for the package's own ``__init__``."""
    relative = file.relative_to(PACKAGE).with_suffix("")
    return "" if relative.parts == ("__init__",) else relative.parts[0]


def imported_names(file: Path) -> set[tuple[str, ...]]:
    """What of the package ``file`` imports, at its top or inside a function; names below the package."""
    here = ("liteboost_adaptor", *file.relative_to(PACKAGE).with_suffix("").parts)
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        found |= {tuple(name[1:]) for name in names if name[0] == "liteboost_adaptor" and len(name) > 1}
    return found - {("__version__",)}


def imported_parts(file: Path) -> set[str]:
    """Parts of the package that ``file`` imports."""
    return {name[0] for name in imported_names(file)}


def sources(folder: Path = PACKAGE) -> list[Path]:
    return [file for file in sorted(folder.rglob("*.py")) if "_native" not in file.parts]


def test_every_part_has_its_place() -> None:
    parts = {part_of(file) for file in sources()} - {"", "engine", "kernels", "patches"}
    assert parts <= RANK.keys()


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file: Path) -> None:
    part = part_of(file)
    for imported in imported_parts(file) - {part}:
        if part == "engine":
            assert imported in ENGINE_IMPORTS, f"engine imports {imported}"
        elif imported == "engine":
            assert part in ENGINE_IMPORTERS, f"{part} imports engine"
        elif part:
            assert RANK[imported] < RANK[part], f"{part} imports {imported}"


@pytest.mark.parametrize(
    "file",
    [file for part in WITHIN for file in sources(PACKAGE / part)],
    ids=lambda file: str(file.relative_to(PACKAGE)),
)
def test_imports_within_a_part_point_one_way(file: Path) -> None:
    part, *below = file.relative_to(PACKAGE).parts
    order = WITHIN[part]
    package = below[0] if len(below) > 1 else ""
    for name in imported_names(file):
        if name[0] != part or len(name) < 2:
            continue
        imported = name[1] if name[1] in order else ""
        if imported != package:
            assert order.index(imported) < order.index(package), f"{package} imports {'.'.join(name)}"
            assert not {imported, package} <= SIBLINGS[part], f"{package} imports {'.'.join(name)}"


def test_only_config_reads_the_environment() -> None:
    readers = []
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_environ = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            if is_environ and isinstance(node.value, ast.Name) and node.value.id == "os":
                readers.append(file.relative_to(PACKAGE).as_posix())
    assert set(readers) <= {"config.py"}


def tracked_files() -> list[Path]:
    """Source files of the project: what git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    kinds = {".py", ".cpp", ".h", ".toml", ".cmake"}
    return [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in kinds]


def test_no_source_file_is_longer_than_500_lines() -> None:
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for file in tracked_files()
        if file.exists()
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_no_function_is_longer_than_80_lines() -> None:
    functions = [
        (f"{file.relative_to(ROOT)}: {node.name}", node.end_lineno - node.lineno + 1)
        for file in tracked_files()
        if file.suffix == ".py" and file.exists()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert functions
    assert [name for name, length in functions if length > LONGEST_FUNCTION] == []


def test_every_name_in_the_catalogue_resolves() -> None:
    rules, faults = catalogue.load()
    assert faults == ()
    assert len(rules) > 15
    for rule in rules:
        assert callable(rule.load_replacement()), rule.id
        if rule.probe:
            assert callable(rule.load_probe()), rule.id


def test_every_rule_refers_to_rules_and_digests_that_can_be() -> None:
    rules, _ = catalogue.load()
    ids = {rule.id for rule in rules}
    for rule in rules:
        assert set(rule.child_rules) <= ids, rule.id
        assert len(set(rule.bodies)) == len(rule.bodies), rule.id
        for body in rule.bodies:
            assert len(body) == 16 and int(body, 16) >= 0, rule.id
    by_kind: dict[tuple[str, str, str], str] = {}
    for rule in rules:
        for body in rule.bodies:
            former = by_kind.setdefault((rule.kind, rule.attribute + rule.pattern, body), rule.id)
            assert former == rule.id, f"body {body} belongs to {former} and {rule.id}"


HEAVY = ("torch", "torch_npu", "transformers", "rich", "typer", "numpy")


def test_importing_us_imports_nothing_heavy() -> None:
    script = (
        "import json, sys, liteboost_adaptor\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    assert processes.python_json(script) == []


def test_importing_us_twice_or_anew_registers_no_second_hook() -> None:
    script = """
import importlib, json, sys
import liteboost_adaptor
again = importlib.import_module("liteboost_adaptor")
importlib.reload(liteboost_adaptor)
import transformers.modeling_utils as modeling
call = modeling.PreTrainedModel.__call__
depth = 0
while hasattr(call, "__wrapped__"):
    call, depth = call.__wrapped__, depth + 1
print(json.dumps([again is liteboost_adaptor, depth]))
"""
    assert processes.python_json(script) == [True, 1]


def test_status_is_json_before_anything_happened() -> None:
    script = """
import json, sys
import liteboost_adaptor
status = liteboost_adaptor.status()
json.loads(status.to_json())
states = sorted({row.state for row in status.rules})
print(json.dumps([states, "transformers" in sys.modules, bool(str(status))]))
"""
    assert processes.python_json(script) == [["idle"], False, True]


def test_dir_lists_the_public_names() -> None:
    assert {"apply", "patched", "status", "undo"} <= set(dir(liteboost_adaptor))
    assert json.dumps(liteboost_adaptor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'aply'"):
        liteboost_adaptor.aply  # noqa: B018

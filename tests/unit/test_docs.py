"""Generated documentation is current, and what documentation names exists."""

import functools
import json
import re
import runpy
from pathlib import Path

import pytest

from liteboost_adaptor import config
from liteboost_adaptor.ops import ops

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(
        ROOT / name / "README.md"
        for name in ("kernels", "examples/custom_op", "examples/ray", "tests/cann_sim")
    ),
]
#: Where a path in a document may begin: `ops/norm.py` is one of the package, `common/isa.h` one of kernels/.
STARTS = (ROOT, ROOT / "liteboost_adaptor", ROOT / "kernels")
#: Documents that name what is not of this checkout: files of users, and folders that commands make.
FOREIGN = re.compile(r"(^|/)(path|\.\.|build|dist|\w*FAMILY\w*|[A-Z]+|X\w*|test_X|script)(/|\.|$)|^~|://")
FILE = re.compile(r"[\w.*-]+(/[\w.*-]+)+\.(py|cpp|h|toml|md|tsv|txt|yml|json|cmake|sh)|\w+\.(py|cpp|h)")


def each(documents: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", documents, ids=lambda path: str(path.relative_to(ROOT)))


@functools.cache
def file_names() -> set[str]:
    """Of what is written here, without folders: a table may name its folder once."""
    parts = ("liteboost_adaptor", "kernels", "tests", "examples", "build_support", "docs")
    return {path.name for part in parts for path in (ROOT / part).rglob("*.*")}


def test_figures_of_the_readme_are_those_of_the_benchmark():
    """``build_support/readme_figures.py`` writes them."""
    figures = runpy.run_path(str(ROOT / "build_support" / "readme_figures.py"))
    assert figures["BEGIN"] + figures["section"]() + figures["END"] in (ROOT / "README.md").read_text()
    if figures["MEASURED"].exists():
        measured = json.loads(figures["MEASURED"].read_text())["variants"]
        drawn = figures["PICTURE"].read_text()
        assert all(f"{measured[name]['decode_tok_s']:.1f} " in drawn for name in figures["VARIANTS"])


def test_environment_table_is_current():
    """``build_support/environment_table.py`` makes it."""
    table = runpy.run_path(str(ROOT / "build_support" / "environment_table.py"))["markdown"]()
    assert (ROOT / "docs" / "environment.md").read_text().endswith(table)


@each(DOCUMENTS)
def test_links_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not missing


@each([path for path in DOCUMENTS if path.parent.name != "kernels"])  # which names more variables of CMake
def test_variables_it_names_exist(document):
    known = {variable.name for variable in config.VARIABLES}
    cmake = (ROOT / "kernels" / "CMakeLists.txt").read_text()
    known.update(re.findall(r"^(?:option|set)\((LITEBOOST_[A-Z_]+)", cmake, re.MULTILINE))
    assert set(re.findall(r"LITEBOOST_[A-Z_]+", document.read_text())) <= known


@each(DOCUMENTS)
def test_files_and_folders_it_names_exist(document):
    text = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    words = {word for span in re.findall(r"`([^`]+)`", text) for word in span.split()}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    files = file_names()
    named = {
        word
        for word in words
        if not FOREIGN.search(word)
        and (FILE.fullmatch(word) or ("/" in word and word.split("/")[0] in folders))
    }
    missing = [
        name
        for name in named
        if name not in files and not any(any(start.glob(name)) for start in (*STARTS, document.parent))
    ]
    assert not missing


def test_every_decision_is_listed_and_has_its_three_parts():
    index = (ROOT / "docs" / "decisions" / "index.md").read_text()
    for page in DECISIONS:
        title, *_ = text = page.read_text().splitlines()
        number = int(page.name[:4])
        assert title.startswith(f"# {number}. ")
        assert f"- [{title.removeprefix('# ')}]({page.name})" in index
        assert [line for line in text if line.startswith("## ")] == [
            "## Context",
            "## Decision",
            "## Consequences",
        ]
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_every_op_has_its_place_in_the_api_pages():
    page = (ROOT / "docs" / "api" / "ops.rst").read_text()
    listed = set(re.findall(r"autoapifunction:: liteboost_adaptor\.(ops\.\w+\.\w+)", page))
    references = {op.reference for op in ops().values()}
    assert {f"{f.__module__.removeprefix('liteboost_adaptor.')}.{f.__name__}" for f in references} <= listed

"""Generated documentation is current, and what documentation names exists."""

import re
from pathlib import Path

import pytest

from liteboost_adaptor import config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_environment_table_is_current():
    assert (ROOT / "docs" / "environment.md").read_text().endswith(config.markdown())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_variables_it_names_exist(document):
    known = {variable.name for variable in config.VARIABLES}
    assert set(re.findall(r"LITEBOOST_[A-Z_]+", document.read_text())) <= known | {"LITEBOOST_WERROR"}

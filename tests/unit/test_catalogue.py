"""Rule files: every fault names the file, the rule and what to do."""

import fnmatch
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from liteboost_adaptor import native
from liteboost_adaptor.engine import catalogue
from liteboost_adaptor.errors import CatalogueError

ROOT = Path(__file__).parents[2]
DECODER = ROOT / "kernels" / "cmake" / "rules.py"
RULE = {
    "id": '"norm.mine"',
    "title": '"mine"',
    "kind": '"module"',
    "bodies": '["0123456789abcdef"]',
    "replacement": '"liteboost_adaptor.replacements.norm:rms_norm"',
    "why": '"w"',
    "upstream": '"u"',
    "drop_when": '"d"',
}


def text(changes=(), without=(), header="schema = 1\n"):
    fields = {**RULE, **dict(changes)}
    lines = [f"{key} = {value}" for key, value in fields.items() if key not in without]
    return header + "[[rule]]\n" + "\n".join(lines) + "\n"


def test_a_good_rule():
    (rule,) = catalogue.parse(text(), "mine.toml")
    assert (rule.id, rule.family, rule.level, rule.attribute) == ("norm.mine", "norm", 1, "forward")
    assert rule.bodies == ("0123456789abcdef",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("schema = 1\n[[rule]\n", ["mine.toml", "TOML"]),
        (text(header=""), ["mine.toml", "schema"]),
        (text(header="schema = 9\n"), ["schema must be 1", "9"]),
        (text(header="schema = 1\nextra = 2\n"), ["extra"]),
        (text(without=["why"]), ["norm.mine", "lacks the field 'why'"]),
        (text({"colour": "1"}), ["norm.mine", "unknown field 'colour'", "Known"]),
        (text({"title": "3"}), ["norm.mine", "'title'", "found 3"]),
        (text({"kind": '"class"'}), ["norm.mine", "kind", "module, function"]),
        (text({"level": "5"}), ["level", "0, 1 or 2"]),
        (text({"level": "true"}), ["level", "True"]),
        (text({"id": '"norm"'}), ["family.variant"]),
        (text({"devices": '["cuda"]'}), ["cuda", "cpu, npu"]),
        (text({"bodies": "[]"}), ["neither bodies nor probe"]),
        (text({"requires": '["transformers >>"]'}), ["requires", "PEP 508"]),
        (text({"kind": '"expression"'}), ["pattern"]),
        (text({"pattern": '"call"'}), ["pattern"]),
        (text({"kind": '"registry"'}), ["registry and entry"]),
        (text({"kind": '"model"'}), ["applies"]),
        (text({"rounding": '"odd"'}), ["rounding"]),
        ("schema = 1\nrule = 3\n", ["[[rule]]"]),
    ],
)
def test_a_wrong_rule_says_what_is_wrong(content, words):
    with pytest.raises(CatalogueError) as fault:
        catalogue.parse(content, "mine.toml")
    assert "mine.toml" in str(fault.value)
    for word in words:
        assert word in str(fault.value)


def test_one_wrong_file_costs_one_file(tmp_path):
    (tmp_path / "a.toml").write_text("schema = 1\n[[rule]\n")
    (tmp_path / "b.toml").write_text(text())
    rules, faults = catalogue.load((str(tmp_path),))
    assert [str(tmp_path / "a.toml") in str(fault) for fault in faults] == [True]
    assert "norm.mine" in {rule.id for rule in rules}
    assert "norm.rms" in {rule.id for rule in rules}


def test_ids_are_unique_over_all_files(tmp_path):
    (tmp_path / "a.toml").write_text(text({"id": '"norm.rms"'}))
    _, faults = catalogue.load((str(tmp_path),))
    assert "already used by patches/norm.toml" in str(faults[0])


def test_a_name_that_does_not_resolve(tmp_path):
    (rule,) = catalogue.parse(text({"replacement": '"liteboost_adaptor.nowhere:f"'}), "mine.toml")
    with pytest.raises(CatalogueError, match="nowhere"):
        rule.load_replacement()


def test_the_shipped_catalogue_is_sound():
    rules, faults = catalogue.load()
    assert not faults
    for rule in rules:
        assert callable(rule.load_replacement()), rule.id
        assert not rule.probe or callable(rule.load_probe())
        assert not rule.applies or callable(rule.load_applies())
        assert rule.source.startswith("patches/")
        assert not catalogue.version_conflict(rule)


@pytest.fixture
def built(tmp_path):
    """A folder like that of the kernels, with the shipped files as JSON."""
    folder = tmp_path / "built"
    folder.mkdir()
    files = sorted((ROOT / "patches").glob("*.toml"))
    subprocess.run([sys.executable, DECODER, folder / catalogue.DECODED, *files], check=True)
    return folder


def test_what_the_build_has_decoded_is_not_decoded_again(built, monkeypatch):
    expected = catalogue.load()
    monkeypatch.setattr(catalogue.tomllib, "loads", lambda text: pytest.fail("decoded"))
    assert catalogue.load((), built) == expected


def test_a_file_that_the_build_has_not_seen_is_decoded(built, tmp_path):
    (tmp_path / "mine.toml").write_text(text())
    rules, faults = catalogue.load((str(tmp_path),), built)
    assert not faults
    assert rules[-1] == catalogue.parse(text(), str(tmp_path / "mine.toml"))[0]


@pytest.mark.parametrize("content", [None, "", '{"a": ', "\xff", "[]", "null"])
def test_without_what_the_build_decoded_the_files_are(built, content):
    file = built / catalogue.DECODED
    file.unlink() if content is None else file.write_bytes(content.encode("latin-1"))
    assert catalogue.load((), built) == catalogue.load()


def test_the_kernels_come_with_the_rules_decoded(monkeypatch):
    """Where this fails in a checkout whose rules were edited, install it again."""
    expected, status = catalogue.load(), native.load()
    if not status.loaded:
        pytest.skip("needs the compiled kernels")
    monkeypatch.setattr(catalogue.tomllib, "loads", lambda text: pytest.fail("decoded"))
    assert catalogue.load((), status.path.parent) == expected


def test_a_version_that_is_not_met():
    (rule,) = catalogue.parse(text({"requires": '["torch>=99"]'}), "mine.toml")
    assert "requires torch>=99, found" in catalogue.version_conflict(rule)
    (rule,) = catalogue.parse(text({"requires": '["no-such-package"]'}), "mine.toml")
    assert "not installed" in catalogue.version_conflict(rule)


@given(st.text("ab*:?[]!-", max_size=8), st.text("ab:[]!-", max_size=8))
@example("*:*Norm", "models.llama:LlamaRMSNorm")
@example("a[b]", "ab")
def test_a_target_is_what_fnmatch_says(glob: str, target: str) -> None:
    assert catalogue._is_one_of(target, (glob,)) == fnmatch.fnmatchcase(target, glob)

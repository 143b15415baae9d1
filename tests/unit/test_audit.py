"""The drift check, over small packages written by the tests in place of transformers."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from liteboost_adaptor import cli, config
from liteboost_adaptor.audit import drift, instances, packages, record, rule_files
from liteboost_adaptor.audit.record import Record
from liteboost_adaptor.audit.scan import LISTED, PROVABLE, UNKNOWN, Scan, Target, scan
from liteboost_adaptor.engine import catalogue
from liteboost_adaptor.errors import AuditError

LLAMA = """
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""
#: The same function in other words.
PROVED = """
    wide = hidden_states.float()
    wide = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return wide.to(hidden_states.dtype) * self.weight
"""
#: Not the same: epsilon is added to the root.
UNPROVED = (
    PROVED.replace("+ self.variance_epsilon)", ") + self.variance_epsilon")
    .replace("torch.sqrt(", "(torch.sqrt(")
    .replace("self.variance_epsilon\n", "self.variance_epsilon)\n")
)
#: Different in text and digest from the one above, and not the same either.
UNPROVED_TOO = UNPROVED.replace("wide.square()", "wide.abs()")

NORM = """
class {name}RMSNorm(nn.Module):
    def __init__(self, {arguments}, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
{body}
"""
numbers = itertools.count()


def norm(name: str, body: str, arguments: str = "hidden_size") -> str:
    return NORM.format(name=name, arguments=arguments, body=textwrap.indent(textwrap.dedent(body), " " * 8))


Make = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path) -> Make:
    """Writes a package with one modeling module for each keyword; returns the folder it lies in."""

    def make(name: str = "transformers", version: str = "1.0", **modules: str) -> Path:
        folder = tmp_path / f"place-{next(numbers)}"
        (folder / name / "models").mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (folder / name / "models" / "__init__.py").touch()
        for module, text in modules.items():
            file = folder / name / "models" / f"{module}.py"
            file.write_text("import torch\nfrom torch import nn\n" + text)
        return folder

    return make


@pytest.fixture
def look(package: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scan]:
    """Writes a package and scans it in this process."""

    def run(version: str = "1.0", **modules: str) -> Scan:
        name = f"audited_{next(numbers)}"
        monkeypatch.syspath_prepend(package(name, version, **modules))
        importlib.invalidate_caches()
        found = scan(name, catalogue.load()[0])
        # One name for all, as versions of transformers have.
        return Scan.from_json(found.to_json().replace(name, "some"))

    yield run
    for name in [name for name in sys.modules if name.startswith("audited_")]:
        del sys.modules[name]


def compared(found: Scan, known: Record) -> drift.Drift:
    return drift.compare(found, catalogue.load()[0], known)


def test_bodies_are_listed_proved_or_unknown(look: Callable[..., Scan]) -> None:
    assert len({LLAMA, PROVED, UNPROVED, UNPROVED_TOO}) == 4
    found = look(
        modeling_a=norm("Listed", LLAMA) + norm("Proved", PROVED),
        modeling_b=norm("Unproved", UNPROVED) + norm("Unbuilt", UNPROVED, "strange"),
        modeling_c=norm("Config", LLAMA, "config") + "class Norm(nn.Module): pass\ndef helper(): pass\n",
        modeling_tf_a="raise ImportError('another framework')",
        other="raise ImportError('not a modeling module')",
    )
    by_name = {target.name.rpartition(":")[2]: target for target in found.targets}
    assert {name: (t.state, t.rule) for name, t in by_name.items()} == {
        "ListedRMSNorm": (LISTED, "norm.rms"),
        "ProvedRMSNorm": (PROVABLE, "norm.rms"),
        "UnprovedRMSNorm": (UNKNOWN, "norm.*"),
        "UnbuiltRMSNorm": (UNKNOWN, "norm.*"),
        "ConfigRMSNorm": (LISTED, "norm.rms"),
    }
    assert "differs" in by_name["UnprovedRMSNorm"].reason
    assert "constructor asks for strange" in by_name["UnbuiltRMSNorm"].reason
    assert by_name["UnprovedRMSNorm"].digest == by_name["UnbuiltRMSNorm"].digest
    assert [target.name for target in found.targets] == sorted(target.name for target in found.targets)
    assert found.version == "1.0" and found.not_imported == {}
    assert Scan.from_json(found.to_json()) == found


def test_a_module_that_cannot_be_imported_is_named(look: Callable[..., Scan]) -> None:
    found = look(modeling_a=norm("A", LLAMA), modeling_b="import no_such_package_anywhere")
    assert [target.name for target in found.targets] == ["some.models.modeling_a:ARMSNorm"]
    assert found.not_imported == {
        "some.models.modeling_b": "ModuleNotFoundError: No module named 'no_such_package_anywhere'"
    }


def test_new_changed_and_gone(look: Callable[..., Scan]) -> None:
    before = look(
        modeling_a=norm("Kept", LLAMA) + norm("Seen", UNPROVED) + norm("Lost", LLAMA) + norm("Broken", LLAMA)
    )
    known = Record()
    known.note(before)
    assert not compared(before, known).found

    after = look(
        "1.1",
        modeling_a=norm("Kept", PROVED) + norm("Seen", UNPROVED) + norm("Broken", UNPROVED),
        modeling_b=norm("Fresh", UNPROVED_TOO) + norm("Alike", UNPROVED) + norm("Good", LLAMA),
    )
    found = compared(after, known)
    seen = [
        (d.kind, d.rule, d.proved, [name.rpartition(":")[2] for name in d.targets]) for d in found.differences
    ]
    assert sorted(seen) == [
        ("changed", "norm.*", False, ["BrokenRMSNorm"]),  # though another target is known to have that body
        ("changed", "norm.rms", True, ["KeptRMSNorm"]),
        ("gone", "", False, ["LostRMSNorm"]),
        ("new", "norm.*", False, ["FreshRMSNorm"]),
    ]
    assert found.states == {LISTED: 1, PROVABLE: 1, "known": 2, "unknown": 2}
    assert found.found and found.baseline == "1.0"
    (proposal,) = found.proposals
    (rule,) = (rule for rule in catalogue.load()[0] if rule.id == "norm.rms")
    assert (proposal.rule, proposal.file, proposal.listed) == ("norm.rms", rule.source, rule.bodies)
    assert f'"{proposal.bodies[0]}"]' in proposal.toml and "KeptRMSNorm" in proposal.toml
    assert catalogue_bodies(f"{HEAD}\n{proposal.toml}\n") == rule.bodies + proposal.bodies

    known.note(after)
    assert known.baseline == "1.1" and set(known.others) == set(), "every body of 1.0 is still there"
    assert [d.kind for d in compared(after, known).differences] == ["changed"], "proved bodies stay proposed"


def test_what_an_older_version_lacks_is_no_drift(look: Callable[..., Scan]) -> None:
    known = Record()
    known.note(look("2.0", modeling_a=norm("A", LLAMA) + norm("Later", UNPROVED)))
    old = look("1.0", modeling_a=norm("A", UNPROVED_TOO))
    (difference,) = compared(old, known).differences
    assert (difference.kind, difference.targets) == ("changed", ("some.models.modeling_a:ARMSNorm",))
    known.note(old)
    assert known.baseline == "2.0" and list(known.others) == ["1.0"]
    assert not compared(old, known).found
    assert compared(look("3.0", modeling_a=norm("A", LLAMA)), known).differences[0].kind == "gone"


def test_a_module_that_cannot_be_imported_has_lost_nothing(look: Callable[..., Scan]) -> None:
    known = Record()
    known.note(look(modeling_a=norm("A", LLAMA)))
    assert not compared(look(modeling_a="import no_such_package_anywhere"), known).found


def test_bodies_of_a_former_baseline_are_kept() -> None:
    def target(digest: str) -> Target:
        return Target("some:A", digest, UNKNOWN, "norm.*")

    known = Record()
    for version, digest in (("1.0", "aa"), ("2.0", "bb"), ("3.0", "aa")):
        known.note(Scan(version, (target(digest),), {}))
    assert known.baseline == "3.0" and known.targets == {"aa": ["some:A"]}
    assert known.others == {"1.0": {"aa": ["some:A"]}, "2.0": {"bb": ["some:A"]}}
    assert known.knows(target("bb")) and not known.knows(target("cc")) and not known.knows(target(""))


def test_the_record_survives_a_file(tmp_path: Path) -> None:
    known = Record("1.0", {"aa": ["x:A"]}, {"0.9": {"bb": ["x:B"]}, "0.10": {"cc": ["x:C"]}})
    file = tmp_path / "record.json"
    record.save(known, file)
    assert record.load(file) == known
    assert list(json.loads(file.read_text())["others"]) == ["0.9", "0.10"]
    file.write_text("{}")
    with pytest.raises(AuditError, match="cannot be read"):
        record.load(file)
    with pytest.raises(AuditError, match="cannot be written"):
        record.save(known, tmp_path / "nowhere" / "record.json")


def test_instances_are_built_without_memory() -> None:
    from torch import nn

    assert instances.build(nn.LayerNorm).weight.is_meta
    with pytest.raises(instances.NotBuilt, match="asks for in_features"):
        instances.build(nn.Linear)


HEAD = """
schema = 1

[[rule]]
id = "norm.some"  # with a remark
title = "t"
kind = "module"
targets = ["*:*RMSNorm"]
replacement = "a:b"
why = "w"
upstream = "none"
drop_when = "never"
"""
FILE = (
    HEAD
    + """
bodies = [
    "aaaaaaaaaaaaaaaa", # why
    "bbbbbbbbbbbbbbbb",
]

[[rule]]
id = "norm.some_other"
title = "t"
kind = "module"
probe = "a:b"
replacement = "a:b"
why = "w"
upstream = "none"
drop_when = "never"
"""
)


def catalogue_bodies(text: str, rule: str = "norm.some") -> tuple[str, ...]:
    return {entry.id: entry.bodies for entry in catalogue.parse(text, "test")}[rule]


def test_bodies_are_added_where_they_belong() -> None:
    one = HEAD + 'bodies = ["aaaaaaaaaaaaaaaa"]\n'
    assert rule_files.with_bodies(one, "norm.some", ("c" * 16,)) == one.replace('a"]', f'a", "{"c" * 16}"]')
    assert rule_files.with_bodies(one, "norm.some", ("a" * 16,)) == one, "it is there already"
    text = rule_files.with_bodies(FILE, "norm.some_other", ("c" * 16, "d" * 16))
    assert catalogue_bodies(text, "norm.some_other") == ("c" * 16, "d" * 16)
    assert catalogue_bodies(text) == catalogue_bodies(FILE)
    text = rule_files.with_bodies(FILE, "norm.some", ("c" * 16,))
    assert catalogue_bodies(text) == ("a" * 16, "b" * 16, "c" * 16)
    assert set(FILE.splitlines()) - set(text.splitlines()) == {'    "bbbbbbbbbbbbbbbb",', "]"}
    with pytest.raises(AuditError, match="no rule is written as"):
        rule_files.with_bodies(FILE, "norm.none", ("c" * 16,))


def test_a_path_that_is_no_package_is_an_error(package: Make, tmp_path: Path) -> None:
    folder = package()
    for path in (folder, folder / "transformers"):
        with packages.unpacked(path) as place:
            assert place.folder == folder
    for path in (tmp_path, folder / "transformers" / "models", tmp_path / "none.whl"):
        with pytest.raises(AuditError, match="neither a wheel nor a folder"), packages.unpacked(path):
            pass


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip is asked to install: an empty package, but there is no version 0."""
    asked: list[str] = []

    def pip(command: list[str], **_: object) -> CompletedProcess[str]:
        *how, target, what = command
        assert how[1:4] == ["-m", "pip", "install"] and how[-3:] == ["--only-binary", ":all:", "--target"]
        asked.append(what)
        if what.endswith("==0"):
            return CompletedProcess(command, 1, "", "\n".join(f"line {at}" for at in range(9)))
        (Path(target) / "transformers").mkdir(parents=True)
        (Path(target) / "transformers" / "__init__.py").write_text(f"# {what}")
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.subprocess, "run", pip)
    return asked


def test_a_release_is_fetched_once_where_there_is_a_cache(installed: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        with packages.fetched("5.1", tmp_path / "cache") as place:
            assert place.name == "5.1" and place.folder.parent == tmp_path / "cache"
            assert (place.folder / "transformers" / "__init__.py").read_text() == "# transformers==5.1"
    assert installed == ["transformers==5.1"] and place.folder.is_dir()
    with packages.fetched("5.1", None) as place:
        assert (place.folder / "transformers").is_dir()
    assert len(installed) == 2 and not place.folder.parent.exists()
    with pytest.raises(AuditError) as raised, packages.fetched("0", tmp_path / "cache"):
        pass
    words = str(raised.value)
    assert "pip cannot install transformers==0" in words and "line 3\n" in words and "line 2\n" not in words
    assert [each.name.split("-")[1] for each in (tmp_path / "cache").iterdir()] == ["5.1"]


def test_a_wheel_is_installed_with_what_it_needs(installed: list[str], tmp_path: Path) -> None:
    wheel = tmp_path / "transformers-5.1-py3-none-any.whl"
    wheel.write_bytes(b"")
    with packages.unpacked(wheel) as place:
        assert installed == [place.name] == [str(wheel)] and (place.folder / "transformers").is_dir()
    assert not place.folder.exists() and wheel.exists()


def test_a_package_that_cannot_be_imported_is_an_error(package: Make) -> None:
    folder = package()
    (folder / "transformers" / "__init__.py").write_text("raise ImportError('needs something else')")
    with packages.unpacked(folder) as place, pytest.raises(AuditError, match="needs something else"):
        packages.scan(place)


@pytest.fixture
def own_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A rule file of the user's, and a record of the test's."""
    file = tmp_path / "rules.toml"
    file.write_text(
        (HEAD + 'bodies = ["aaaaaaaaaaaaaaaa"]\n')
        .replace('"*:*RMSNorm"', '"*:*OwnNorm"')
        .replace('"a:b"', '"liteboost_adaptor.replacements.norm:rms_norm"')
        + 'probe = "liteboost_adaptor.replacements.norm:norm_cases"\n'
        + 'operations = ["Add", "USub", "Div", "sqrt", "square", "mean", "Mult", "float", "to", "dtype"]\n'
        + 'reads = ["weight", "variance_epsilon"]\n[rule.parameters]\neps = "variance_epsilon"\n'
    )
    monkeypatch.setenv("LITEBOOST_PATCH_PATH", str(file))
    monkeypatch.setattr(record, "FILE", tmp_path / "record.json")
    record.save(Record())
    config.settings.cache_clear()
    yield file
    config.settings.cache_clear()


def test_the_command_proposes_writes_and_is_content(
    package: Make, own_rules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = norm("A", UNPROVED) + norm("B", PROVED).replace("BRMSNorm", "BOwnNorm")
    folder = str(package(modeling_a=text))
    before = own_rules.read_text()

    assert cli.main(["audit", "--path", folder, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    (version,) = result["versions"]
    assert result["drift"] and version["version"] == "1.0"
    seen = [(d["kind"], d["rule"], d["targets"][0].partition(":")[2]) for d in version["differences"]]
    assert sorted(seen) == [("new", "norm.*", "ARMSNorm"), ("new", "norm.some", "BOwnNorm")], str(
        version["differences"]
    )
    assert own_rules.read_text() == before

    assert cli.main(["audit", "--path", folder]) == 1
    shown = capsys.readouterr().out
    assert "proved by a probe" in shown and "bodies = [" in shown and "modeling_a:ARMSNorm" in shown

    assert cli.main(["audit", "--path", folder, "--write"]) == 1
    capsys.readouterr()
    assert cli.main(["audit", "--path", folder, "--json"]) == 0
    (version,) = json.loads(capsys.readouterr().out)["versions"]
    assert version["states"] == {LISTED: 1, PROVABLE: 0, "known": 1, "unknown": 0}
    assert version["differences"] == [] and version["proposals"] == []


def test_the_command_explains_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--path", str(tmp_path)]) == 1
    assert "error: audit was given" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []

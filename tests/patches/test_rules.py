"""Rule files of a user's own: those that work, those that are broken, and those that throw."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support import calls, numbers, planted, processes, state, tiny_models
from torch import nn

import liteboost_adaptor
from liteboost_adaptor import rule_ids
from liteboost_adaptor.config import Settings
from liteboost_adaptor.engine import catalogue
from liteboost_adaptor.engine.fingerprint import fingerprint
from liteboost_adaptor.errors import CatalogueError, ConfigError, StrictError
from liteboost_adaptor.huggingface.runtime import runtime

ROOT = Path(__file__).resolve().parents[2]
MODELING = '''
import torch
from torch import nn


class Damping(nn.Module):
    """A row over its largest magnitude: no rule of ours knows it."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.floor = 1e-3

    def forward(self, x):
        return self.weight * (x / (x.abs().amax(-1, keepdim=True) + self.floor))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.damping = Damping(32)

    def forward(self, x):
        return self.damping(x)
'''

REPLACEMENTS = """
def damping(original, counter, *, floor):
    def forward(self, x):
        if x.shape[-1] != 32:
            counter.count_fallback("another size")
            return original(self, x)
        counter.count_served()
        return self.weight * x / (x.abs().amax(-1, keepdim=True) + getattr(self, floor))

    return forward


def throwing(original, counter, **parameters):
    raise OSError("the factory is out of order")
"""

RULE = """
[[rule]]
id = "{id}"
title = "Damping"
kind = "module"
targets = ["user_modeling:Damping"]
bodies = ["{digest}"]
reads = ["weight", "floor"]
replacement = "{replacement}"
why = "to show that it can be done"
upstream = "none"
drop_when = "never"
[rule.parameters]
floor = "floor"
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's modeling code and replacements, importable."""
    import sys

    (tmp_path / "user_modeling.py").write_text(MODELING, encoding="utf-8")
    (tmp_path / "user_replacements.py").write_text(REPLACEMENTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    liteboost_adaptor.undo()
    for name in ("user_modeling", "user_replacements"):
        sys.modules.pop(name, None)


def rule_file(
    folder: Path, rule: str = "user.damping", replacement: str = "user_replacements:damping"
) -> Path:
    import user_modeling

    digest = fingerprint(
        user_modeling.Damping.forward, user_modeling.Damping, user_modeling.Damping(4)
    ).digest
    file = folder / "rules.toml"
    text = "schema = 1\n" + RULE.format(id=rule, digest=digest, replacement=replacement)
    file.write_text(text, encoding="utf-8")
    return file


def settings(*paths: Path, **changes: object) -> Settings:
    return Settings(patch_path=tuple(str(path) for path in paths), **changes)


def test_a_users_rule_serves_a_users_class(user: Path) -> None:
    file = rule_file(user)
    from user_modeling import Model

    model, x = Model(), torch.randn(3, 32)
    with torch.no_grad():
        expected = model(x)
        runtime.bind(model, settings(file))
        with calls.served() as served:
            torch.testing.assert_close(model(x), expected)
            model.damping(torch.randn(1))
    assert served.rules == {"user.damping": 1}
    assert served.fallbacks == {("user.damping", "another size"): 1}
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(model)
    with calls.served() as served, torch.no_grad():
        model(x)
    assert served.rules == {}, "a rule of one binding acts in another"


def test_a_folder_of_rule_files_is_read(user: Path) -> None:
    rule_file(user)
    rules, faults = catalogue.load((str(user),))
    assert "user.damping" in {rule.id for rule in rules} and faults == ()


def test_a_factory_that_throws_is_one_failed_row_and_the_original_runs(user: Path) -> None:
    file = rule_file(user, replacement="user_replacements:throwing")
    from user_modeling import Model

    model, x = Model(), torch.randn(3, 32)
    with torch.no_grad():
        expected = model(x)
        runtime.bind(model, settings(file))
        assert torch.equal(model(x), expected)
    (row,) = state.rows()["failed"]
    assert row.id == "user.damping"
    assert "the factory is out of order" in row.reason and "OSError" in row.reason
    with pytest.raises(StrictError, match="the factory is out of order"):
        runtime.bind(model, settings(file, strict=True))


def test_a_rule_that_throws_costs_only_itself(user: Path) -> None:
    """An expression rule for the same module that throws leaves the module's other rules in force."""
    file = user / "rules.toml"
    text = RULE.format(id="user.gate", digest="0" * 16, replacement="user_replacements:throwing")
    text = text.replace('kind = "module"', 'kind = "expression"\npattern = "call"')
    text = text.replace(
        'bodies = ["0000000000000000"]', 'children = ["transformers.activations:SiLUActivation"]'
    )
    file.write_text("schema = 1\n" + text, encoding="utf-8")
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        runtime.bind(model, settings(file))
        with calls.served() as served:
            found = model(**inputs).logits
    assert numbers.relative(found, expected) <= 2e-5
    assert [row.id for row in state.rows()["failed"]] == ["user.gate"]
    assert served.rules["mlp.silu"] == 2 and served.rules["linear.call"] == 15


@pytest.mark.parametrize(
    "replacement", ["broken_replacements:damping", "no_such_module:damping", "user_replacements:no_such"]
)
def test_a_replacement_that_cannot_be_imported_is_one_failed_row(user: Path, replacement: str) -> None:
    (user / "broken_replacements.py").write_text("raise ImportError('half installed')", encoding="utf-8")
    file = rule_file(user, replacement=replacement)
    from user_modeling import Model

    model, x = Model(), torch.randn(3, 32)
    with torch.no_grad():
        expected = model(x)
        runtime.bind(model, settings(file))
        assert torch.equal(model(x), expected)
    (row,) = state.rows()["failed"]
    assert row.id == "user.damping" and replacement in row.reason and "module:function" in row.reason


BROKEN = {
    "syntax": ("schema = 1\n[[rule]\n", "not valid TOML"),
    "no schema": ("[[rule]]\n", "schema must be 1"),
    "unknown top level": ("schema = 1\nrules = []\n", "unknown top-level"),
    "one bracket": ('schema = 1\n[rule]\nid = "a.b"\n', "array of tables"),
    "list of numbers": ("schema = 1\nrule = [1, 2]\n", "table"),
    "missing field": ('schema = 1\n[[rule]]\nid = "a.b"\n', "lacks the field"),
    "unknown field": ("colour = 'red'", "unknown field 'colour'"),
    "wrong type": ("level = 'one'", "field 'level' must be"),
    "boolean for a number": ("level = true", "field 'level' must be"),
    "wrong type in a list": ("bodies = [1, 2]", "bodies"),
    "requirements that are numbers": ("requires = [1]", "requires"),
    "requirement that is none": ("requires = ['not a requirement !']", "PEP 508"),
    "level out of range": ("level = 7", "level must be 0, 1 or 2"),
    "unknown device": ("devices = ['gpu']", "device 'gpu' is unknown"),
    "pattern of a module": ("pattern = 'call'", "needs a pattern"),
    "name that is no name": ("probe = 'no colon'", "module:function"),
    "child rule that is not there": ("child_rules = ['norm.nowhere']", "norm.nowhere"),
}


def broken_text(change: str) -> str:
    if change.startswith(("schema", "[[")):
        return change
    # New fields stand before [rule.parameters], and in place of the field of that name.
    text = RULE.format(id="user.broken", digest="0" * 16, replacement="user_replacements:damping")
    field = change.split("=")[0].strip()
    lines = [line for line in text.splitlines() if line.split("=")[0].strip() != field]
    lines.insert(lines.index("[rule.parameters]"), change)
    return "schema = 1\n" + "\n".join(lines)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_one_fault_that_names_file_and_remedy(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    text, says = BROKEN[fault]
    file.write_text(broken_text(text), encoding="utf-8")
    rules, faults = catalogue.load((str(file),))
    assert len(faults) == 1, "the fault went unnoticed"
    assert isinstance(faults[0], CatalogueError)
    assert str(file) in str(faults[0]) and says in str(faults[0])
    assert "user.broken" not in {rule.id for rule in rules}
    assert "norm.rms" in {rule.id for rule in rules}


#: A norm in words that no rule knows and the probe does not try: Llama's rounding, by a product of vectors.
REWORDED = (
    planted.NORM_VARIANCE,
    "variance = (hidden_states.unsqueeze(-2) @ hidden_states.unsqueeze(-1)).squeeze(-1)\n"
    "        variance = variance / hidden_states.shape[-1]",
)


def test_the_catalogue_is_updated_as_the_documentation_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "adding_a_rule.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```toml\n(.*?)```", text, re.S) if "[[update]]" in block)
    model = planted.llama(tmp_path, REWORDED)
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
    runtime.bind(model, settings())
    before = state.rows("norm")
    assert "applied" not in before and {row.id for row in before["refused"]} == {"norm.*"}
    norm = model.model.norm
    digest = fingerprint(type(norm).forward, type(norm), norm).digest
    file = tmp_path / "update.toml"
    file.write_text(example.replace("0123456789abcdef", digest), encoding="utf-8")
    runtime.bind(model, settings(file))
    assert {row.id for row in state.rows("norm")["applied"]} == {"norm.rms", "norm.residual"}
    assert "refused" not in state.rows("norm")
    with torch.no_grad():
        assert numbers.relative(model(**inputs).logits, expected) <= 2e-5


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("rule = 'norm.nowhere'\nbodies = ['a']", "update of rule 'norm.nowhere': neither the catalogue nor"),
        ("bodies = ['a']", "update of rule '(no id)'"),
        ("rule = 'norm.rms'", "must have rule, and bodies or wrappers"),
        ("rule = 'norm.rms'\nbodies = 'a'", "field 'bodies' must list strings"),
        ("rule = 'norm.rms'\nbodies = ['a']\nlevel = 2", "no other field"),
    ],
)
def test_a_wrong_update_is_a_fault_of_its_file(entry: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "update.toml"
    file.write_text(f"schema = 1\n[[update]]\nrule = 'norm.rms_eps'\nbodies = ['b']\n[[update]]\n{entry}\n")
    rules, (fault,) = catalogue.load((str(file),))
    assert str(file) in str(fault) and says in str(fault)
    assert rules == catalogue.load()[0]


@pytest.mark.parametrize("where", ["another file", "the same file", "the catalogue"])
def test_an_id_that_is_taken_is_a_fault(where: str, tmp_path: Path) -> None:
    rule_id = "norm.rms" if where == "the catalogue" else "user.twice"
    text = RULE.format(id=rule_id, digest="0" * 16, replacement="a:b")
    (tmp_path / "one.toml").write_text(
        "schema = 1\n" + text * (2 if where == "the same file" else 1), encoding="utf-8"
    )
    if where == "another file":
        (tmp_path / "two.toml").write_text("schema = 1\n" + text, encoding="utf-8")
    _, faults = catalogue.load((str(tmp_path),))
    assert len(faults) == 1
    assert rule_id in str(faults[0]) and "already used" in str(faults[0])


def test_files_that_cannot_be_read_are_faults(tmp_path: Path) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    (folder / "inner.toml").mkdir()
    binary = tmp_path / "binary.toml"
    binary.write_bytes(bytes(range(256)))
    gone = tmp_path / "gone.toml"
    rules, faults = catalogue.load((str(folder), str(binary), str(gone)))
    assert len(faults) == 3 and all(isinstance(fault, CatalogueError) for fault in faults)
    assert "norm.rms" in {rule.id for rule in rules}


SCRIPT = """
import json, sys, warnings
warnings.simplefilter("always")
warned = []
warnings.showwarning = lambda message, *_: warned.append(str(message))
import liteboost_adaptor
import torch
sys.path.insert(0, {tests!r})
from support import tiny_models
model = tiny_models.build("llama")
error = None
try:
    with torch.no_grad():
        model(**tiny_models.example_inputs(model))
except Exception as fault:
    error = [type(fault).__name__, str(fault)]
rows = [[row.id, row.state, row.reason, row.calls] for row in liteboost_adaptor.status().rules if row.targets]
warned = [each for each in warned if "LITEBOOST" in each]
notes = liteboost_adaptor.status().environment
print(json.dumps({{"error": error, "rows": rows, "warned": warned, "notes": notes}}))
"""


def run(**variables: str) -> dict[str, object]:
    return processes.python_json(SCRIPT.format(tests=str(processes.TESTS)), is_forked=True, **variables)


@pytest.mark.parametrize("is_strict", [False, True], ids=["not strict", "strict"])
def test_a_broken_file_on_the_path_leaves_the_program_running_unless_strict(
    is_strict: bool, tmp_path: Path
) -> None:
    (tmp_path / "broken.toml").write_text("schema = 1\n[[rule]]\nid = 'a.b'\n", encoding="utf-8")
    found = run(LITEBOOST_PATCH_PATH=str(tmp_path), LITEBOOST_STRICT=str(int(is_strict)))
    if is_strict:
        kind, message = found["error"]
        assert kind == "StrictError" and "broken.toml" in message and "lacks the field" in message
        return
    assert found["error"] is None
    states = {rule: state for rule, state, _, _ in found["rows"]}
    assert states["norm.rms"] == "applied"
    failed = [row for row in found["rows"] if row[1] == "failed"]
    assert len(failed) == 1 and "broken.toml" in failed[0][2]


def test_variables_of_the_environment_act(tmp_path: Path) -> None:
    found = run(
        LITEBOOST_DISABLE="rope.*, mlp.silu, mlp.swish",
        LITEBOOST_LEVEL="1",
        LITEBOOST_STRICT="1",
        LITEBOOST_TPP="2",
    )
    assert found["error"] is None
    unknown, unmatched = found["warned"]
    assert (
        unknown.startswith("LITEBOOST_TPP is set, but ") and "'mlp.swish', which is the id of no" in unmatched
    )
    assert sorted(found["notes"]) == sorted([unknown, unmatched])
    rules = {rule for rule, *_ in found["rows"]}
    assert rules == {"attention.sdpa", "linear.call", "norm.rms", "norm.residual"}
    assert run(LITEBOOST_LEVEL="0") == {"error": None, "rows": [], "warned": [], "notes": []}


def test_a_pattern_that_matches_no_rule_is_warned_of_once_and_noted() -> None:
    rule_ids._warn_of.cache_clear()
    known = [
        "norm.*",
        "npu.cuda",
        "step.graph",
        "cache.int8",
        "weights.huge_pages",
        "memory.caching_allocator",
        "quantization.checkpoints",
    ]
    with pytest.warns(UserWarning, match="disable=, has 'rope.haff'.*Did you mean 'rope.half'") as seen:
        for _ in range(2):
            liteboost_adaptor.apply(disable=[*known, "rope.haff"])
            with liteboost_adaptor.patched(disable="rope.haff"):
                pass
    (warning,) = (each for each in seen if "rope.haff" in str(each.message))
    assert warning.filename == __file__ and not any("'norm.*'" in str(each.message) for each in seen)
    assert str(warning.message) in liteboost_adaptor.status().environment


def test_disabled_rules_say_so_and_globs_cover_families() -> None:
    model = tiny_models.build("llama")
    with calls.served() as served, torch.no_grad():
        status = liteboost_adaptor.apply(model, disable="norm.*,linear.call")
        model(**tiny_models.example_inputs(model))
    assert served.kinds.keys() == {"rope", "activation", "attention", "cache"}
    assert {row.state for row in status.rules if row.id.startswith("norm.")} <= {"disabled", "idle"}
    assert json.loads(status.to_json())["rules"]


def test_strict_raises_for_a_refusal_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    clamp = (planted.NORM_ROW, f"{planted.NORM_ROW}\n        hidden_states = hidden_states.clamp(-30, 30)")
    model = planted.llama(tmp_path, clamp)
    before = state.Snapshot(model)
    with pytest.raises(StrictError) as caught:
        liteboost_adaptor.apply(model, strict=True)
    message = str(caught.value)
    assert "LlamaRMSNorm" in message and "clamp" in message and "LITEBOOST_STRICT" in message
    liteboost_adaptor.undo()
    assert before.differences() == []
    liteboost_adaptor.apply(model, strict=True, disable="norm.*")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_strict_accepts_what_is_served_whole(family: str) -> None:
    liteboost_adaptor.apply(tiny_models.build(family), strict=True)


def test_wrong_arguments_of_apply_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"^level must be 0, 1 or 2; found 5\."):
        liteboost_adaptor.apply(level=5)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        liteboost_adaptor.apply("a model")


@pytest.mark.parametrize("wrong", [3, "a model", nn.Linear])
def test_what_is_no_model_is_a_type_error(wrong: object) -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    before = state.rows()
    said = rf"takes a torch\.nn\.Module, got {type(wrong).__name__}"
    with pytest.raises(TypeError, match=f"^undo {said}"):
        liteboost_adaptor.undo(wrong)
    with pytest.raises(TypeError, match=f"^patched {said}"), liteboost_adaptor.patched(model, wrong):
        pass
    assert state.rows() == before

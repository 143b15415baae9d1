"""Settings: what is read, what is refused and how it is said, what arguments override."""

from __future__ import annotations

import dataclasses
import os
import runpy
from pathlib import Path

import pytest
from support import processes

from liteboost_adaptor import config
from liteboost_adaptor.errors import ConfigError, LiteBoostError

ROOT = Path(__file__).resolve().parents[2]
NAMES = [variable.name for variable in config.VARIABLES]


def test_defaults() -> None:
    assert config.read({}) == config.Settings()
    assert config.Settings().level == 2
    assert config.read({"LITEBOOST_LEVEL": "", "LITEBOOST_STRICT": "  "}) == config.Settings()


def test_every_setting_has_a_variable_and_the_other_way_round() -> None:
    fields = {field.name for field in dataclasses.fields(config.Settings)}
    assert {variable.field for variable in config.VARIABLES} == fields
    assert all(name.startswith(config.PREFIX) for name in NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.Settings().level = 0


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("LITEBOOST_LEVEL", "0", "level", 0),
        ("LITEBOOST_LEVEL", " 1 ", "level", 1),
        ("LITEBOOST_DISABLE", "rope.half", "disable", ("rope.half",)),
        ("LITEBOOST_DISABLE", " norm.* , mlp.silu ,", "disable", ("norm.*", "mlp.silu")),
        ("LITEBOOST_STRICT", "1", "strict", True),
        ("LITEBOOST_STRICT", "TRUE", "strict", True),
        ("LITEBOOST_STRICT", "false", "strict", False),
        ("LITEBOOST_ISA", "avx2", "isa", "avx2"),
        ("LITEBOOST_REQUIRE_NATIVE", "1", "require_native", True),
        ("LITEBOOST_NZ", " Auto ", "nz", "auto"),
        ("LITEBOOST_NZ", "0", "nz", "0"),
        ("LITEBOOST_NZ", "1", "nz", "1"),
        ("LITEBOOST_FIRST_USE", " Thread ", "first_use", "thread"),
        ("LITEBOOST_FIRST_USE", "process", "first_use", "process"),
        ("LITEBOOST_TORCH_EXPORT", " Ops ", "torch_export", "ops"),
        ("LITEBOOST_TP", "auto", "tp", 0),
        ("LITEBOOST_TP", " 4 ", "tp", 4),
        ("LITEBOOST_DP", "2", "dp", 2),
        ("LITEBOOST_SP", "1", "sp", 1),
        ("LITEBOOST_CP", " 3", "cp", 3),
        ("LITEBOOST_SPARSE", "0", "sparse", None),
        ("LITEBOOST_SPARSE", "0.75", "sparse", config.Sparse(0.75)),
        ("LITEBOOST_SPARSE", " .5 , block = 64,min_length=512", "sparse", config.Sparse(0.5, 64, 1, 2, 512)),
        ("LITEBOOST_SPARSE", "0.9,sinks=0,window=1", "sparse", config.Sparse(0.9, 128, 0, 1)),
    ],
)
def test_values_that_are_allowed(name: str, text: str, field: str, value: object) -> None:
    assert getattr(config.read({name: text}), field) == value


def test_patch_path_is_split_like_path(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two"
    one.touch()
    two.mkdir()
    text = os.pathsep.join([str(one), str(two), ""])
    assert config.read({"LITEBOOST_PATCH_PATH": text}).patch_path == (str(one), str(two))


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("LITEBOOST_LEVEL", "3", "0, 1 or 2"),
        ("LITEBOOST_LEVEL", "-1", "0, 1 or 2"),
        ("LITEBOOST_LEVEL", "1.0", "0, 1 or 2"),
        ("LITEBOOST_LEVEL", "two", "0, 1 or 2"),
        ("LITEBOOST_STRICT", "yes please", "0 or 1"),
        ("LITEBOOST_STRICT", "2", "0 or 1"),
        ("LITEBOOST_ISA", "sse2", "avx512_bf16"),
        ("LITEBOOST_REQUIRE_NATIVE", "maybe", "0 or 1"),
        ("LITEBOOST_NZ", "2", "auto, 0 or 1"),
        ("LITEBOOST_TORCH_EXPORT", "1", "original or ops"),
        ("LITEBOOST_NZ", "yes", "auto, 0 or 1"),
        ("LITEBOOST_TP", "0", "auto, or a number from 1"),
        ("LITEBOOST_TP", "two", "auto, or a number from 1"),
        ("LITEBOOST_DP", "0", "a number from 1"),
        ("LITEBOOST_SP", "auto", "a number from 1"),
        ("LITEBOOST_CP", "-2", "a number from 1"),
        ("LITEBOOST_SPARSE", "1", "a share from 0 (off) to below 1, such as 0.75"),
        ("LITEBOOST_SPARSE", "nan", "a share from 0 (off) to below 1"),
        ("LITEBOOST_SPARSE", "half", "a share from 0 (off) to below 1"),
        ("LITEBOOST_SPARSE", "0.5,blocks=64", "block=128, sinks=1, window=2, min_length=4096"),
        ("LITEBOOST_SPARSE", "0.5,block=8", "block is at least 16"),
        ("LITEBOOST_SPARSE", "0.5,block=64,block=64", "there twice"),
        ("LITEBOOST_SPARSE", "0.5,window=0", "window is at least 1"),
        ("LITEBOOST_SPARSE", "0.5,sinks=many", "separated by commas"),
        ("LITEBOOST_PATCH_PATH", "/no/such/folder/anywhere", "folders that exist"),
    ],
)
def test_values_that_are_refused_say_what_was_found_and_what_is_allowed(
    name: str, text: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config.read({name: text})
    message = str(caught.value)
    assert name in message and repr(text) in message and allowed in message
    assert "Change or unset it" in message
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, LiteBoostError)


def test_an_unknown_variable_is_a_warning_that_lists_the_known_ones() -> None:
    with pytest.warns(UserWarning, match="LITEBOOST_LEVLE.*no such variable.*LITEBOOST_LEVEL"):
        assert config.read({"LITEBOOST_LEVLE": "0"}) == config.Settings()


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"level": 1}, "level", 1),
        ({"level": "1"}, "level", 1),
        ({"strict": True}, "strict", True),
        ({"strict": False}, "strict", False),
        ({"disable": "rope.*,norm.rms"}, "disable", ("rope.*", "norm.rms")),
        ({"disable": ["rope.*", "norm.rms"]}, "disable", ("rope.*", "norm.rms")),
        ({"disable": []}, "disable", ()),
        ({"level": None}, "level", 2),
        ({"nz": "1"}, "nz", "1"),
        ({"nz": False}, "nz", "0"),
        ({"nz": None}, "nz", "auto"),
        ({"sparse": 0.75}, "sparse", config.Sparse(0.75)),
        ({"sparse": "0.75,block=64"}, "sparse", config.Sparse(0.75, 64)),
        ({"sparse": config.Sparse(0.5, 32, 0, 4, 99)}, "sparse", config.Sparse(0.5, 32, 0, 4, 99)),
        ({"sparse": 0}, "sparse", None),
    ],
)
def test_arguments_override(arguments: dict[str, object], field: str, value: object) -> None:
    assert getattr(config.with_overrides(config.Settings(), **arguments), field) == value


def test_an_argument_left_out_keeps_what_the_environment_said() -> None:
    base = config.Settings(level=1, disable=("rope.*",), strict=True)
    assert config.with_overrides(base, level=None, disable=None, strict=None) == base


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"level": 7}, "^level must be 0, 1 or 2; found 7. Change it or leave it out"),
        ({"level": 1.5}, "0, 1 or 2"),
        ({"strict": "often"}, "^strict must be 0 or 1; found 'often'"),
        ({"nz": "310P"}, "auto, 0 or 1"),
        ({"sparse": 75}, "^sparse must be a share from 0"),
        ({"colour": "red"}, "no setting is called 'colour'"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.with_overrides(config.Settings(), **arguments)


def documented() -> str:
    return runpy.run_path(str(ROOT / "build_support" / "environment_table.py"))["markdown"]()


def test_the_table_of_variables_names_every_one() -> None:
    table = documented()
    assert all(f"| `{name}` |" in table for name in NAMES)
    assert len(table.splitlines()) == len(NAMES) + 2


def test_documented_table_is_current() -> None:
    document = ROOT / "docs" / "environment.md"
    assert documented() in document.read_text(encoding="utf-8")


def test_a_wrong_variable_stops_the_import_with_a_clear_error() -> None:
    done = processes.python("import liteboost_adaptor", LITEBOOST_LEVEL="eleven")
    assert done.returncode == 1
    assert "ConfigError: LITEBOOST_LEVEL must be 0, 1 or 2; found 'eleven'" in done.stderr

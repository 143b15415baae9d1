"""Patterns of checkpoints' names are compiled where they are asked for, and are the same."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from typing import Any

import pytest
from transformers import conversion_mapping, core_model_loading

import liteboost_adaptor
from liteboost_adaptor.huggingface import loading


def built() -> dict[str, list[Any]]:
    mapping: dict[str, list[Any]] = conversion_mapping._build_checkpoint_conversion_mapping()
    return mapping


def is_compiled(pattern: Any) -> bool:
    return type(pattern) is re.Pattern or pattern._compiled is not None


@pytest.fixture
def served() -> Any:
    liteboost_adaptor.undo()
    liteboost_adaptor.apply()
    yield
    liteboost_adaptor.undo()


def test_patterns_are_those_of_transformers(served: None) -> None:
    ours = built()
    liteboost_adaptor.undo()
    theirs = built()
    assert ours.keys() == theirs.keys() and len(theirs) > 100
    count = 0
    for kind, transforms in theirs.items():
        for one, other in zip(ours[kind], transforms, strict=True):
            assert type(other.compiled_sources) is re.Pattern
            assert not is_compiled(one.compiled_sources)
            assert one.compiled_sources._text == other.compiled_sources.pattern
            count += 1
    assert count > 500


def test_a_pattern_does_as_a_compiled_one() -> None:
    pattern, compiled = loading.Pattern("(?P<g0>a+)b"), re.compile("(?P<g0>a+)b")
    assert not is_compiled(pattern)
    assert pattern.search("xaab").group(0) == compiled.search("xaab").group(0) == "aab"
    assert is_compiled(pattern)
    assert pattern.groupindex == compiled.groupindex and pattern.pattern == compiled.pattern
    assert copy.deepcopy(pattern) is pattern and copy.copy(pattern) is pattern
    assert pickle.loads(pickle.dumps(pattern)) == compiled
    with pytest.raises(AttributeError, match="nothing"):
        _ = pattern.nothing


def test_names_are_converted_as_without_us(served: None) -> None:
    found = [each for each in built()["llava"] if each.rename_source_key("language_model.model.x")[1]]
    assert found and all(is_compiled(each.compiled_sources) for each in found)
    liteboost_adaptor.undo()
    plain = [each for each in built()["llava"] if each.rename_source_key("language_model.model.x")[1]]
    renamed = [each.rename_source_key("language_model.model.x") for each in found]
    assert renamed == [each.rename_source_key("language_model.model.x") for each in plain]


def test_who_makes_a_pattern_of_his_own_is_told_at_once_that_it_is_wrong(served: None) -> None:
    with pytest.raises(re.error):
        core_model_loading.WeightRenaming("(", "x")
    assert type(core_model_loading.WeightRenaming("a", "b").compiled_sources) is re.Pattern


def test_it_is_taken_back_and_can_be_turned_off(served: None) -> None:
    assert core_model_loading.re is not re
    liteboost_adaptor.undo()
    assert core_model_loading.re is re
    liteboost_adaptor.apply(disable="load.patterns")
    assert core_model_loading.re is re
    assert type(built()["llava"][0].compiled_sources) is re.Pattern


def test_the_status_says_so(served: None) -> None:
    built()
    row = next(row for row in liteboost_adaptor.status().rules if row.id == loading.RULE)
    assert row.calls > 500 and not row.targets


def test_another_patch_of_the_module_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    liteboost_adaptor.undo()
    theirs = type(sys)("re")
    monkeypatch.setattr(core_model_loading, "re", theirs)
    liteboost_adaptor.apply()
    assert core_model_loading.re is theirs
    liteboost_adaptor.undo()

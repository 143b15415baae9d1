"""Level 0 on an NPU, as far as it can be told without one."""

from __future__ import annotations

import sysconfig
import warnings

import pytest
import torch

import liteboost_adaptor
from liteboost_adaptor.config import Settings
from liteboost_adaptor.engine.undo_stack import UndoStack
from liteboost_adaptor.environment import FIXED_MODULES, cuda_names, npu, npu_masks


def test_only_cuda_devices_are_translated() -> None:
    assert cuda_names.translated("cuda") == "npu" and cuda_names.translated("cuda:3") == "npu:3"
    for other in ("cpu", "meta", "cudagraph", "cuda-like", 0, None, torch.float16, torch.device("cpu")):
        assert cuda_names.translated(other) is other


def test_scripts_are_told_from_installed_libraries() -> None:
    assert cuda_names._is_script(__file__) and cuda_names._is_script("<stdin>")
    assert not cuda_names._is_script(torch.__file__)
    assert not cuda_names._is_script(warnings.__file__)
    assert not cuda_names._is_script("/usr/lib/python3/dist-packages/yaml/__init__.py")
    assert not cuda_names._is_script(sysconfig.get_path("purelib") + "/library.py")


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((2, 1, 1, 7), (2, 1, 5, 7)),
        ((1, 1, 1, 7), (1, 1, 5, 7)),
        ((1, 4, 5, 7), (2, 4, 5, 7)),
        ((2, 4, 5, 1), (2, 4, 5, 7)),
        ((5, 7), (5, 7)),
        ((1, 7), (5, 7)),
        ((1, 5, 7), (1, 1, 5, 7)),
        ((4, 1, 7), (2, 4, 5, 7)),
    ],
)
def test_masks_are_broadcast_to_a_shape_that_is_taken(
    mask: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    query, key = torch.empty(2, 4, 5, 8), torch.empty(2, 4, 7, 8)
    given = torch.rand(mask) > 0.5
    found = npu_masks.full_shape(given, query, key)
    assert found.shape == expected
    assert torch.equal(found.expand(2, 4, 5, 7), given.expand(2, 4, 5, 7))
    assert npu_masks.full_shape(found, query, key) is found


def test_attention_off_the_npu_gets_its_mask_as_it_is() -> None:
    seen = []
    rewriting = npu_masks.rewriting(lambda *arguments, **_: seen.append(arguments[3]))
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    rewriting(torch.empty(2, 4, 5, 8), torch.empty(2, 4, 7, 8), None, attn_mask=mask)
    assert seen == [mask] and seen[0] is mask


@pytest.mark.skipif(npu.is_npu_there(), reason="there is an NPU")
def test_without_an_npu_nothing_is_changed_or_listed() -> None:
    fixes = npu.Fixes()
    before = torch.Tensor.to, torch.tensor, torch.cuda.is_available, torch.nn.functional.gelu
    for module in FIXED_MODULES:
        fixes.imported(module, Settings())
    assert (torch.Tensor.to, torch.tensor, torch.cuda.is_available, torch.nn.functional.gelu) == before
    assert fixes.stop() == [] and list(fixes.rows()) == []
    assert not [row for row in liteboost_adaptor.status().rules if row.id.startswith("npu.")]


def test_every_fix_is_asked_for_after_the_import_of_its_module() -> None:
    assert {fix.module for fix in npu.FIXES} == set(FIXED_MODULES)


def test_kernels_are_taken_out_of_the_dispatcher_again() -> None:
    library = torch.library.Library("liteboost_unit_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CPU")
    stack = UndoStack()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack.add_kernels("liteboost_unit_test", "CPU", {"twice": lambda x: x * 0})
    twice = torch.ops.liteboost_unit_test.twice
    assert twice(torch.ones(2)).tolist() == [0, 0]
    assert stack.undo_all() == []
    assert twice(torch.ones(2)).tolist() == [2, 2]

"""A model on an NPU without the kernels for it is left alone, and one that comes there runs its original."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.calls import served

import liteboost_adaptor
from liteboost_adaptor import eligibility, native, native_npu

NONE = native_npu.NpuStatus(False, reason="no NPU kernels compiled for torch_npu 9.9.9 are installed")


@pytest.fixture
def no_npu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_npu, "load", lambda: NONE)
    monkeypatch.setattr(eligibility, "DEVICES", {"cpu"})


def test_a_model_on_an_npu_keeps_its_classes(no_npu_kernels: None) -> None:
    model = tiny_models.build("llama").npu()
    before = [type(module) for module in model.modules()]
    liteboost_adaptor.apply(model)
    assert [type(module) for module in model.modules()] == before
    with pytest.raises(liteboost_adaptor.errors.NativeLibraryError, match=r"torch_npu 9\.9\.9"):
        liteboost_adaptor.apply(model, quant="kv8")
    liteboost_adaptor.undo()


def test_a_model_that_comes_to_an_npu_runs_its_original(no_npu_kernels: None) -> None:
    model = tiny_models.build("llama")
    tokens = torch.randint(3, 30, (1, 5)).npu()
    with torch.no_grad(), served() as ours:
        expected = tiny_models.build("llama").npu()(tokens).logits
        liteboost_adaptor.apply(model)
        found = model.npu()(tokens).logits
        model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, expected)
    assert ours.fallbacks["norm.rms", "device npu"] > 0
    assert ours.rules["norm.rms"] == ours.rules["step.program"] == 0
    assert native.load().loaded
    liteboost_adaptor.undo()

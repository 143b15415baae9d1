"""Without compiled kernels models are left alone, and what needs them and was asked for is an error."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import processes, tiny_models
from torch import nn

import liteboost_adaptor
from liteboost_adaptor import config, native
from liteboost_adaptor.errors import NativeLibraryError, StrictError
from liteboost_adaptor.huggingface.runtime import runtime

NONE = native.NativeStatus(False, reason="no kernels compiled for torch 9.9.9 are installed")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where no library fits the torch installed, which nobody has been told yet."""
    monkeypatch.setattr(native, "_done", [NONE])
    monkeypatch.setattr(native, "_said", [])
    before = runtime.active
    yield
    liteboost_adaptor.undo()
    if before is not None:
        runtime.activate(before)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def ids(model: nn.Module) -> torch.Tensor:
    return torch.randint(3, 30, (1, 5))


@pytest.mark.parametrize("how", ["apply", "called", "patched"])
def test_a_model_keeps_its_classes_and_one_sentence_says_what_to_run(no_kernels: None, how: str) -> None:
    model = tiny_models.build("llama")
    before, registered = classes(model), len(runtime.entries)
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        liteboost_adaptor.apply()
        for _ in range(2):
            if how == "apply":
                liteboost_adaptor.apply(model)
            if how == "patched":
                with liteboost_adaptor.patched(model):
                    assert classes(model) == before
            model(ids(model))
        model.generate(ids(model), max_new_tokens=6, do_sample=False)
        status = liteboost_adaptor.status()
    assert classes(model) == before and len(runtime.entries) == registered
    (sentence,) = [str(each.message) for each in seen if "liteboost" in str(each.message)]
    assert NONE.reason in sentence and native.BUILD_COMMAND in sentence and "original code" in sentence
    assert not any(rule.targets and rule.state == "applied" for rule in status.rules)


@pytest.mark.parametrize(
    "asked", [{"quant": "kv8"}, {"quant": "w8a16"}, {"quant": "w4a16+kv8"}, {"sparse": "0.5"}]
)
def test_what_was_asked_for_is_an_error_that_says_what_to_run(
    no_kernels: None, asked: dict[str, str]
) -> None:
    model = tiny_models.build("llama")
    before, weights = classes(model), [each.data_ptr() for each in model.parameters()]
    with pytest.raises(NativeLibraryError, match=r"torch 9\.9\.9.*liteboost_adaptor build"):
        liteboost_adaptor.apply(model, **asked)
    assert classes(model) == before and weights == [each.data_ptr() for each in model.parameters()]


def test_what_its_level_leaves_out_is_no_error(no_kernels: None) -> None:
    model = tiny_models.build("llama")
    with pytest.warns(RuntimeWarning, match="original code"):
        liteboost_adaptor.apply(model, level=1, quant="kv8", sparse="0.5")


def test_strict_is_an_error(no_kernels: None) -> None:
    model = tiny_models.build("llama")
    with pytest.warns(RuntimeWarning), pytest.raises(StrictError, match=r"no rule can serve.*9\.9\.9"):
        liteboost_adaptor.apply(model, strict=True)


def test_level_0_does_not_ask_for_kernels(no_kernels: None) -> None:
    model = tiny_models.build("llama")
    before = classes(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime.bind(model, config.Settings(level=0, strict=True, quant=config.Quant("", kv_cache="int8")))
    assert classes(model) == before


def test_a_quantized_layer_is_neither_made_nor_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    from liteboost_adaptor.quantization import QuantizedLinear, QuantScheme

    scheme = QuantScheme("w8a16")
    kept = pickle.dumps(QuantizedLinear(32, 16, True, scheme))
    monkeypatch.setattr(native, "_done", [NONE])
    for attempt in (lambda: QuantizedLinear(32, 16, True, scheme), lambda: pickle.loads(kept)):
        with pytest.raises(NativeLibraryError, match="a quantized layer needs the compiled kernels"):
            attempt()


def test_a_quantized_checkpoint_is_refused_and_that_of_others_left_to_theirs(
    no_kernels: None, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from liteboost_adaptor.quantization import foreign_quantizer

    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path)
    with pytest.warns(RuntimeWarning, match="original code"):
        liteboost_adaptor.apply(quant="w8a16")
    with pytest.raises(NativeLibraryError, match="a quantized model needs the compiled kernels"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    values = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}

    class Theirs:
        quant_method = "gptq"

        def to_dict(self) -> dict[str, object]:
            return values

    assert foreign_quantizer.quantizer_factory(lambda config, **kwargs: "theirs")(Theirs()) == "theirs"
    rows = {row.id: row.reason for row in liteboost_adaptor.status().rules}
    assert rows["quantization.checkpoints"] == "the compiled kernels are missing"


def test_sharding_is_refused(no_kernels: None) -> None:
    with pytest.raises(NativeLibraryError, match="shard needs the compiled kernels"):
        liteboost_adaptor.shard(tiny_models.build("llama").eval())


SCRIPT = """
import sys, warnings
warnings.simplefilter("always")
import liteboost_adaptor
from liteboost_adaptor import native
native.candidates = lambda: []
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=40, do_sample=False).tolist())
"""


def test_a_script_gets_one_sentence_and_the_text_of_the_original(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path)
    expected = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=40, do_sample=False)
    done = processes.python(SCRIPT, str(tmp_path), is_forked=True)
    assert done.stdout.strip() == str(expected.tolist()), done.stderr
    assert done.stderr.count("liteboost_adaptor: ") == 1 and native.BUILD_COMMAND in done.stderr
    assert "Error" not in done.stderr.replace("RuntimeWarning", "")

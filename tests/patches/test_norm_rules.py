"""The norms of few families: each form against its original, look-alikes refused, whole models."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import calls, numbers, planted, state, tiny_models
from support.norm_forms import FORMS, GATED, IMAGES, SIZE, family_class, made
from torch import nn

import liteboost_adaptor
from liteboost_adaptor.replacements.norm import hard_inputs

pytestmark = pytest.mark.usefixtures("no_grad")


def check_served(module: nn.Module, rule: str, inputs: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Same dtype and shape; fp32 within noise; 16 bits but for roundings that fp32 noise tips."""
    inputs = list(inputs)
    model = nn.Sequential(module)
    expected = [model(x) for _, x in inputs]
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found = [model(x) for _, x in inputs]
    assert served.rules == {f"norm.{rule}": len(inputs)} and served.fallbacks == {}
    for (description, x), ours, theirs in zip(inputs, found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, description
        if x.dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6, msg=description)
            continue
        ulp = torch.finfo(x.dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=2 * ulp, atol=2e-6, msg=description)
        # Another order of roundings shows in a tenth of the elements and more.
        assert (ours != theirs).float().mean() < 0.02, description


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_served_in_their_rounding_order(form: str, dtype: torch.dtype) -> None:
    rule, *how = FORMS[form]
    generator = torch.Generator().manual_seed(4)
    scale = 1.0 if dtype != torch.float16 else 1e-2  # huge inputs are finite in fp16 too
    inputs = [(text, (x * scale).to(dtype)) for text, x in hard_inputs((4, 5, SIZE), generator)]
    check_served(made(*how, dtype), rule, iter(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", IMAGES)
def test_forms_of_four_dimensions_are_served(form: str, dtype: torch.dtype) -> None:
    (rule, *how), shape = IMAGES[form]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    check_served(made(*how, dtype), rule, iter([("random", x)]))


@pytest.mark.parametrize("form", ["CPM-Ant", "Moshi", "Gemma 4", "Qwen4-Exp in groups", "xLSTM"])
def test_fp32_weights_over_bf16_rows(form: str) -> None:
    rule, *how = FORMS[form]
    x = torch.randn(4, 5, SIZE, generator=torch.Generator().manual_seed(4)).bfloat16()
    check_served(made(*how, torch.float32), rule, iter([("mixed", x)]))


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rule", "family", "name"),
    [
        ("rms", "llama", "LlamaRMSNorm"),
        ("rms_late", "olmo2", "Olmo2RMSNorm"),
        ("rms_centred", "gemma2", "Gemma2RMSNorm"),
        ("rms_optional", "gemma4", "Gemma4RMSNorm"),
        ("rms_centred_rounded", "muse_spark", "MuseSparkTextCenteredRMSNorm"),
    ],
)
def test_16_bit_weights_over_fp32_rows(rule: str, family: str, name: str, weights: torch.dtype) -> None:
    """Residual streams kept in fp32, as Mamba's: the product promotes the weight."""
    x = torch.randn(4, 5, SIZE, generator=torch.Generator().manual_seed(4))
    check_served(made(family, name, (SIZE,), {}, weights), rule, iter([("mixed", x)]))


@pytest.mark.parametrize(
    ("family", "name", "arguments"),
    [
        ("bamba", "BambaRMSNormGated", (SIZE, 16)),
        ("qwen3_next", "Qwen3NextRMSNormGated", (SIZE,)),
        ("kimi_linear", "KimiLinearRMSNormGated", (SIZE,)),
    ],
)
def test_16_bit_gates_and_weights_over_fp32_rows(family: str, name: str, arguments: tuple) -> None:
    norm = made(family, name, arguments, {}, torch.bfloat16)
    x, gate = torch.randn(2, 4, 5, SIZE, generator=torch.Generator().manual_seed(4))
    gate = gate.bfloat16()
    expected = norm(x, gate)
    liteboost_adaptor.apply(nn.Sequential(norm))
    with calls.served() as served:
        found = norm(x, gate)
    assert served.kinds == {"norm": 1} and served.fallbacks == {}
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("affine", "eps"), [(True, 1e-5), (True, None), (False, 1e-5), (False, None)])
def test_torchs_own_rms_norm(affine: bool, eps: float | None, dtype: torch.dtype) -> None:
    module = nn.RMSNorm(SIZE, eps=eps, elementwise_affine=affine, dtype=dtype).requires_grad_(False)
    if affine:
        nn.init.normal_(module.weight)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 5, SIZE, generator=generator)
    check_served(module, "rms_torch", iter([("random", x.to(dtype)), ("tiny", (x * 1e-3).to(dtype))]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, SIZE), (2, 5, SIZE)], ids=str)
@pytest.mark.parametrize(("groups", "norm_first"), [(1, True), (1, False), (4, False)])
def test_falcon_h1s_gate_before_or_after_the_norm(
    groups: int, norm_first: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    keywords = {"n_groups": groups, "norm_before_gate": norm_first}
    norm = made("falcon_h1", "FalconH1RMSNormGated", (SIZE,), keywords, dtype)
    x, gate = torch.randn(2, *shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = norm(x, gate)
    liteboost_adaptor.apply(nn.Sequential(norm))
    with calls.served() as served:
        found = norm(x, gate)
        norm(x)
        norm.n_groups, norm.norm_before_gate = 4, True
        norm(x, gate)
    assert served.rules == {"norm.gate_switched": 1}
    assert {why for _, why in served.fallbacks} == {"no gate", "groups before the gate"}
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * ulp, atol=2e-6)
    assert dtype == torch.float32 or (found != expected).float().mean() < 0.02


def test_a_weight_that_is_switched_off_is_left_out() -> None:
    norm = made("gemma4", "Gemma4RMSNorm", (SIZE,), {}, torch.float32)
    x = torch.randn(3, SIZE)
    liteboost_adaptor.apply(nn.Sequential(norm))
    assert not torch.allclose(norm(x), torch.nn.functional.rms_norm(x, (SIZE,)), rtol=1e-3)
    norm.with_scale = False
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (SIZE,), eps=1e-6))


#: Calls that the original takes: form, how the module or the input is changed, reason.
HANDED_BACK: dict[str, tuple[str, Callable[[nn.Module, torch.Tensor], torch.Tensor], str]] = {
    "T5 with another weight dtype": ("T5", lambda norm, x: x.bfloat16(), "weight dtype float32"),
    "T5 with 16-bit weights": (
        "T5",
        lambda norm, x: norm.bfloat16() and x,
        "weight dtype bfloat16",
    ),
    "fp16 over bf16 weights": (
        "Moshi",
        lambda norm, x: norm.bfloat16() and x.half(),
        "weight dtype bfloat16",
    ),
    "Muse Spark with another weight dtype": (
        "Muse Spark, scaled input",
        lambda norm, x: x.bfloat16(),
        "weight dtype float32",
    ),
    "xLSTM statistics in bf16": (
        "xLSTM",
        lambda norm, x: setattr(norm, "force_float32_reductions", False) or x.bfloat16(),
        "statistics in the input's dtype",
    ),
    "rows of another size": ("Qwen4-Exp in groups", lambda norm, x: x[..., :48], "rows of another size"),
    "a layer norm of another size": ("OLMo", lambda norm, x: x[..., :48], "rows of another size"),
    "several dimensions": (
        "OLMo",
        lambda norm, x: setattr(norm, "normalized_shape", (5, SIZE)) or x,
        "normalised over several dimensions",
    ),
    "float64 weights": ("Moshi", lambda norm, x: norm.double() and x, "weight dtype float64"),
    "float64": ("DeepSeek-V4", lambda norm, x: x.double(), "dtype float64"),
}


@pytest.mark.parametrize("case", HANDED_BACK)
def test_calls_that_the_original_takes(case: str) -> None:
    form, change, reason = HANDED_BACK[case]
    rule, *how = FORMS[form]
    norm = made(*how, torch.float32)
    x = change(norm, torch.randn(4, 5, SIZE))

    def run() -> torch.Tensor | str:
        try:
            return norm(x)
        except RuntimeError as error:
            return str(error)

    expected = run()
    liteboost_adaptor.apply(nn.Sequential(norm))
    with calls.served() as served:
        found = run()
    assert served.rules == {} and served.fallbacks == {(f"norm.{rule}", reason): 1}
    assert found == expected if isinstance(expected, str) else torch.equal(found, expected)


def test_autocast_is_left_to_a_norm_that_asks_for_it() -> None:
    norm = made("nemotron", "NemotronLayerNorm1P", (SIZE,), {}, torch.float32)
    x = torch.randn(3, SIZE)
    torch.set_autocast_enabled("cuda", True)
    try:
        expected = norm(x)
        liteboost_adaptor.apply(nn.Sequential(norm))
        with calls.served() as served:
            assert torch.equal(norm(x), expected)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert expected.dtype == torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert served.fallbacks == {("norm.layer_centred", "autocast"): 1}


def test_a_norm_in_a_block_of_its_own_ends_it() -> None:
    """Where autocast is on without a block around it, that is when torch lets go of what it has cast."""
    model = tiny_models.build("nemotron")
    norm, weight = model.model.norm, model.lm_head.weight
    liteboost_adaptor.apply(model)
    x = torch.randn(1, 2, weight.shape[1])
    torch.set_autocast_enabled("cpu", True)
    try:
        with torch.no_grad():
            before = torch.nn.functional.linear(x, weight)
            weight.data.mul_(-1.5)
            norm(x)
            after = torch.nn.functional.linear(x, weight)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    assert numbers.relative(after.float(), -1.5 * before.float()) <= 1e-2


def test_a_layer_norm_patched_later_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = made("sam", "SamLayerNorm", (7,), {}, torch.float32)
    liteboost_adaptor.apply(nn.Sequential(norm))
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x * 0)
    assert torch.count_nonzero(norm(torch.randn(2, 3, 5, 7))) == 0


#: What is changed -> form, old text of its class, new text.
NEAR_MISSES = {
    "Gemma 4, one added": ("Gemma 4", "* self.weight.float()", "* (1.0 + self.weight.float())"),
    "Gemma 4, eps outside": (
        "Gemma 4",
        "torch.pow(mean_squared, -0.5)",
        "(torch.pow(mean_squared, -0.5) + self.eps)",
    ),
    "Gemma 4, early cast": (
        "Gemma 4",
        "self._norm(hidden_states.float())",
        "self._norm(hidden_states.float()).type_as(hidden_states)",
    ),
    "Qwen4-Exp, nothing added": ("Qwen4-Exp", "(1.0 + self.weight.float())", "self.weight.float()"),
    "Qwen4-Exp, interleaved": ("Qwen4-Exp in groups", "-1, self.group_size)", "self.group_size, -1)"),
    "DeepSeek-V4, no cast": ("DeepSeek-V4", "+ self.eps).to(x.dtype)", "+ self.eps)"),
    "DeepSeek-V4, narrow square": ("DeepSeek-V4", "x.float().square()", "x.square()"),
    "HY-V4, the root itself": ("HY-V4", "torch.rsqrt", "torch.sqrt"),
    "CPM-Ant, late cast": ("CPM-Ant", ".to(old_dtype) * self.weight", " * self.weight.to(old_dtype)"),
    "Moshi, eps outside": ("Moshi", "+ self.eps)", "+ 0 * self.eps) + self.eps"),
    "T5, another cast": ("T5", "hidden_states.to(self.weight.dtype)", "hidden_states.to(torch.float16)"),
    "OLMo, another eps": ("OLMo", "eps=1e-5", "eps=1e-6"),
    "OLMo, no cast": ("OLMo", "hidden_states.to(dtype=torch.float32)", "hidden_states"),
    "Nemotron, two added": ("Nemotron", "self.weight + 1.0", "self.weight + 2.0"),
    "Muse Spark, half added": ("Muse Spark", "(1.0 + self.weight)", "(0.5 + self.weight)"),
    "Muse Spark, not rounded": ("Muse Spark, scaled input", "output.type_as(x).float()", "output"),
    "xLSTM, bias first": ("xLSTM", "x = x * self.weight", "x = x + self.weight"),
    "xLSTM heads, unbiased variance": ("xLSTM heads", "unbiased=False", "unbiased=True"),
    "Chameleon, another eps": ("Chameleon", "eps=1e-5", "eps=1e-6"),
    "Falcon-H1, eps outside": ("Falcon-H1", "variance + self.variance_epsilon", "variance) + (1e-5"),
    "GOT-OCR2, columns for rows": ("GOT-OCR2", "permute(0, 3, 1, 2)", "permute(0, 3, 2, 1)"),
    "GOT-OCR2 over another base": ("GOT-OCR2", "(nn.LayerNorm)", "(TwiceLayerNorm)"),
}

HEADER = """
import torch
from torch import Tensor, Size, nn
from torch.nn import functional as F
from transformers.models.nemotron.modeling_nemotron import _cast_if_autocast_enabled, maybe_autocast


class TwiceLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return 2 * nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class CpmAntConfig:
    pass


"""


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_look_alikes_are_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    form, old, new = NEAR_MISSES[case]
    (_, family, name, arguments, keywords), shape = (IMAGES | GATED).get(form) or (FORMS[form], (4, 5, SIZE))
    text = textwrap.dedent(inspect.getsource(family_class(family, name)))
    assert text.count(old) == 1
    changed = getattr(planted.load(HEADER + text.replace(old, new), tmp_path), name)
    module, x = changed(*arguments, **keywords).requires_grad_(False), torch.randn(shape)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    model = nn.Sequential(module)
    expected = model(x)
    liteboost_adaptor.apply(model)
    assert torch.equal(model(x), expected)
    rows = state.rows("norm")
    assert rows.keys() == {"refused"}, rows.keys()
    assert "not in the catalogue" in rows["refused"][0].reason


def test_a_subclass_of_torchs_rms_norm_with_a_forward_of_its_own_is_not_served() -> None:
    class Twice(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Twice(SIZE).requires_grad_(False))
    x = torch.randn(3, SIZE)
    expected = model(x)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        assert torch.equal(model(x), expected)
    assert served.rules == {}


@pytest.mark.parametrize("family", ["bamba", "mamba2", "inkling2_text"])
def test_models_with_parts_in_fp32_are_served_in_bf16(family: str) -> None:
    model = tiny_models.build(family)
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.bfloat16()
    inputs = tiny_models.example_inputs(model, padding=3)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model, disable="rope.*,mlp.*,attention.*,experts.*,linear.*")
        with calls.served() as served:
            found = model(**inputs).logits
    assert served.kinds["norm"] > 0 and served.fallbacks == {}
    assert numbers.relative(found, expected) <= 2e-2


@pytest.mark.parametrize("family", ["diffllama", "gemma4_unified_text", "moshi", "nemotron", "olmo"])
def test_bf16_is_as_near_to_float64_as_the_original(family: str) -> None:
    ours, originals, wanted = [], [], []
    for seed in (0, 1):
        model = numbers.cast(tiny_models.build(family, seed), torch.bfloat16)
        inputs = numbers.padded_inputs(model, seed=seed)
        kept = inputs["attention_mask"].bool()
        wanted.append(numbers.exact(model, family, inputs).logits[kept])
        with torch.no_grad():
            originals.append(model(**inputs).logits[kept].double())
            liteboost_adaptor.apply(model, disable="rope.*,mlp.*,attention.*,linear.*")
            ours.append(model(**inputs).logits[kept].double())
        liteboost_adaptor.undo()
    exact = torch.cat(wanted)
    distance, own = ((torch.cat(found) - exact).norm() / exact.norm() for found in (ours, originals))
    assert distance <= max(1.5 * own.item(), numbers.ULP[torch.bfloat16])

"""Checkpoints of GPTQ, AWQ and compressed-tensors: the same integers and scales, on our kernels."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch
from support import quantized_layers, stored_weights, tiny_models
from support.calls import faults_of_steps
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import liteboost_adaptor
from liteboost_adaptor.errors import QuantizationError
from liteboost_adaptor.quantization import QuantizedLinear
from liteboost_adaptor.report import report

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
IDS = torch.arange(5, 29)[None]


def gptq(bits: int = 4, size: int = 32, symmetric: bool = True, act: bool = False, v2: bool = False, **more):
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size or -1,
        "sym": symmetric,
        "desc_act": act,
    }
    config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    make = functools.partial(stored_weights.random, bits=bits, size=size, symmetric=symmetric, act=act)
    return config | more, make, functools.partial(stored_weights.gptq, v2=more.get("stored_v2", v2))


def awq(size: int = 128):
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return config, functools.partial(stored_weights.random, size=size, symmetric=False), stored_weights.awq


def compressed(form: str, bits: int, size: int, symmetric: bool, act: bool = False, **more):
    config = stored_weights.compressed_config(form, bits, size, symmetric, **more)
    pack = stored_weights.pack_quantized if form == "pack-quantized" else stored_weights.int_quantized
    make = functools.partial(stored_weights.random, bits=bits, size=size, symmetric=symmetric, act=act)
    return config, make, functools.partial(pack, symmetric=symmetric)


ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
FORMS = {
    "gptq": gptq(),
    "gptq asymmetric": gptq(size=64, symmetric=False),
    "gptq v2": gptq(size=128, symmetric=False, v2=True),
    "gptq that says v1 and stores v2": gptq(stored_v2=True),
    "gptq desc_act": gptq(act=True),
    "gptq desc_act asymmetric": gptq(act=True, size=64, symmetric=False),
    "gptq one group": gptq(size=0, symmetric=False),
    "gptq groups of 16": gptq(size=16, symmetric=False),
    "gptq 8 bits": gptq(bits=8),
    "gptq 8 bits asymmetric desc_act": gptq(bits=8, size=64, symmetric=False, act=True),
    "gptq 3 bits": gptq(bits=3, symmetric=False),
    "gptq 2 bits": gptq(bits=2),
    "awq": awq(),
    "awq groups of 32": awq(32),
    "pack-quantized": compressed("pack-quantized", 4, 32, True),
    "pack-quantized asymmetric": compressed("pack-quantized", 4, 64, False),
    "pack-quantized in order of activations": compressed("pack-quantized", 4, 32, False, act=True),
    "pack-quantized by channel": compressed("pack-quantized", 4, 0, True),
    "pack-quantized 8 bits": compressed("pack-quantized", 8, 0, True),
    "int-quantized": compressed("int-quantized", 8, 0, True, input_activations=ACTIVATIONS),
    "int-quantized asymmetric": compressed("int-quantized", 8, 0, False),
    "int-quantized groups": compressed("int-quantized", 8, 32, False),
    "int-quantized 4 bits": compressed("int-quantized", 4, 32, True),
}
FEW = ("gptq desc_act", "gptq 8 bits", "awq", "pack-quantized asymmetric", "int-quantized")


def write(folder: Path, form: str, cls: type = LlamaForCausalLM) -> dict[str, torch.Tensor]:
    config_class = LlamaConfig if cls is LlamaForCausalLM else Qwen2Config
    torch.manual_seed(0)
    return stored_weights.write(folder, cls(config_class(**SIZES)), *FORMS[form])


def load(folder: Path, dtype: torch.dtype = torch.float32, **arguments) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **arguments).eval()


def check(model: torch.nn.Module, exact: dict[str, torch.Tensor]) -> None:
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    assert layers.keys() == exact.keys()
    for name, layer in layers.items():
        assert torch.equal(layer.dequantize(torch.float64), exact[name]), name


def reference(model: torch.nn.Module, exact: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of transformers' own code in float64, with the weights dequantized."""
    plain = type(model)(type(model.config)(**SIZES)).double()
    state = {name: value.double() for name, value in model.state_dict().items() if value.is_floating_point()}
    state = {name: value for name, value in state.items() if name in plain.state_dict()}
    plain.load_state_dict(state | {f"{name}.weight": weight for name, weight in exact.items()})
    liteboost_adaptor.undo(plain)
    with torch.no_grad():
        return plain.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("form", FORMS)
def test_the_same_weights_and_what_they_compute(form: str, tmp_path: Path, no_grad: None) -> None:
    exact = write(tmp_path, form)
    model = load(tmp_path)
    check(model, exact)
    expected = reference(model, exact)
    assert ((model(input_ids=IDS).logits - expected).norm() / expected.norm()).item() <= 2e-6


@pytest.mark.parametrize("form", FEW)
def test_saved_they_are_ours(form: str, tmp_path: Path) -> None:
    exact = write(tmp_path / "theirs", form, Qwen2ForCausalLM)
    model = load(tmp_path / "theirs", torch.bfloat16)
    expected = model.generate(IDS, max_new_tokens=12, do_sample=False)
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours", torch.bfloat16)
    check(again, exact)
    config = again.config.quantization_config
    assert config.quant_method == "liteboost" and config.layers.keys() == exact.keys()
    assert torch.equal(again.generate(IDS, max_new_tokens=12, do_sample=False), expected)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    plain = load(tmp_path / "ours").dequantize()
    assert not any(isinstance(each, QuantizedLinear) for each in plain.modules())
    assert torch.equal(plain.model.layers[0].mlp.up_proj.weight.double(), exact["model.layers.0.mlp.up_proj"])


def schemes(model: torch.nn.Module) -> set[str]:
    return {each.scheme.name for each in model.modules() if isinstance(each, QuantizedLinear)}


@pytest.mark.parametrize(
    ("form", "activations", "scheme"),
    [
        ("pack-quantized", ACTIVATIONS, "w4a8"),
        ("pack-quantized asymmetric", ACTIVATIONS, "w4a8"),
        ("pack-quantized", ACTIVATIONS | {"dynamic": False}, "w4a16"),
        ("pack-quantized", ACTIVATIONS | {"type": "float"}, "w4a16"),
        ("pack-quantized 8 bits", ACTIVATIONS, "w8a16"),
    ],
)
def test_activations_beside_4_bits_are_rounded_where_the_checkpoint_says_so(
    form: str, activations: dict, scheme: str, tmp_path: Path, no_grad: None
) -> None:
    config, make, pack = FORMS[form]
    config = json.loads(json.dumps(config))
    for group in config["config_groups"].values():
        group["input_activations"] = activations
    torch.manual_seed(0)
    exact = stored_weights.write(
        tmp_path / "theirs", LlamaForCausalLM(LlamaConfig(**SIZES)), config, make, pack
    )
    model = load(tmp_path / "theirs")
    check(model, exact)
    assert schemes(model) == {scheme}
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert schemes(again) == {scheme}
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("form", ["gptq", "gptq desc_act", "awq", "pack-quantized", "ours"])
def test_the_variable_rounds_the_activations_of_checkpoints_of_4_bits(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    exact = write(folder, "gptq" if form == "ours" else form)
    if form == "ours":
        load(folder).save_pretrained(tmp_path / "ours")
        folder = tmp_path / "ours"
    expected = load(folder)
    liteboost_adaptor.apply(quant="w4a8")
    try:
        model = load(folder)
    finally:
        liteboost_adaptor.undo()
        liteboost_adaptor.apply()
    check(model, exact)
    assert schemes(expected) == {"w4a16"} and schemes(model) == {"w4a8"}
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert schemes(again) == {"w4a8"}
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        assert torch.equal(again(input_ids=IDS).logits, logits)
        assert not torch.equal(expected(input_ids=IDS).logits, logits)
        quantized_layers.check_products(model, IDS)


def test_undo_gives_transformers_its_own_quantizers_back(tmp_path: Path) -> None:
    from transformers.quantizers import auto

    write(tmp_path, "awq")
    liteboost_adaptor.undo()
    try:
        assert auto.AUTO_QUANTIZER_MAPPING["awq"] is auto.AwqQuantizer
        assert auto.AUTO_QUANTIZER_MAPPING["gptq"] is auto.GptqHfQuantizer
        assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] is auto.CompressedTensorsConfig
        with pytest.raises(ImportError, match="gptqmodel"):
            load(tmp_path)
    finally:
        liteboost_adaptor.apply()
    assert load(tmp_path).hf_quantizer.quantization_config.quant_method == "liteboost"


def test_what_is_not_read_goes_to_transformers(tmp_path: Path) -> None:
    config, make, pack = FORMS["awq"]
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    stored_weights.write(tmp_path, model, config | {"version": "gemv"}, make, pack)
    with pytest.raises(ImportError, match="gptqmodel"):
        load(tmp_path)
    rows = [row for row in liteboost_adaptor.status().rules if row.id == "quantization.checkpoints"]
    assert any("AWQ in the version gemv" in row.reason for row in rows)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t, name: t.pop(f"{name}.scales"), "has no model.layers.0.mlp.up_proj.scales"),
        (
            lambda t, name: t.update({f"{name}.qweight": t[f"{name}.qweight"][:-1]}),
            "qweight .* for 128 columns",
        ),
        (
            lambda t, name: t.update({f"{name}.qweight": t[f"{name}.qweight"][:, :-8].contiguous()}),
            r"the shape \[248, 128\], and the model wants \[256, 128\]",
        ),
        (lambda t, name: t[f"{name}.g_idx"].fill_(9), "g_idx .* no list of 4 groups"),
    ],
)
def test_checkpoints_that_are_not_what_they_say(change, text: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write(tmp_path, "gptq")
    tensors = {name: value.clone() for name, value in load_file(tmp_path / "model.safetensors").items()}
    change(tensors, "model.layers.0.mlp.up_proj")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match=text):
        load(tmp_path)


#: What the library made of its own files: SHA-256 of the weights it multiplies out to bf16, by name.
RECORDED = {
    "pack_quantized": "30f317cc7a2e2ce908ca3f8997845df713633343594cd31ba99c50d246239fd4",
    "int_quantized": "49e700ba3c7fa816ecd618a7d6948271e1e3bf746827c964254ec4e687befe17",
}


@pytest.mark.parametrize("name", RECORDED)
def test_files_that_the_library_of_compressed_tensors_has_written(name: str) -> None:
    """Version 0.20.0; asymmetric, 4 bits in groups of 32, and 8 bits by channel."""
    model = AutoModelForCausalLM.from_pretrained(Path(__file__).parent / "recorded" / name)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    assert len(layers) == 7
    digest = hashlib.sha256()
    for _, layer in sorted(layers.items()):
        digest.update(layer.dequantize(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == RECORDED[name]


def test_experts_that_are_one_tensor_are_dequantized_and_the_status_says_so(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_models.build("qwen3_moe").half()
    model.save_pretrained(tmp_path)
    config, make, pack = gptq(act=True)
    tensors, exact = load_file(tmp_path / "model.safetensors"), {}
    for seed, name in enumerate(name for name in sorted(tensors) if name.endswith("_proj.weight")):
        layer = name.removesuffix(".weight")
        weight = make(tuple(tensors.pop(name).shape), seed)
        exact[layer] = weight.exact()
        tensors.update((f"{layer}.{part}", value) for part, value in pack(weight).items())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    loaded = load(tmp_path)
    layer = loaded.model.layers[0]
    assert isinstance(layer.self_attn.o_proj, QuantizedLinear)
    down = [
        exact[f"model.layers.0.mlp.experts.{index}.down_proj"]
        for index in range(len(layer.mlp.experts.down_proj))
    ]
    assert torch.equal(layer.mlp.experts.down_proj.double(), torch.stack(down))
    rows = [row for row in liteboost_adaptor.status().rules if row.id == "quantization"]
    assert any("dequantized" in row.reason for row in rows)


def test_a_step_with_columns_in_another_order_is_recorded(tmp_path: Path) -> None:
    write(tmp_path, "gptq desc_act")
    model = load(tmp_path, torch.bfloat16)
    counter = report.counter("step.program")
    before, fallbacks = counter.calls, counter.fallbacks.copy()
    found = model.generate(IDS, max_new_tokens=48, do_sample=False)
    assert counter.calls > before and not faults_of_steps(counter.fallbacks - fallbacks)
    with liteboost_adaptor.patched(model, disable="step.program"):
        assert torch.equal(model.generate(IDS, max_new_tokens=48, do_sample=False), found)

"""Scales that a text chooses: what they leave as it is, and what they are good for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support import numbers, tiny_models
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import liteboost_adaptor
from liteboost_adaptor import cli
from liteboost_adaptor.bench.perplexity import evaluate, tokenize
from liteboost_adaptor.errors import QuantizationError
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, QuantScheme, quantize_model
from liteboost_adaptor.quantization.calibration import gptq
from liteboost_adaptor.quantization.calibration.calibrate import calibrate
from liteboost_adaptor.quantization.calibration.scaling import output_error
from liteboost_adaptor.quantization.schemes import quantize
from liteboost_adaptor.quantization.selection import targets_of

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "models" / "shakespeare-llama"
IDS = torch.arange(5, 37)[None]
_BART = {
    **{"d_model": 64, "vocab_size": 120, "max_position_embeddings": 300, "decoder_start_token_id": 2},
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
}
_T5 = {"vocab_size": 120, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
ENCODER_DECODERS = {
    **{"Bart": _BART, "MBart": _BART, "T5": _T5 | {"decoder_start_token_id": 0}},
    "Whisper": _BART | {"max_source_positions": 30, "pad_token_id": 0},
}


def load(folder: Path = FOLDER, **arguments: object) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments).eval()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def calibration_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of the held-out text, which the tests below do not evaluate on."""
    return written(tmp_path_factory, 20_000)


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory, 3_000)


def written(factory: pytest.TempPathFactory, characters: int) -> str:
    path = factory.mktemp("text") / "text.txt"
    path.write_text((FOLDER / "heldout.txt").read_text(encoding="utf-8")[-characters:], encoding="utf-8")
    return str(path)


def planted() -> torch.nn.Module:
    """One in a hundred weights of norms times 50, the weights behind them over 50: the same function."""
    model, generator = load(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                width = norm.weight.numel()
                channels = torch.randperm(width, generator=generator)[: max(1, width // 100)]
                norm.weight[channels] *= 50
                for reader in readers:
                    reader.weight[:, channels] /= 50
    return model


@torch.no_grad()
def test_outliers_that_change_nothing_are_made_up_for(short_text: str) -> None:
    expected = load()(input_ids=IDS).logits.double()
    assert relative(planted()(input_ids=IDS).logits, expected) < 1e-5
    for scheme in ("w8a8", "w4a16"):
        plain = quantize_model(planted(), LiteBoostConfig(scheme))
        fitted = quantize_model(planted(), LiteBoostConfig(scheme, calibrate=short_text))
        found = relative(fitted(input_ids=IDS).logits, expected)
        assert found < 0.7 * relative(plain(input_ids=IDS).logits, expected)


#: What calibration may cost in perplexity with outliers planted, where plain rounding costs more.
FORMS = [("w8a8", "smoothquant"), ("w4a16", "awq"), ("w4a16", "gptq"), ("w4a8", "awq")]


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "method"), FORMS)
def test_perplexity_with_outliers(scheme: str, method: str, calibration_text: str) -> None:
    blocks = tokenize(FOLDER, FOLDER / "heldout.txt")[:110]
    plain = evaluate(planted(), blocks, 8).perplexity
    rounded = evaluate(quantize_model(planted(), LiteBoostConfig(scheme)), blocks, 8).perplexity / plain
    config = LiteBoostConfig(scheme, calibrate=calibration_text, method=method)
    fitted = evaluate(quantize_model(planted(), config), blocks, 8).perplexity / plain
    assert fitted <= 1.01 and fitted - 1 < 0.7 * (rounded - 1)


SAMPLE = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt_neox",
    "qwen3_moe",
    "cohere",
    "gpt2",
    "minicpmv4_6",
    "video_llama_3",
    "Bart",
    "MBart",
    "T5",
)


def built(family: str) -> torch.nn.Module:
    """With an encoder where the name is the prefix of a class, else what generates text by itself."""
    if family not in ENCODER_DECODERS:
        return tiny_models.build(family)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**ENCODER_DECODERS[family])
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape) * (parameter.ndim == 1))  # norms and biases
    return model


@pytest.mark.parametrize("family", SAMPLE)
@torch.no_grad()
def test_moving_scales_changes_no_function(family: str) -> None:
    model = built(family)
    ids = torch.randint(0, model.config.get_text_config(decoder=True).vocab_size, (2, 24))
    liteboost_adaptor.undo(model)
    expected = everything(model, ids)
    config = LiteBoostConfig("w8a8", calibrate="text")
    made = list(targets_of(model, config))
    found = calibrate(model, ids, config.method, made)
    behind_norms = {"llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "qwen3_moe", "cohere"}
    behind_norms |= {"minicpmv4_6", "video_llama_3", "MBart", "T5"}
    assert bool(found.columns) == (family in behind_norms)
    for name, columns in found.columns.items():
        model.get_submodule(name).weight.mul_(columns)
    for name, value in found.parameters.items():
        assert not torch.equal(model.get_parameter(name), value)
        model.get_parameter(name).copy_(value)
    for name, returned in everything(model, ids).items():
        assert numbers.relative(returned, expected[name]) <= 2e-5, name


def everything(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Whatever a call returns, the states of all layers among it."""
    more = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    found = model(input_ids=ids, **more, output_hidden_states=True, use_cache=False)
    named = {name: value if isinstance(value, tuple) else (value,) for name, value in found.items()}
    return {f"{name}.{at}": each for name, values in named.items() for at, each in enumerate(values)}


@torch.no_grad()
def test_a_norm_that_something_else_reads_is_left_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama")
    layer = model.model.layers[0]
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) + x.sigmoid()  # reads what the norm gives, beside its layers
    ids = torch.randint(0, model.config.vocab_size, (1, 16))
    config = LiteBoostConfig("w8a8", calibrate="text")
    found = calibrate(model, ids, config.method, list(targets_of(model, config)))
    (kept,) = [entry for entry in found.refused if entry[0] == "model.layers.0.post_attention_layernorm"]
    assert "its output is read by sigmoid, too" in kept[1]
    assert "model.layers.0.mlp.up_proj" not in found.columns
    assert "model.layers.0.self_attn.q_proj" in found.columns
    monkeypatch.setattr("liteboost_adaptor.quantization.model.blocks_of", lambda *_: ids)
    quantize_model(model, config)
    rows = [row for row in liteboost_adaptor.status().rules if row.id == "quantization"]
    assert any(kept[0] in row.where and kept[1] in row.reason for row in rows)


@pytest.mark.parametrize(
    "scheme", [QuantScheme("w4a16"), QuantScheme("w4a16", 64, symmetric=False), QuantScheme("w8a16")], ids=str
)
def test_gptq_makes_up_for_errors_of_rounding(scheme: QuantScheme) -> None:
    rows = torch.randn(400, 16) @ torch.randn(16, 192) + 0.1 * torch.randn(400, 192)
    weight, gram = torch.randn(40, 192), rows.t() @ rows
    plain, fitted = quantize(weight, scheme), gptq.quantize(weight, scheme, gram)
    assert {name: (t.shape, t.dtype) for name, t in fitted.tensors().items()} == scheme.buffer_specs(40, 192)
    error = output_error(fitted.dequantize() - weight, gram)
    assert error < 0.5 * output_error(plain.dequantize() - weight, gram)


def test_while_loading_after_loading_and_offline_are_the_same(short_text: str, tmp_path: Path) -> None:
    config = LiteBoostConfig("w8a8", calibrate=short_text)
    loaded = load(quantization_config=config)
    after = quantize_model(load(), LiteBoostConfig("w8a8", calibrate=short_text)).state_dict()
    assert loaded.state_dict().keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in loaded.state_dict().items())
    assert isinstance(loaded.lm_head, QuantizedLinear) and "calibrate" not in config.to_dict()
    arguments = ["quantize", str(FOLDER), str(tmp_path / "made"), "--scheme", "w8a8"]
    assert cli.main([*arguments, "--calibrate", short_text]) == 0
    offline, plain = load(tmp_path / "made"), load()
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(offline.state_dict()[norm], plain.state_dict()[norm])
    assert relative(offline(input_ids=IDS).logits, plain(input_ids=IDS).logits.double()) < 0.05


@pytest.mark.parametrize(("family", "scheme"), [("MBart", "w8a16"), ("T5", "w8a8")])
def test_an_encoder_decoder_is_calibrated_as_what_it_is(family: str, scheme: str, tmp_path: Path) -> None:
    """Offline, too: not as the decoder alone, which some families have as a class of its own."""
    model = built(family)
    model.save_pretrained(tmp_path / "plain")
    words = {f"w{number}": number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3").save_pretrained(tmp_path / "plain")
    chosen = torch.randint(4, len(words), (600,), generator=torch.Generator().manual_seed(0))
    (tmp_path / "text").write_text(" ".join(f"w{number}" for number in chosen.tolist()), encoding="utf-8")
    config = LiteBoostConfig(scheme, calibrate=str(tmp_path / "text"))
    loaded = type(model).from_pretrained(tmp_path / "plain", quantization_config=config).state_dict()
    plain = quantize_model(type(model).from_pretrained(tmp_path / "plain"), LiteBoostConfig(scheme))
    assert any(not torch.equal(tensor, loaded[name]) for name, tensor in plain.state_dict().items())
    arguments = ["quantize", str(tmp_path / "plain"), str(tmp_path / "made"), "--scheme", scheme]
    assert cli.main([*arguments, "--calibrate", str(tmp_path / "text")]) == 0
    made = type(model).from_pretrained(tmp_path / "made").state_dict()
    assert made.keys() == loaded.keys()
    assert all(torch.equal(tensor, made[name]) for name, tensor in loaded.items())


def test_a_model_that_reads_no_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("Whisper")
    monkeypatch.setattr("liteboost_adaptor.quantization.model.blocks_of", lambda *_: IDS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(QuantizationError, match=r"WhisperFor.* does not run on one alone .*without calib"):
        quantize_model(model, LiteBoostConfig("w8a8", calibrate="text"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    for arguments, said in (
        ({"method": "awq"}, "needs a text"),
        ({"calibrate": "x", "method": "smoothquant"}, "method must be one of awq, gptq for w4a16"),
        ({"calibrate": 3}, "must be the name of a file"),
    ):
        with pytest.raises(QuantizationError, match=said):
            LiteBoostConfig("w4a16", **arguments)
    with pytest.raises(QuantizationError, match="must be a file with a text"):
        load(quantization_config=LiteBoostConfig("w4a16", calibrate=str(tmp_path / "none.txt")))
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(QuantizationError, match="at least 256 tokens"):
        load(quantization_config=LiteBoostConfig("w4a16", calibrate=str(tmp_path / "short.txt")))

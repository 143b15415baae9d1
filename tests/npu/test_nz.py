"""Weights of models in FRACTAL_NZ: which are cast, and that nothing but their memory is another one.

Run as it is on a 910B; `test_elsewhere` runs it on a 310P and on a CANN that casts by aclnn.
"""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from npu.launching import simulated
from npu.test_launches import deepseek
from safetensors.torch import save
from support import llamas
from torch import nn
from transformers import LlamaForCausalLM

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.replacements import npu_format
from liteboost_adaptor.replacements.npu_format import FRACTAL_NZ, InternalFormats, cast, format_of

LAYERS = 2 * 7 + 1


@pytest.fixture(autouse=True)
def clean(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, no_grad: None, undone: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    # Filling new memory in FRACTAL_NZ is an operator of the graph engine.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def llama(dtype: torch.dtype = torch.float16, **changes: Any) -> LlamaForCausalLM:
    """Of sizes that FRACTAL_NZ pads: 200 channels, 500 tokens."""
    sizes = {"hidden_size": 200, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    sizes |= {"intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 500, "eos_token_id": None}
    return llamas.llama(dtype, "cpu", **sizes | changes).requires_grad_(False)


def applied(model: nn.Module, nz: str = "1") -> nn.Module:
    liteboost_adaptor.apply(model, level=1, nz=nz)
    return model


def tokens(model: nn.Module) -> list[int]:
    ids = torch.arange(3, 12)[None].npu()
    return model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)[0].tolist()


def in_nz(model: nn.Module) -> list[str]:
    return [
        name for name, p in model.named_parameters() if p.device.type == "npu" and format_of(p) == FRACTAL_NZ
    ]


def same(one: nn.Module, other: nn.Module) -> bool:
    wanted = other.state_dict()
    return all(torch.equal(tensor.cpu(), wanted[name].cpu()) for name, tensor in one.state_dict().items())


def told() -> dict[str, Any]:
    return liteboost_adaptor.status().native["npu"]["nz"]


def is_310p() -> bool:
    return torch.ops.liteboost._npu_soc().startswith("Ascend310P")


def test_same_tokens_by_operators_that_read_it_as_it_lies() -> None:
    model = llama().npu()
    plain = tokens(applied(model, nz="0"))
    assert in_nz(model) == [] and told() == {"weights": 0, "padding": 0, "left": {"LITEBOOST_NZ=0": LAYERS}}
    parameters = dict(model.named_parameters())
    applied(model)
    assert len(in_nz(model)) == LAYERS and not any("embed" in name or "norm" in name for name in in_nz(model))
    assert all(parameters[name] is p for name, p in model.named_parameters())
    # 200 channels take 208, 500 tokens 512; for each layer q, o, k and v, then gate, up and down.
    a_layer = 2 * 128 * 8 + 2 * 64 * 8 + 3 * 192 * 8
    assert told() == {"weights": LAYERS, "padding": 2 * (2 * a_layer + 512 * 208 - 500 * 200), "left": {}}
    assert tokens(model) == plain
    torch.ops.liteboost._npu_forget_counts()
    with recording() as trace:
        assert tokens(model) == plain
    assert trace.ops.count("aclnnMatmulWeightNz") == 6 * LAYERS
    assert not {"aclnnMm", "Identity", "aclnnNpuFormatCast"} & set(trace.ops)
    ours = ("linear", "gated_linear")
    served = [(op, why) for op, why, _ in native_npu.calls() if op in ours]
    assert served == [("gated_linear", ""), ("linear", "")]
    liteboost_adaptor.undo(model)
    assert in_nz(model) == [] and tokens(model) == plain
    assert all(parameters[name] is p for name, p in model.named_parameters())


def test_a_weight_that_latent_attention_reads_in_parts_stays() -> None:
    """One that the user has cast is not read so: the op refuses, and the original runs."""
    op = "_npu_latent_attention"
    model = deepseek(2).half().requires_grad_(False)
    plain = tokens(applied(model, nz="0"))
    torch.ops.liteboost._npu_forget_counts()
    assert tokens(applied(model)) == plain
    assert in_nz(model) and not any("kv_b_proj" in name for name in in_nz(model))
    assert (op in {name for name, _, _ in native_npu.calls()}) != is_310p()
    with npu_format.internal.allowed():
        weight = model.model.layers[0].self_attn.kv_b_proj.weight
        weight.data = cast(weight.data, FRACTAL_NZ)
    assert tokens(model) == plain


def test_auto_casts_on_a_310p_only() -> None:
    model = applied(llama().npu(), nz="auto")
    if is_310p():
        assert told()["weights"] == LAYERS
    else:
        assert told()["left"] == {"no gain is known on this SoC; LITEBOOST_NZ=1 casts": LAYERS}
        assert in_nz(model) == []


def test_biases() -> None:
    model = llama(attention_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    model.npu()
    plain = tokens(applied(model, nz="0"))
    applied(model)
    if is_310p():
        assert told()["left"] == {"FRACTAL_NZ with a bias on a 310P": 8}
    with recording() as trace:
        assert tokens(model) == plain
    assert trace.ops.count("aclnnAddmm" if is_310p() else "aclnnAddmmWeightNz") == 6 * 8


def test_when_it_is_cast() -> None:
    model = applied(llama())
    assert told()["left"] == {"on device cpu": LAYERS}
    model.npu()
    assert len(in_nz(model)) == LAYERS
    addresses = [p.data_ptr() for p in model.parameters()]
    model.to("npu").half().eval()  # nothing to do
    assert [p.data_ptr() for p in model.parameters()] == addresses and len(in_nz(model)) == LAYERS
    model.requires_grad_(True)
    assert in_nz(model) == []
    assert told()["left"] == {"requires grad: model.requires_grad_(False) lets it be cast": LAYERS}
    model.requires_grad_(False)
    assert len(in_nz(model)) == LAYERS
    model.to("cpu")
    assert told() == {"weights": 0, "padding": 0, "left": {"on device cpu": LAYERS}}
    assert same(model, llama())
    model.float().npu()
    assert in_nz(model) == [] and told()["left"] == {"dtype float32": LAYERS}
    model.half()
    assert len(in_nz(model)) == LAYERS


def test_a_model_bound_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    liteboost_adaptor.apply(level=1, nz="1")
    model = llama().npu()
    model(torch.tensor([[3, 4]]).npu())
    assert len(in_nz(model)) == LAYERS
    liteboost_adaptor.undo()
    assert in_nz(model) == []


def _saved(model: nn.Module, folder: Path) -> dict[str, bytes]:
    model.save_pretrained(folder)
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"torch": state.getvalue(), "safetensors": save(dict(model.state_dict()))}


def test_what_is_saved_is_what_was_saved_without_us(tmp_path: Path) -> None:
    model = llama().npu()
    original = llama().npu()
    shapes = {name: (t.shape, t.dtype, t.stride()) for name, t in original.state_dict().items()}
    applied(model)
    assert in_nz(model)
    assert {name: (t.shape, t.dtype, t.stride()) for name, t in model.state_dict().items()} == shapes
    assert same(model, original)
    ours, theirs = _saved(model, tmp_path / "ours"), _saved(original, tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and {"model.safetensors", "config.json"} <= ours.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert len(in_nz(model)) == LAYERS
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float16).npu()
    assert tokens(again) == tokens(model)
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    assert in_nz(loaded) == [] and tokens(loaded) == tokens(model)


def test_copies() -> None:
    model = applied(llama().npu())
    expected = tokens(model)
    other = copy.deepcopy(model)
    assert same(model, other)
    assert tokens(applied(other)) == expected and len(in_nz(other)) == LAYERS
    liteboost_adaptor.undo(model)
    assert in_nz(model) == [] and len(in_nz(other)) == LAYERS
    assert tokens(model) == tokens(other) == expected
    liteboost_adaptor.undo(other)
    assert in_nz(other) == [] and tokens(other) == expected


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_it(assign: bool) -> None:
    model = applied(llama().npu())
    torch.manual_seed(1)
    other = LlamaForCausalLM(model.config).half().eval().requires_grad_(False).npu()
    wanted = tokens(applied(other, nz="0"))
    assert tokens(model) != wanted
    model.load_state_dict({name: t.clone() for name, t in other.state_dict().items()}, assign=assign)
    assert tokens(model) == wanted and len(in_nz(model)) == LAYERS
    assert same(model, other)


class Reads(nn.Module):
    """Two layers that are called, of which one's weight is read as well."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.called, self.absorbed = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x) + self.absorbed(x) + self.absorbed.weight.sum()


class Called(nn.Module):
    """One layer, called."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _left(model: nn.Module) -> dict[str, int]:
    applied(model.half().eval().requires_grad_(False).npu())
    return told()["left"]


def test_a_weight_that_the_model_reads_stays() -> None:
    model = Reads()
    for layer in (model.called, model.absorbed):
        layer.bias = None
    assert _left(model) == {"the model reads the weight itself": 1}
    assert in_nz(model) == ["called.weight"]


def test_a_tied_weight_stays() -> None:
    model = llama(tie_word_embeddings=True)
    assert _left(model) == {"shared with another module": 1}
    assert "lm_head.weight" not in in_nz(model)


def _hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Linear(32, 32, bias=False)] * 2, "shared with another module"),
        ([_hooked(nn.Linear(32, 32, bias=False))], "a hook on the module"),
        ([nn.Linear(32, 1, bias=False)], "FRACTAL_NZ with one row or column"),
    ],
)
def test_reasons(layers: list[nn.Linear], reason: str) -> None:
    model = nn.Sequential(*map(Called, layers))
    assert _left(model) == {reason: len({*layers})}
    assert in_nz(model) == []


def test_views_of_larger_memory_stay() -> None:
    model = Called(nn.Linear(32, 32, bias=False)).half().eval().npu()
    memory = torch.randn(64, 32).half().npu()
    model.inner.weight = nn.Parameter(memory[32:], requires_grad=False)
    applied(model)
    assert told()["left"] == {"a view of other memory": 1} and in_nz(model) == []


def test_what_the_user_has_cast_stays_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().npu()
    torch.npu.config.allow_internal_format = True
    monkeypatch.setattr(npu_format, "internal", InternalFormats())  # as in a process that begins so
    weight = model.lm_head.weight
    weight.data = cast(weight.data, FRACTAL_NZ)
    plain = tokens(applied(model))
    assert told()["left"] == {"cast by the user": 1} and told()["weights"] == LAYERS - 1
    liteboost_adaptor.undo(model)
    assert in_nz(model) == ["lm_head.weight"] and tokens(model) == plain


@pytest.mark.parametrize("option", ["", "enable", "disable"])  # torch_npu 2.9.0 begins with none
def test_a_block_leaves_the_users_option(option: str) -> None:
    from torch_npu import _C as own

    name = "ALLOW_INTERNAL_FORMAT"
    before = own._npu_getOption(name).decode()
    own._npu_setOption({name: option})
    formats = InternalFormats()
    with formats.allowed():
        assert own._npu_getOption(name) == b"enable" and formats.are_the_users is (option == "enable")
    assert own._npu_getOption(name) == option.encode()
    own._npu_setOption({name: before})


def test_a_state_dict_outlives_undo() -> None:
    model = applied(llama().npu())
    state = model.state_dict()
    liteboost_adaptor.undo()
    assert format_of(state["lm_head.weight"]) == FRACTAL_NZ
    for name, tensor in llama().state_dict().items():
        assert torch.equal(state[name].cpu(), tensor) and torch.equal(state[name].clone().cpu(), tensor)


def test_the_status_tells() -> None:
    model = applied(llama().npu())
    text = str(liteboost_adaptor.status(full=True))
    assert f"FRACTAL_NZ: {LAYERS} weights, padding adds {told()['padding']} bytes" in text
    applied(model, nz="0")
    assert f"FRACTAL_NZ: {LAYERS} weights in ND: LITEBOOST_NZ=0" in str(liteboost_adaptor.status(full=True))


@pytest.mark.skipif("NZ_ELSEWHERE" in os.environ, reason="runs there")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--soc", "310P"), marks=pytest.mark.full),
        pytest.param(("--soc", "910C"), marks=pytest.mark.full),
        pytest.param(("--soc", "910B", "--release", "9.1.0"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_elsewhere(options: tuple[str, ...]) -> None:
    lines = simulated(*options, "-m", "pytest", "-q", "-x", __file__, NZ_ELSEWHERE="1")
    assert " passed" in "\n".join(lines)


def test_without_the_operator(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, liteboost_adaptor\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "c = LlamaConfig(hidden_size=64, num_attention_heads=1, num_key_value_heads=1, head_dim=64,\n"
        "                intermediate_size=64, num_hidden_layers=1, vocab_size=64)\n"
        "m = LlamaForCausalLM(c).half().eval().requires_grad_(False).npu()\n"
        "liteboost_adaptor.apply(m, nz='1')\n"
        "print(liteboost_adaptor.status().native['npu']['nz'])\n"
    )
    lines = simulated("--release", "8.1.RC1", program)
    assert lines[-1] == str({"weights": 0, "padding": 0, "left": {"FRACTAL_NZ: not in this CANN": 8}})

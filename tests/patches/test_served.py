"""Bodies that compute what a rule knows, under other names, in other words, from other places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import calls, numbers, planted, processes, state, tiny_models
from torch import nn

import liteboost_adaptor

RENAMED = [
    (planted.NORM_ROW, planted.NORM_ROW.replace("variance", "mean_square")),
    (planted.NORM_VARIANCE, planted.NORM_VARIANCE.replace("variance", "mean_square", 1)),
    (planted.ROPE_Q, planted.ROPE_Q.replace("q_embed", "turned")),
    ("return q_embed, k_embed", "return turned, k_embed"),
    ("LlamaRMSNorm", "ScaleByLength"),
    ("LlamaMLP", "Perceptron"),
    ("LlamaAttention", "Looking"),
    ("LlamaDecoderLayer", "Storey"),
    ("LlamaForCausalLM", "HouseForCausalLM"),
    ("apply_rotary_pos_emb", "turn"),
    ("rotate_half", "quarter_turn"),
]


def renamed_llama(folder: Path) -> nn.Module:
    changes = list(RENAMED)
    # The attribute variance_epsilon is a name the rule reads: it stays.
    changes[0] = (planted.NORM_ROW, planted.NORM_ROW.replace("(variance +", "(mean_square +"))
    return planted.llama(folder, *changes, name="HouseForCausalLM")


def test_renamed_variables_functions_and_classes_are_served_as_listed(tmp_path: Path) -> None:
    model = renamed_llama(tmp_path)
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            found = model(**inputs).logits
    assert numbers.relative(found, expected) <= 2e-5
    assert state.rows().keys() == {"applied"}
    assert served.fallbacks == {}
    original = tiny_models.build("llama")
    liteboost_adaptor.apply(original)
    with calls.served() as plain, torch.no_grad():
        original(**inputs)
    assert served.rules == plain.rules


#: Llama's norm in other words; the same rounding order.
EQUIVALENT = {
    "torch.square": (planted.NORM_VARIANCE, "variance = torch.square(hidden_states).mean(-1, keepdim=True)"),
    "product with itself": (
        planted.NORM_VARIANCE,
        "variance = (hidden_states * hidden_states).mean(-1, keepdim=True)",
    ),
    "power operator": (planted.NORM_VARIANCE, "variance = (hidden_states ** 2).mean(dim=-1, keepdim=True)"),
    "torch.mean": (planted.NORM_VARIANCE, "variance = torch.mean(hidden_states.pow(2), -1, keepdim=True)"),
    "scale first, then the row": (
        planted.NORM_ROW,
        "scale = torch.rsqrt(variance + self.variance_epsilon)\n"
        "        hidden_states = scale * hidden_states",
    ),
    "weight on the right": (planted.NORM_RETURN, "return hidden_states.to(input_dtype) * self.weight"),
    "method of the class": (
        f"{planted.NORM_VARIANCE}\n        {planted.NORM_ROW}\n        {planted.NORM_RETURN}",
        "return self.weight * self._norm(hidden_states).to(input_dtype)\n\n"
        "    def _norm(self, x):\n"
        "        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)",
    ),
    "float()": ("hidden_states = hidden_states.to(torch.float32)", "hidden_states = hidden_states.float()"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", EQUIVALENT)
def test_a_norm_in_other_words_is_proved_and_served(words: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = numbers.cast(planted.llama(tmp_path, EQUIVALENT[words]), dtype)
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model, disable="rope.*,mlp.*,attention.*,linear.*,cache.*")
        with calls.served() as served:
            found = model(**inputs).logits
    assert {row.id for row in state.rows("norm")["proved, not listed"]} == {"norm.rms"}
    assert served.rules.keys() <= {"norm.rms", "norm.residual"} and served.kinds["norm"] == 5
    assert numbers.relative(found, expected) <= (2e-5 if dtype == torch.float32 else 2e-2)


class OtherLlamaNorm(nn.Module):
    """Llama's norm in a library that calls its parts otherwise and has no transformers in it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


def test_a_norm_of_another_library_is_served() -> None:
    model = nn.Sequential(nn.Linear(16, 24), OtherLlamaNorm(24))
    x = torch.randn(5, 16)
    with torch.no_grad():
        expected = model(x)
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            torch.testing.assert_close(model(x), expected)
    assert served.kinds["norm"] == 1
    # nn.Sequential calls its children itself: there is no expression of its own to reroute.
    assert type(model[0]) is nn.Linear


def test_a_model_nothing_fits_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.ReLU(), nn.BatchNorm1d(4)).eval()
    x = torch.randn(2, 3, 5)
    expected = model(x)
    status = liteboost_adaptor.apply(model, strict=True)
    assert torch.equal(model(x), expected)
    assert {row.state for row in status.rules} == {"idle"}


def remote_folder(tmp_path: Path, text: str) -> Path:
    """A checkpoint whose modeling code comes with it."""
    folder = tmp_path / "remote"
    tiny_models.build("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_remote.LlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "modeling_remote.py").write_text(text, encoding="utf-8")
    return folder


REMOTE = """
import json, sys
import liteboost_adaptor
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.arange(64, 76)[None]
with torch.no_grad():
    ours = model(input_ids=ids).logits
    rules = {row.id: [row.state, row.calls] for row in liteboost_adaptor.status().rules if row.targets}
    liteboost_adaptor.undo()
    expected = model(input_ids=ids).logits
error = ((ours - expected).abs().max() / expected.abs().max()).item()
print(json.dumps({"module": type(model).__module__, "rules": rules, "error": error}))
"""


@pytest.mark.parametrize("is_near_miss", [False, True], ids=["known bodies", "a clamp in the norm"])
def test_remote_code_is_served_by_its_bodies(is_near_miss: bool, tmp_path: Path) -> None:
    clamp = (planted.NORM_ROW, f"{planted.NORM_ROW}\n        hidden_states = hidden_states.clamp(-30, 30)")
    folder = remote_folder(tmp_path, planted.llama_text(*([clamp] if is_near_miss else [])))
    found = processes.python_json(REMOTE, str(folder), HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert found["module"].startswith("transformers_modules.")
    assert found["error"] <= 2e-5
    states = {rule: state for rule, (state, _) in found["rules"].items()}
    # For continuous batching, for one more token, and for large tensors.
    waiting = {"paged.sdpa", "paged.eager", "paged.requests", "paged.manager", "step.program"}
    waiting |= {"memory.caching_allocator"}
    served = {"rope.half", "attention.sdpa", "mlp.silu", "linear.call", "cache.append"} | waiting
    if is_near_miss:
        assert states == {**dict.fromkeys(served, "applied"), "norm.*": "refused"}
    else:
        assert states == dict.fromkeys(served | {"norm.rms", "norm.residual"}, "applied")
        assert {rule for rule, (_, calls) in found["rules"].items() if not calls} == waiting

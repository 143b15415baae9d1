"""accelerate's device maps on an NPU: what from_pretrained places, splits and offloads computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import liteboost_adaptor

pytest.importorskip("accelerate")

LAYERS = [f"model.layers.{index}" for index in range(2)]
REST = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


def placed(layers: tuple[Any, Any], rest: Any) -> dict[str, Any]:
    return dict(zip(LAYERS, layers, strict=True)) | dict.fromkeys(REST, rest)


MAPS: dict[str, Any] = {
    "auto": "auto",
    "balanced": "balanced",
    "sequential": "sequential",
    "npu": "npu",
    "npu:1": "npu:1",
    "cuda": "cuda",
    "index": {"": 0},
    "cpu offload": placed((0, "cpu"), 0),
    "cuda and cpu": placed(("cuda:0", "cpu"), "cuda:0"),
    "disk offload": placed((0, "disk"), 0),
    "two NPUs": placed((0, 1), 0),
}


pytestmark = pytest.mark.usefixtures("no_grad", "undone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    place = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS.keys())
def test_a_placed_model_computes_the_same(device_map: Any, level: int, folder: Path, tmp_path: Path) -> None:
    ids = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(1))
    liteboost_adaptor.apply(level=0)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    expected = model(ids).logits
    arguments = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.generate(ids, **arguments)
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(level=level)
    placed_model = LlamaForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=tmp_path
    ).eval()
    here = ids.to(placed_model.model.embed_tokens.weight.device)
    assert any(each.type == "npu" for each in (p.device for p in placed_model.parameters()))
    torch.testing.assert_close(placed_model(here).logits.cpu(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(placed_model.generate(here, **arguments).cpu(), tokens)

"""Caches: static, quantized, offloaded, handed in by the user, and the paged one of ``generate_batch``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import numbers, tiny_models
from support.ways import compare, families

#: The decoding loop compiles only on accelerators; on CPU a static cache runs eagerly.
IMPLEMENTATIONS = ("static", "offloaded", "offloaded_static", "quantized")


class NoStream:
    """Stands for a stream: transformers' offloaded caches ask for one of an accelerator, also on CPU."""

    def wait_stream(self, other: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *fault: Any) -> None:
        pass


@pytest.fixture
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: NoStream())


@pytest.mark.usefixtures("without_streams")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@families("llama", "gpt2", "qwen3", "mixtral", "gpt_neox", "phi3", "olmo2", "cohere")
def test_cache_implementations(family: str, implementation: str, level: int) -> None:
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    settings: dict[str, Any] = {"cache_implementation": implementation}
    if implementation == "quantized":
        settings["cache_config"] = {"backend": "fp8"}  # the one that transformers carries itself
    runs = compare(model, level, lambda: numbers.greedy(model, inputs, steps=6, **settings))
    runs.assert_same_text()
    assert runs.served.kinds["attention"] > 0 and runs.reasons == set()


@pytest.mark.usefixtures("without_streams")
@pytest.mark.parametrize("implementation", ["static", "offloaded"])
@families("gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next")
def test_cache_implementations_of_layers_of_several_kinds(
    family: str, implementation: str, level: int
) -> None:
    """Sliding windows, latent keys, and layers without a key/value cache beside those that have one."""
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    settings = {"cache_implementation": implementation}
    runs = compare(model, level, lambda: numbers.greedy(model, inputs, steps=6, **settings))
    runs.assert_same_text()
    assert runs.served.kinds["attention"] > 0


def groupwise_cache(model: torch.nn.Module) -> Any:
    """A cache whose older entries are held in 4 bits, in groups of 16, as quanto does it."""
    from transformers.cache_utils import Cache, QuantizedLayer

    class FourBits(QuantizedLayer):
        def _quantize(self, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, ...]:
            groups = tensor.reshape(-1, self.q_group_size)
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            step = (high - low).clamp_min(1e-8) / 15
            return ((groups - low) / step).round().to(torch.uint8), step, low, tensor.shape

        def _dequantize(self, q_tensor: tuple[Any, ...]) -> torch.Tensor:
            codes, step, low, shape = q_tensor
            return (codes * step + low).reshape(shape)

    layers = [FourBits(q_group_size=16, residual_length=4) for _ in range(model.config.num_hidden_layers)]
    return Cache(layers=layers)


@families("llama", "gpt2", "qwen3", "mixtral", "gpt_neox", "olmo2")
def test_a_groupwise_quantized_cache_of_the_users(family: str, level: int) -> None:
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model, length=16)

    def run() -> numbers.Greedy:
        return numbers.greedy(model, inputs, steps=6, past_key_values=groupwise_cache(model))

    runs = compare(model, level, run)
    runs.assert_same_text()
    plain = numbers.greedy(model, inputs, steps=6)
    assert numbers.relative(runs.expected.logits, plain.logits) > 1e-4, "nothing was quantized"
    assert runs.served.kinds["attention"] > 0 and runs.reasons == set()


@families("llama", "qwen3", "gptj", "mixtral", "phi3", "gemma3_text", "gpt_oss")
def test_generate_batch(family: str, level: int) -> None:
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = tiny_models.build(family)
    prompts = [[40, 41, 42, 43, 44, 45, 46], [77, 90, 91], [100, 33, 34, 35, 36]]
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)

    def run() -> list[torch.Tensor]:
        paged = ContinuousBatchingConfig(block_size=16, num_blocks=16, max_batch_tokens=32)
        done = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=paged, progress_bar=False
        )
        return [torch.tensor(done[name].generated_tokens) for name in sorted(done)]

    runs = compare(model, level, run)
    assert [len(tokens) for tokens in runs.expected] == [5, 5, 5]
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0 and runs.served.kinds["linear"] > 0
    # Attention over pages has rules of its own from level 2 on. At level 1 modules gather what it reads, and
    # where that is the paged eager one, ours is not asked.
    is_sdpa = model.config._attn_implementation == "sdpa"
    assert runs.reasons == set()
    if level == 2:
        assert runs.served.rules["paged.sdpa" if is_sdpa else "paged.eager"] > 0
        assert runs.served.kinds["attention"] == 0
    else:
        assert runs.served.kinds["paged"] == 0
        assert (runs.served.kinds["attention"] > 0) is is_sdpa

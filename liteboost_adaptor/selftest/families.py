"""Tiny models of 20 families with random weights: each on the CPU, on the device as it is, and served."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "granite"),
    *("gpt2", "gptj", "gpt_neox", "opt", "cohere", "stablelm", "starcoder2", "olmo2", "mixtral", "qwen3_moe"),
)
#: Heads of 128, whose kinds are all listed: by the time a model is run, they have been compared.
SIZES = {
    **{"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 256},
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
#: Where a configuration has other words for it.
OTHERWISE: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 64},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 256},
}
#: Tokens that are generated: more than it takes until steps are recorded and replayed.
NEW_TOKENS = 40
PROMPT = 7
#: How far logits in fp32 may be from the CPU's, over the largest of them; in bf16, how many times as far from
#: them as the original's.
FP32_ALLOWED = 1e-3
BF16_FACTOR = 2.0


def model_of(family: str) -> Any:
    """The same model at every call, in fp32 on the CPU, with weights by which greedy tokens differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZES | OTHERWISE.get(family, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(6.0)
    return model


def generated(model: Any, device: str) -> list[int]:
    """Greedy tokens behind the prompt."""
    ids = prompt().to(device)
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[
        0, PROMPT:
    ].tolist()


def prompt() -> Tensor:
    """Token ids, [1, PROMPT]."""
    return torch.randint(2, 256, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def examine(family: str, device: str) -> tuple[bool, str]:
    """Whether a family computes on a device what it computes on the CPU, and the figures."""
    import liteboost_adaptor

    model = model_of(family)
    exact, expected = _logits(model, "cpu"), generated(model, "cpu")
    model.to(torch.bfloat16).to(device)
    original = _error(_logits(model, device), exact)
    liteboost_adaptor.apply(model, level=2)
    ours = _error(_logits(model, device), exact)
    del model
    model = model_of(family).to(device)
    liteboost_adaptor.apply(model, level=2)
    wide, found = _error(_logits(model, device), exact), generated(model, device)
    same = next((at for at, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None)
    words = (
        "all tokens the CPU's" if same is None else f"token {same} of {NEW_TOKENS} is another than the CPU's"
    )
    figures = f"fp32 error {wide:.1e}, {words}; bf16 error {ours:.1e}, original {original:.1e}"
    return wide <= FP32_ALLOWED and ours <= max(BF16_FACTOR * original, 4 * 2.0**-8), figures


def _logits(model: Any, device: str) -> Tensor:
    return model(prompt().to(device)).logits.float().cpu()


def _error(logits: Tensor, exact: Tensor) -> float:
    error = ((logits - exact).abs().max() / exact.abs().max()).item()
    return error if error == error else float("inf")

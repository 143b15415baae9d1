"""Weight files of real architectures with random values, and the least a forward pass over them must cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

#: name -> (model type, configuration). Shapes of Qwen3-0.6B and Llama-3.2-1B as published.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "llama-1b": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
        },
    ),
    # So narrow that a step costs what is not arithmetic: 28 layers of the host's overhead.
    "narrow-28": (
        "qwen3",
        {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 28,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
            "max_position_embeddings": 8192,
        },
    ),
}


@dataclass(frozen=True)
class Cost:
    """The least one forward pass over a model must read and compute.

    Attributes:
        weight_bytes: All parameters, tied ones once.
        token_bytes: Weights a decode step must read: all but an untied embedding table, of which it needs
            a row, and of routed experts the share that is chosen for one token.
        linear_flops: Matrix products of one token in the layers (two per weight), without the output head.
        head_flops: Matrix product of the output head for one row; ``generate`` needs one row per sequence.
        gemm_shapes: Distinct ``(in_features, out_features)`` of those products.
        windows: For each attention layer how many keys a query may see; ``None`` for all.
        attention_width: Query heads times ``head_dim``.
        kv_width: Key/value heads times ``head_dim``.
        itemsize: Bytes of one element.
        kv_itemsize: Those of one of a key or value in a cache, its scales counted; None: as `itemsize`.
        head_dim: Elements of a key.
    """

    weight_bytes: int
    token_bytes: int
    linear_flops: int
    head_flops: int
    gemm_shapes: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...]
    attention_width: int
    kv_width: int
    itemsize: int
    kv_itemsize: float | None = None
    head_dim: int = 0

    def decode_bytes(self, batch: int, prompt: int, new: int) -> float:
        """Bytes an average decode step of ``generate`` must read: weights once, keys and values of each row.

        The first of ``new`` tokens comes from the prefill; step ``i`` of the rest sees ``prompt + i`` keys.
        """
        steps = range(1, new)
        keys = sum(min(prompt + step, window or prompt + step) for window in self.windows for step in steps)
        itemsize = self.itemsize if self.kv_itemsize is None else self.kv_itemsize
        return self.token_bytes + batch * 2 * self.kv_width * itemsize * keys / len(steps)

    def prefill_flops(self, batch: int, prompt: int) -> float:
        """Floating-point operations of a prefill: layers for every token, visible scores, one head row."""
        scores = sum(_visible(prompt, window) for window in self.windows)
        # Two products (scores, values) of two operations each for every visible pair.
        attention = 4 * self.attention_width * scores
        return batch * (prompt * self.linear_flops + attention + self.head_flops)


def _visible(prompt: int, window: int | None) -> int:
    """Keys that the tokens of a prompt see, all together."""
    begun = min(prompt, window or prompt)
    return begun * (begun + 1) // 2 + (prompt - begun) * begun


@dataclass(frozen=True)
class BenchModel:
    """A folder ``from_pretrained`` can open, and what a pass over it costs."""

    name: str
    folder: Path
    vocab_size: int
    cost: Cost


def prepare(arch: str, dtype_name: str, workdir: Path, seed: int = 0) -> BenchModel:
    """Make ``arch`` ready to be loaded.

    Args:
        arch: A name in `ARCHITECTURES`, or a folder with a ``config.json``. A folder that holds safetensors
            weights is used as it is; otherwise random weights are written to ``workdir``.
        dtype_name: ``float32``, ``bfloat16`` or ``float16``.
        workdir: Where the weight file goes. One written by an earlier call is used again.
        seed: Of the random weights.

    Raises:
        ConfigError: ``arch`` is neither a known name nor such a folder.
    """
    import torch

    dtype = getattr(torch, dtype_name)
    config = _config(arch)
    source = Path(arch)
    cost = count(config, dtype)
    vocab_size = config.get_text_config().vocab_size
    if arch not in ARCHITECTURES and any(source.glob("*.safetensors")):
        return BenchModel(source.resolve().name, source.resolve(), vocab_size, cost)
    name = arch if arch in ARCHITECTURES else source.resolve().name
    folder = workdir / f"{name}-{dtype_name}-seed{seed}"
    if not (folder / "model.safetensors").is_file():
        _write_random(config, dtype, folder, seed)
    return BenchModel(name, folder, vocab_size, cost)


def _config(arch: str) -> PretrainedConfig:
    from transformers import AutoConfig

    if arch in ARCHITECTURES:
        model_type, values = ARCHITECTURES[arch]
        return AutoConfig.for_model(model_type, **values)
    if not (Path(arch) / "config.json").is_file():
        raise ConfigError(
            f"--arch must be {', '.join(ARCHITECTURES)} or a folder with a config.json; found {arch!r}. "
            "Pass the folder of a saved model."
        )
    try:
        return AutoConfig.from_pretrained(arch, local_files_only=True)
    except (OSError, ValueError, json.JSONDecodeError) as fault:
        raise ConfigError(
            f"--arch {arch}: its config.json cannot be read ({fault}). Save it again."
        ) from fault


def _write_random(config: PretrainedConfig, dtype: torch.dtype, folder: Path, seed: int) -> None:
    """Write a model with random weights as one safetensors file, so that workers map the same pages."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomise(model, seed)
    # Written beside and renamed: a run that was interrupted leaves no half a weight file to be used again.
    unfinished = folder.with_name(folder.name + ".unfinished")
    has_progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would write over the benchmark's own
    try:
        model.save_pretrained(unfinished, max_shard_size="1TB")
    finally:
        if has_progress_bar:
            logging.enable_progress_bar()
    unfinished.rename(folder)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every linear layer unit gain.

    The usual initialisation (std 0.02) leaves the residual stream to the embedding: with a tied head such a
    model repeats its last token for ever, and variants would agree whatever their layers compute. With unit
    gain the layers dominate, the text depends on the context, and logits have a spread near one. Vectors
    (norm weights, biases) get a small spread, so that one left out shows.
    """
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                fan_in = module.weight.shape[-1]
                module.weight.normal_(std=fan_in**-0.5, generator=generator)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(
                    torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.05
                )
    model.tie_weights()


def count(config: PretrainedConfig, dtype: torch.dtype) -> Cost:
    """Count what a model of ``config`` costs, without allocating its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    text = config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    weight_bytes = token_bytes = linear_flops = 0.0
    shapes: set[tuple[int, int]] = set()
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        weight_bytes += size
        if parameter is head_weight:
            token_bytes += size
            continue
        if id(parameter) in embeddings:
            continue
        share = chosen_experts(text) if ".experts." in name else 1.0
        token_bytes += size * share
        if parameter.ndim >= 2:
            linear_flops += 2 * parameter.numel() * share
            shapes.add((parameter.shape[-1], parameter.shape[-2]))
    if head_weight is not None:
        shapes.add((head_weight.shape[1], head_weight.shape[0]))
    num_heads = getattr(text, "num_attention_heads", 0) or 0
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // num_heads if num_heads else 0)
    return Cost(
        weight_bytes=int(weight_bytes),
        token_bytes=int(token_bytes),
        linear_flops=int(linear_flops),
        head_flops=0 if head_weight is None else 2 * head_weight.numel(),
        gemm_shapes=tuple(sorted(shapes)),
        windows=tuple(windows(text)),
        attention_width=num_heads * head_dim,
        kv_width=(getattr(text, "num_key_value_heads", None) or num_heads) * head_dim,
        itemsize=dtype.itemsize,
        head_dim=head_dim,
    )


def chosen_experts(config: PretrainedConfig) -> float:
    """The share of the routed experts that one token is given to; 1 where there are none."""
    total = next(
        (
            value
            for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
            if (value := getattr(config, name, None))
        ),
        None,
    )
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / total if total and chosen else 1.0


def windows(config: PretrainedConfig) -> Iterator[int | None]:
    """Keys visible in each attention layer; layers of other kinds (linear, recurrent) keep no keys."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        uses_window = window if getattr(config, "use_sliding_window", True) else None
        yield from [uses_window] * (getattr(config, "num_hidden_layers", 0) or 0)
        return
    for kind in kinds:
        if kind == "full_attention":
            yield None
        elif kind in ("sliding_attention", "chunked_attention"):
            yield window or getattr(config, "attention_chunk_size", None)

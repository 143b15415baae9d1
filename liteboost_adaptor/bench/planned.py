"""What a plan comes to on Ascend cards: memory of a card, and modelled time of a prompt and of a token.

The memory of weights and cache is counted; activations are an estimate from above of what one block has at
once. Times are modelled from the launches of a decode step at level 2 (docs/npu.md) as `modelled` does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, ParallelError
from ..parallel.tensor.plan import HEAD, Layout, ShardingPlan
from ..parallel.tensor.plan_summary import local_nbytes, sent_nbytes
from ..parallel.tensor.quantized import as_plain, world_sizes
from . import models
from .cards import (
    CARDS,
    COMPUTE_EFFICIENCY,
    HOST_LAUNCH_S,
    MEMORY_EFFICIENCY,
    STATIC_S,
    Card,
    all_reduce_seconds,
)
from .sharing import Sharing, exchanged

#: Kernels of a layer for one token (tests/npu/test_launches.py): products and attention, and the others.
_MATMULS, _VECTORS = 5, 5
#: Where a cache is shared out, further ones that bring a partial result, and that join each of the others'.
_BRINGING, _JOINING = 5, 6
#: Of a card's memory, what the runtime and its buffers leave.
USABLE = 0.9


@dataclass(frozen=True)
class Planned:
    """One number of cards; bytes of the card that holds most, seconds as modelled.

    Attributes:
        cards: Processes, each with a card.
        weights, cache, activations: Memory, of a batch of prompts that are as long as the context.
        usable: Memory there is.
        prefill: Time of the prompts.
        device, host: Time of a step on the card, and of launching it.
        exchanging: Of `device`, what the cards spend exchanging.
        batch: Sequences.
    """

    cards: int
    weights: int
    cache: int
    activations: int
    usable: int
    prefill: float
    device: float
    host: float
    exchanging: float
    batch: int

    @property
    def fits(self) -> bool:
        """Whether a card has that much memory."""
        return self.weights + self.cache + self.activations <= self.usable

    @property
    def tokens_s(self) -> float:
        """Tokens a second of all sequences, each step launched by the host."""
        return self.batch / max(self.device, self.host)

    @property
    def captured_tokens_s(self) -> float:
        """The same, replayed from a captured graph."""
        return self.batch / (self.device + HOST_LAUNCH_S)


def planned(
    model: Any,
    how: ShardingPlan,
    layout: Layout,
    device: str,
    context: int,
    batch: int,
    sharing: Sharing = Sharing(),  # noqa: B008 - it is frozen
) -> Planned:
    """The figures of ``how`` for ``model``, which is whole and on the meta device.

    Args:
        layout: That ``how`` was made from.
        device: A name in `CARDS`.
        context: Tokens of each sequence: of the prompt, and what a step sees.
        batch: Sequences.
        sharing: What processes share beside the weights.

    Raises:
        ConfigError: The device is unknown, or a number is below 1.
        ParallelError: As `sharing.exchanged` says.
    """
    if device not in CARDS:
        raise ConfigError(f"--device must be one of {', '.join(CARDS)}; found {device!r}. Choose one.")
    for name, value in (("--context", context), ("--batch", batch)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1; found {value}. Raise it.")
    weights, read = _weights(model, how), _read_a_token(model, how, sharing.rows(batch))
    with as_plain(model):
        return _planned(model, how, layout, CARDS[device], context, batch, sharing, weights, read)


def _planned(
    model: Any,
    how: ShardingPlan,
    layout: Layout,
    card: Card,
    context: int,
    batch: int,
    sharing: Sharing,
    weights: int,
    read: float,
) -> Planned:
    cost = models.count(model.config, model.dtype)
    rows = sharing.rows(batch)
    cache = _cache(model, layout, how, sharing, context, rows)
    read += cache
    layers = model.config.get_text_config().num_hidden_layers
    exchanging = sum(
        all_reduce_seconds(card, rows * nbytes, how.world_size) for nbytes in _brought(model, how)
    )
    matmuls, vectors = layers * _MATMULS, layers * _VECTORS
    exchanges = sum(1 for _ in _brought(model, how))
    prefill = _prefill(model, how, card, cost, context, rows, sharing)
    if sharing.of_tokens > 1:
        of_attention = exchanged(model, layout, how.world_size, sharing, context, rows)
        prefill += layers * of_attention.prompt_seconds(card, sharing, how.world_size)
        exchanging += layers * of_attention.token_seconds(card, sharing, how.world_size)
        exchanges += layers
        vectors += layers * (_BRINGING + _JOINING * (sharing.of_tokens - 1))
    static = matmuls * STATIC_S["matmul"] + vectors * STATIC_S["vector"]
    return Planned(
        cards=how.world_size * sharing.processes,
        weights=weights,
        cache=cache,
        activations=_activations(model, how, rows * sharing.tokens(context), rows),
        usable=int(card.memory_gb * 1e9 * USABLE),
        prefill=prefill,
        device=static + read / (card.bandwidth * MEMORY_EFFICIENCY) + exchanging,
        host=HOST_LAUNCH_S * (matmuls + vectors + exchanges),
        exchanging=exchanging,
        batch=batch,
    )


def over(
    model: Any,
    layout: Layout,
    device: str,
    context: int,
    batch: int,
    most: int,
    expert_parallel: bool = False,
    sharing: Sharing = Sharing(),  # noqa: B008 - it is frozen
) -> list[Planned]:
    """`planned` for weights on one card and on every number up to ``most`` that fits the model."""
    found = []
    for size in (1, *(size for size in world_sizes(model, layout, expert_parallel) if size <= most)):
        try:
            how = layout.plan(size, expert_parallel)
            found.append(planned(model, how, layout, device, context, batch, sharing))
        except ParallelError:  # so many leave no heads to share
            continue
    return found


def _cache(model: Any, layout: Layout, how: ShardingPlan, sharing: Sharing, context: int, rows: int) -> int:
    """Bytes of keys and values of a card. Shared out, a cache keeps all keys of layers with a window."""
    windows = _windows(model)
    if sharing.of_tokens > 1:
        keys = len(windows) * sharing.tokens(context)
    else:
        keys = sum(min(context, window or context) for window in windows)
    share = _share_of_heads(model, layout, how, len(windows))
    return int(rows * keys * cache_width(model, layout) * share * model.dtype.itemsize)


#: Words in the names of layers that keep a state and no keys.
_STATES = ("linear", "mamba", "conv", "recurrent")


def _windows(model: Any) -> list[int | None]:
    """How many tokens each layer that keeps keys keeps them of; None: of all."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        return list(models.windows(text))
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    kept = [kind for kind in kinds if not any(word in kind for word in _STATES)]
    return [window if kind in ("sliding_attention", "chunked_attention") else None for kind in kept]


def cache_width(model: Any, layout: Layout) -> int:
    """Elements that an attention layer keeps of one token."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0) or 0
    if _keeps_latent(model):
        return text.kv_lora_rank + text.qk_rope_head_dim
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    # What was found in the layers says more than the configuration, where they are all alike.
    found = {need.units for need in layout.requirements if need.what == "heads of keys and values"}
    kv_heads = found.pop() if len(found) == 1 else getattr(text, "num_key_value_heads", None)
    return 2 * (kv_heads or heads) * head_dim


def _keeps_latent(model: Any) -> bool:
    """Whether latent attention keeps what all heads have in common."""
    return bool(getattr(model.config.get_text_config(), "kv_lora_rank", None))


def _share_of_heads(model: Any, layout: Layout, how: ShardingPlan, layers: int) -> float:
    """How much of the cache the rank with most keeps."""
    if _keeps_latent(model):
        return 1.0
    of_keys = [need for need in layout.requirements if need.what == "heads of keys and values"]
    needs = of_keys or [need for need in layout.requirements if need.what == "attention heads"]
    if not needs or not layers:
        return 1.0
    sharded = sum(max(1, need.units // how.world_size) / need.units for need in needs)
    return min(1.0, (sharded + max(0, layers - len(needs))) / layers)


def _weights(model: Any, how: ShardingPlan) -> int:
    return max(sum(local_nbytes(model, how, rank).values()) for rank in range(how.world_size))


def _read_a_token(model: Any, how: ShardingPlan, batch: int) -> float:
    """Bytes of weights that rank 0 reads in a step; of experts those that a batch is expected to choose."""
    chosen = models.chosen_experts(model.config.get_text_config())
    some = 1 - (1 - chosen) ** batch
    tables = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    found = 0.0
    parameters = dict(model.named_parameters())
    for name, nbytes in local_nbytes(model, how, 0).items():
        parameter = parameters.get(name)
        if id(parameter) in tables and (head is None or parameter is not head.weight):
            continue
        found += nbytes * (some if ".experts." in name else 1.0)
    return found


def _brought(model: Any, how: ShardingPlan) -> Iterator[float]:
    """Bytes of each exchange for one token; one process makes none."""
    for name, role in how.roles.items() if how.world_size > 1 else ():
        # Logits are put together: half of what a sum of as many bytes as all ranks bring takes.
        yield sent_nbytes(model, how, name, role) * (how.world_size / 2 if role == HEAD else 1)


def _activations(model: Any, how: ShardingPlan, tokens: int, batch: int) -> int:
    """Hidden states three times, all that the layers of the widest block give, and logits, in fp32, too."""
    widths: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or isinstance(_owner(model, name), torch.nn.Embedding):
            continue
        block = name.rpartition(".")[0].rpartition(".")[0]
        widths[block] = widths.get(block, 0) + how.local_shape(name, tuple(parameter.shape), 0)[-2]
    text = model.config.get_text_config()
    widths.pop("", None)  # the head
    widest = 3 * text.hidden_size + max(widths.values(), default=0)
    return tokens * widest * model.dtype.itemsize + batch * text.vocab_size * (model.dtype.itemsize + 4)


def _owner(model: Any, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


def _prefill(
    model: Any, how: ShardingPlan, card: Card, cost: models.Cost, context: int, rows: int, sharing: Sharing
) -> float:
    """Arithmetic of the card that has most of it, and the exchanges of its tokens for sharded weights."""
    peak = card.cube.get(str(model.dtype).removeprefix("torch."), card.cube["float16"])
    layers = rows * context * cost.linear_flops
    head = rows * cost.head_flops
    attention = cost.prefill_flops(rows, context) - layers - head
    own = layers / sharing.of_tokens + attention * sharing.attention_share() + head
    arithmetic = own / how.world_size / (peak * COMPUTE_EFFICIENCY)
    tokens = [
        nbytes * rows * (1 if role == HEAD else sharing.tokens(context))
        for nbytes, role in zip(_brought(model, how), how.roles.values(), strict=False)
    ]
    return arithmetic + sum(all_reduce_seconds(card, nbytes, how.world_size) for nbytes in tokens)


def plot(found: list[Planned], title: str, path: Path) -> None:
    """Draw memory of a card and modelled tokens/s over the number of cards.

    Args:
        found: From `over`.
        path: A ``.png``, ``.svg`` or ``.pdf`` file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    names = [str(each.cards) for each in found]
    below = [0.0] * len(found)
    for part in ("weights", "cache", "activations"):
        heights = [getattr(each, part) / 1e9 for each in found]
        memory.bar(names, heights, bottom=below, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    memory.axhline(found[0].usable / 1e9, color="C3", linestyle="--", label="usable")
    memory.set_ylabel("GB a card")
    memory.legend(fontsize=8)
    speed.plot(names, [each.tokens_s for each in found], marker="o", label="launched by the host")
    speed.plot(names, [each.captured_tokens_s for each in found], marker="o", label="captured graph")
    speed.set_ylabel("tokens/s, modelled")
    speed.set_ylim(bottom=0)
    speed.legend(fontsize=8)
    for axis in (memory, speed):
        axis.set_xlabel("cards")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)

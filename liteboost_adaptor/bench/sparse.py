"""What block-sparse attention gains in time and loses in exactness."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..setting_values import Sparse
from .models import ARCHITECTURES

if TYPE_CHECKING:
    import torch

#: Blocks of the longest text that the loss is measured with, as 8,192 tokens have of 128.
LOSS_BLOCKS = 64
#: The longest text that a model takes, and parts of it: trained may be less than allowed.
LOSS_PARTS = (1, 2, 4)


@dataclass(frozen=True)
class Gain:
    """Block-sparse beside dense attention of one layer's prompt, the choice of blocks included.

    Attributes:
        dense_ms, sparse_ms: Medians of the rounds.
        ratio: The first over the second, round by round, their median.
        selection: Share of the sparse time that the choice of blocks takes.
        density: Share of the visible blocks that is read.
        error: Relative error of the output. The states are random, so that no block matters more than
            another: what is left out is lost as much as it ever can be.
    """

    dense_ms: float
    sparse_ms: float
    ratio: float
    selection: float
    density: float
    error: float


@dataclass(frozen=True)
class Loss:
    """A trained model over a text, each block of it from an empty past.

    Attributes:
        tokens: In a block of the text.
        block: Positions in a block of attention, so that the longest text has `LOSS_BLOCKS` of them.
        dense, sparse: Mean negative log likelihoods of a token, in nats.
        error: Relative error of the logits.
    """

    tokens: int
    block: int
    dense: float
    sparse: float
    error: float


def gain(sparse: Sparse, arch: str, dtype: str, tokens: int, rounds: int) -> Gain:
    """Time both for attention of the shape of ``arch``, in turn.

    Args:
        sparse: How blocks are chosen.
        arch: A name in `models.ARCHITECTURES`.
        dtype: Of the states.
        tokens: Of the prompt.
        rounds: Of each.

    Raises:
        ConfigError: ``arch`` is no such name.
    """
    import torch

    from ..ops.block_selection import select_blocks

    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"--sparse times attention of --arch {', '.join(ARCHITECTURES)}; found {arch!r}. Choose one."
        )
    config = ARCHITECTURES[arch][1]
    dim, scaling = config["head_dim"], config["head_dim"] ** -0.5
    heads = config["num_attention_heads"], *2 * (config["num_key_value_heads"],)
    torch.manual_seed(0)
    # As projections leave them: the heads of a position beside each other.
    query, key, value = (
        torch.randn(1, tokens, n, dim).to(getattr(torch, dtype)).transpose(1, 2) for n in heads
    )
    form = (sparse.sparsity, sparse.block, sparse.sinks, sparse.window, True)
    shape = [sparse.block, sparse.block]
    ops = torch.ops.liteboost
    times: list[tuple[float, float, float]] = []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            begin = perf_counter()
            dense = ops.attention(query, key, value, None, scaling, True)
            middle = perf_counter()
            tables = select_blocks(query, key, *form)
            chosen = perf_counter()
            result = ops.block_sparse_attention(query, key, value, *tables, shape, scaling, True)
            end = perf_counter()
            times.append((middle - begin, end - middle, chosen - middle))
    times = times[1:]  # the first is to warm up
    blocks = -(-tokens // sparse.block)
    return Gain(
        dense_ms=1e3 * median(time for time, _, _ in times),
        sparse_ms=1e3 * median(time for _, time, _ in times),
        ratio=median(one / other for one, other, _ in times),
        selection=median(choice / time for _, time, choice in times),
        density=tables[1].double().mean().item() * blocks / (blocks * (blocks + 1) / 2),
        error=_distance(result, dense),
    )


def losses(sparse: Sparse, folder: Path, text: Path, max_blocks: int | None = None) -> list[Loss]:
    """Evaluate a trained model with dense and with sparse attention, in fp32.

    Args:
        sparse: How blocks are chosen; their size is replaced, see `Loss`.
        folder: Of the model and its tokenizer.
        text: A UTF-8 text file.
        max_blocks: Read only so many blocks of the text; ``None`` for all.

    Returns:
        For the longest text that the model takes, and for `LOSS_PARTS` of it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from .perplexity import tokenize

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    longest = model.config.max_position_embeddings
    block = max(16, longest // LOSS_BLOCKS)
    lengths = [longest // part for part in LOSS_PARTS]
    return [_loss(sparse, model, tokenize(folder, text, n)[:max_blocks], block) for n in lengths]


def _loss(sparse: Sparse, model: torch.nn.Module, blocks: torch.Tensor, block: int) -> Loss:
    import torch

    from ..api import apply, undo
    from .perplexity import evaluate

    details = f"block={block},sinks={sparse.sinks},window={sparse.window},min_length=2"
    found = []
    try:
        for asked in ("0", f"{sparse.sparsity},{details}"):
            apply(model, level=2, sparse=asked)
            with torch.inference_mode():
                logits = model(blocks[:1], use_cache=False).logits
            found.append((evaluate(model, blocks).loss, logits))
    finally:
        undo(model)
    (dense, exact), (lossy, logits) = found
    return Loss(blocks.shape[1], block, dense, lossy, _distance(logits, exact))


def _distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()

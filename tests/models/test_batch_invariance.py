"""Every family with `LITEBOOST_BATCH_INVARIANT`: the bits of a row's logits, however its tokens are grouped.

The oracle of what "the same" means is the model without the package. Where its own logits in fp32 are another
function of how tokens are grouped (states that a chunk does not take up, positions that count padding), there
is nothing to keep. Everywhere else all bits are the same, in fp32 and bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import families, tiny_models

import liteboost_adaptor

#: Tokens of the prompt, and of the longest padding before it.
TOKENS, PADDING, ROWS = 24, 3, 5
#: Relative to the largest logit: what fp32 loses by another order of sums is below, another function above.
SAME_FUNCTION = 3e-4

#: Of Mamba, lightning attention, and the delta rule with a rate for each channel.
STATES = "a state whose prompts transformers computes in blocks"
#: What is not kept, and why. docs/batch_invariance.md says it to users.
NOT_KEPT = {
    **dict.fromkeys(["bailing_hybrid", "falcon_h1", "granitemoehybrid", "jamba"], STATES),
    **dict.fromkeys(["kimi_linear", "minimax", "nemotron_h", "zamba", "zamba2"], STATES),
    "deepseek_v4": "keys that are compressed in groups",
    "hy_v4": "keys of equal scores, of which topk takes others where there are more keys",
    "mpt": "a bias that is counted from the last key",
    "roformer": "positions that count padding",
    "zaya": "torch's own convolution over tokens",
}
#: How many of the ways families have that keep no cache, or none that chunks go on from.
FEWER_WAYS = {
    **dict.fromkeys(["blt", "musicgen", "musicgen_melody", "openai-gpt", "recurrent_gemma"], 2),
    **dict.fromkeys(["reformer", "rwkv", "xlm", "xlnet"], 2),
    **dict.fromkeys(["cpmant", "prophetnet"], 5),
    **dict.fromkeys(["falcon_mamba", "mamba"], 7),
}
WAYS = 8
#: The two that others are measured by.
ALONE, BESIDE = "one by one", "rows, one by one"
Groups = dict[str, Sequence[torch.Tensor]]


def sizes_of(length: int, size: int) -> list[int]:
    return [min(size, length - at) for at in range(0, length, size)]


def logits(
    model: Any, ids: torch.Tensor, sizes: Sequence[int], mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Of all positions of ``ids``, read in parts of these sizes."""
    cache: Any = None
    found, begin = [], 0
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for size in sizes:
            part = slice(begin, begin + size)
            given = {"input_ids": ids[:, part], "past_key_values": cache, "use_cache": True}
            if mask is not None and positions is not None:
                given |= {"attention_mask": mask[:, : begin + size], "position_ids": positions[:, part]}
            output = model(**given)
            cache, begin = output.past_key_values, begin + size
            found.append(output.logits)
    return torch.cat(found, 1)


def padded(model: Any, ids: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Of each row, in a batch whose rows are padded to different lengths; the first has ``TOKENS``."""
    width = TOKENS + PADDING
    row_padding = [PADDING, 0, PADDING - 1, PADDING + 2, 1]
    batch, mask = torch.ones(ROWS, width, dtype=torch.long), torch.zeros(ROWS, width, dtype=torch.long)
    for row, padding in enumerate(row_padding):
        batch[row, padding:] = ids[row, : width - padding]
        mask[row, padding:] = 1
    found = logits(model, batch, sizes_of(width, size), mask)
    return [found[row, padding:] for row, padding in enumerate(row_padding)]


def grouped(model: Any) -> Groups:
    """The logits of each row of tokens by every way to group them, and of what the model refuses none."""
    ids = tiny_models.example_inputs(model, batch=ROWS, length=TOKENS + PADDING)["input_ids"]
    first, width = ids[:1, :TOKENS], ids[:, :TOKENS]
    ways: dict[str, Callable[[], Sequence[torch.Tensor]]] = {
        ALONE: lambda: [*logits(model, first, sizes_of(TOKENS, 1))],
        "in one piece": lambda: [*logits(model, first, [TOKENS])],
        "in chunks": lambda: [*logits(model, first, sizes_of(TOKENS, 7))],
        BESIDE: lambda: [*logits(model, width, sizes_of(TOKENS, 1))],
        "rows, in chunks": lambda: [*logits(model, width, sizes_of(TOKENS, 7))],
        "padded, in one piece": lambda: padded(model, ids, TOKENS + PADDING),
        "padded, one by one": lambda: padded(model, ids, 1),
        "padded, in chunks": lambda: padded(model, ids, 7),
    }
    found = {}
    for way, run in ways.items():
        try:
            found[way] = run()
        except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError, IndexError):
            continue  # the model has no such way; the test compares which it has
    return found


def batches(model: Any) -> Groups:
    """Of models that keep no cache: a row alone, and in a batch."""
    inputs = tiny_models.example_inputs(model, batch=ROWS, length=12)
    rows = len(inputs["input_ids"]) // ROWS  # a row for each codebook

    def first(value: Any) -> Any:
        return value[: len(value) // ROWS] if isinstance(value, torch.Tensor) else value

    alone = {name: first(value) for name, value in inputs.items()}
    with torch.no_grad():
        return {ALONE: [model(**alone).logits], "rows, in one piece": [model(**inputs).logits[:rows]]}


def ways_of(model: Any) -> Groups:
    found = grouped(model)
    return found if ALONE in found else batches(model)


def differing(found: Groups, limit: float) -> dict[str, float]:
    """Ways whose logits are farther from those of single tokens than ``limit`` of the largest.

    Of the first row these are alone; of the others in a batch, in which the first has to have its own.
    """
    expected = [*found[ALONE], *found.get(BESIDE, [])[1:]]

    def distance(row: torch.Tensor, same: torch.Tensor) -> float:
        tokens = min(len(row), len(same))
        if not tokens or row.shape[1:] != same.shape[1:]:
            return torch.inf
        far = (row[:tokens].float() - same[:tokens].float()).abs().max()
        return float(far / same.float().abs().max())

    distances = {way: max(map(distance, rows, expected)) for way, rows in found.items()}
    return {way: far for way, far in distances.items() if not far <= limit}


@pytest.mark.full
@pytest.mark.parametrize("family", families.buildable())
def test_bits_of_a_row_do_not_depend_on_what_comes_with_it(family: str) -> None:
    with torch.no_grad():
        model = tiny_models.build(family).eval()
    plain = ways_of(model)
    assert len(plain) == FEWER_WAYS.get(family, WAYS)
    undefined = differing(plain, SAME_FUNCTION)
    kept, lost = 0, {}
    for dtype in (torch.float32, torch.bfloat16):
        model = families.cast(tiny_models.build(family).eval(), dtype)
        liteboost_adaptor.apply(model, batch_invariant=True)
        found = ways_of(model)
        assert found.keys() == plain.keys(), "every way that the model has without us, and no other"
        lost |= {(dtype, way): far for way, far in differing(found, 0.0).items() if way not in undefined}
        kept += len(found) - 1
        liteboost_adaptor.undo(model)
    assert kept
    if family in NOT_KEPT:
        assert lost, f"{family} keeps its bits: it is listed as {NOT_KEPT[family]}"
    else:
        assert not lost, lost


def test_families_that_are_not_kept_are_families() -> None:
    assert NOT_KEPT.keys() <= set(families.buildable())

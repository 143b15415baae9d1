"""How many worker processes fit in memory at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError

#: What a worker holds beside weights: interpreter, libraries, activations.
OVERHEAD_BYTES = 800 << 20


def plan_groups(
    variants: Sequence[str], baseline: str, weight_bytes: int, budget: int
) -> list[tuple[str, ...]]:
    """Split ``variants`` into groups that fit in memory, the baseline in each.

    The weight file is mapped and its pages shared, but a variant may keep a private copy of every weight
    (merged or repacked), so each is counted as if it did.

    Args:
        variants: Names, the baseline among them.
        baseline: The one every other is compared to, round by round.
        weight_bytes: Of one model.
        budget: Bytes that may be used.

    Raises:
        ConfigError: The baseline and one variant do not fit together.
    """
    each = weight_bytes + OVERHEAD_BYTES
    capacity = max(budget, 0) // each
    others = [name for name in variants if name != baseline]
    if capacity >= len(variants):
        return [tuple(variants)]
    if capacity < min(2, len(variants)):
        raise ConfigError(
            f"a benchmark of this model needs {min(2, len(variants)) * each / 1e9:.1f} GB of memory; found "
            f"{max(budget, 0) / 1e9:.1f} GB free. Close other programs, or choose another --arch or --dtype."
        )
    size = capacity - 1
    chunks = [others[start : start + size] for start in range(0, len(others), size)]
    return [tuple(name for name in variants if name == baseline or name in chunk) for chunk in chunks]

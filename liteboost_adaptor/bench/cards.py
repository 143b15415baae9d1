"""What is known of Ascend cards: peaks, memory, links, and what a kernel and a launch cost.

Modelled figures rest on these. None of them was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA, TEBI = 1e12, 2.0**40


@dataclass(frozen=True)
class Link:
    """Between two cards, one direction: bytes/s and seconds before the first byte."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Card:
    """One Ascend card (or die), as msmodeling's device profiles describe it.

    Attributes:
        cube: Peak of the matrix units in FLOP/s by dtype.
        vector: Peak of the vector units in FLOP/s, 16 bit.
        bandwidth: Of its memory, bytes/s.
        memory_gb: Its memory.
        near: All links of a card together to those it is directly connected with.
        far: Its link to others.
        connected: How many cards are directly connected.
    """

    cube: dict[str, float]
    vector: float
    bandwidth: float
    memory_gb: int
    near: Link = Link(196e9, 0.5e-6)
    far: Link = Link(25e9, 1.5e-6)
    connected: int = 8


#: Peaks and links from msmodeling's tensor_cast/device.py, whose authors call latencies and static costs
#: unconfirmed.
CARDS = {
    "910B": Card(
        {"float16": 376 * TERA, "bfloat16": 353.9 * TERA, "int8": 752 * TERA, "float32": 99.5 * TERA},
        22 * TERA,
        1.6 * TEBI,
        64,
    ),
    "910B-280T": Card(
        {"float16": 280 * TERA, "bfloat16": 245.8 * TERA, "int8": 560 * TERA, "float32": 75 * TERA},
        16 * TERA,
        1.6 * TEBI,
        64,
    ),
    "910C": Card(
        {"float16": 376 * TERA, "bfloat16": 353.9 * TERA, "int8": 752 * TERA, "float32": 99.5 * TERA},
        22 * TERA,
        1.6 * TEBI,
        64,
        far=Link(196e9, 5.5e-6),
        connected=16,
    ),
}
COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, LINK_EFFICIENCY = 0.7, 0.6, 0.7
#: Seconds a kernel takes before it does anything, by its unit.
STATIC_S = {"matmul": 5e-6, "vector": 2e-6, "collective": 10e-6}
#: Seconds of the host for one eager launch: 25.0 to 13.7 us were saved by fusing two into one (vllm-ascend
#: pull request 15902, a 950); 11 to 14 us is what the reference infers from it.
HOST_LAUNCH_S = 12.5e-6


def all_reduce_seconds(card: Card, nbytes: float, cards: int, spread: int = 0) -> float:
    """Modelled time of an all-reduce of ``nbytes`` on every card: each sends nearly twice as many.

    Args:
        spread: Among how many cards these are spread out; 0: among no others.
    """
    return send_seconds(card, 2 * nbytes * (cards - 1) / cards, spread or cards) if cards > 1 else 0.0


def send_seconds(card: Card, nbytes: float, spread: int) -> float:
    """Modelled time in which every card sends ``nbytes`` to others that ``spread`` cards are spread over."""
    link = card.near if spread <= card.connected else card.far
    return STATIC_S["collective"] + link.latency + nbytes / (link.bandwidth * LINK_EFFICIENCY)

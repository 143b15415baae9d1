"""What a benchmark is asked to measure."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ..errors import ConfigError

#: The variant all ratios and comparisons refer to.
BASELINE = "hf-sdpa"
VARIANTS = ("hf-eager", BASELINE, "level0", "level1", "level2")
#: Level 2 with weights quantized as they are loaded; run where they are asked for.
QUANTISED = ("w8a16", "w4a16", "w8a8", "w4a8", "kv8", "w8a16+kv8", "w4a16+kv8", "w8a8+kv8", "w4a8+kv8")
#: Of these, the ones that round what they compute, too: activations, or keys and values.
ROUNDING = ("w8a8", "w4a8", "kv8", "w8a16+kv8", "w4a16+kv8", "w8a8+kv8", "w4a8+kv8")
#: And those whose cache keeps integers.
INT8_CACHES = ("kv8", "w8a16+kv8", "w4a16+kv8", "w8a8+kv8", "w4a8+kv8")
#: Behind the name of a variant whose model is sharded over processes; their number follows.
SHARDED = "-tp"
DTYPES = ("float32", "bfloat16", "float16")

_LEAST = {"prompt": 1, "new": 2, "batch": 1, "repeats": 1, "threads": 1, "tp": 1}


def sharded(processes: int) -> tuple[str, ...]:
    """The variants whose model is sharded over so many processes: transformers' own way, and ours."""
    return (f"hf{SHARDED}{processes}", f"level2{SHARDED}{processes}") if processes > 1 else ()


def processes(variant: str) -> int:
    """How many processes a variant runs in."""
    return int(variant.rpartition(SHARDED)[2]) if SHARDED in variant else 1


def usable_cores() -> int:
    """Cores this process may run on, which containers and ``taskset`` make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        arch: A name in `models.ARCHITECTURES` or the folder of a model.
        dtype: Of weights and activations, one of `DTYPES`.
        prompt: Tokens of the prompt, per sequence.
        new: Tokens generated, per sequence; the first comes from the prefill, so at least 2.
        batch: Sequences.
        variants: Names in `VARIANTS` and `QUANTISED`, and those of `sharded`; the baseline is always added.
        repeats: Rounds per variant.
        threads: Threads of a variant; by default every core this process may use. Processes among which a
            model is sharded share them.
        tp: Processes of the sharded variants.
        seed: Of weights and prompt.
        read_bytes: Size of the buffer the read bandwidth is measured over.
        gemm_size: Size of the square matrix product among those of the GEMM peak.

    Raises:
        ConfigError: A value is not allowed.
    """

    arch: str
    dtype: str = "bfloat16"
    prompt: int = 128
    new: int = 32
    batch: int = 1
    variants: tuple[str, ...] = VARIANTS
    repeats: int = 5
    threads: int = field(default_factory=usable_cores)
    tp: int = 1
    seed: int = 0
    read_bytes: int = 2 << 30
    gemm_size: int = 4096

    def __post_init__(self) -> None:
        known = VARIANTS + QUANTISED + sharded(self.tp)
        unknown = [name for name in self.variants if name not in known]
        if unknown or not self.variants:
            found = ", ".join(map(repr, unknown)) or "none"
            raise ConfigError(
                f"--variants may be {', '.join(known)}; found {found}. Separate them by commas."
            )
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"--dtype must be one of {', '.join(DTYPES)}; found {self.dtype!r}. Choose one."
            )
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"--{name} must be at least {least}; found {getattr(self, name)}. Raise it."
                )
        if self.threads % self.tp:
            raise ConfigError(
                f"--tp {self.tp} processes share --threads {self.threads} evenly, or they would not use the "
                "same cores. Choose a multiple of --tp."
            )
        asked = {*self.variants, BASELINE}
        object.__setattr__(self, "variants", tuple(name for name in known if name in asked))

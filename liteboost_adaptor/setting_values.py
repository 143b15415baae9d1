"""Settings that are more than a word, as they are written: LITEBOOST_SPARSE, LITEBOOST_QUANT and the like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Least values of what may follow the share in LITEBOOST_SPARSE.
_SPARSE_DETAILS = {"block": 16, "sinks": 0, "window": 1, "min_length": 2}
QUANT_SCHEMES = ("w8a16", "w4a16", "w8a8", "w4a8")
#: Of 4 bits, in groups.
W4_SCHEMES = ("w4a16", "w4a8")
QUANT_GROUPS = (32, 64, 128)
QUANT_HEADS = (8, 16)
_QUANT_DETAILS = {"group": QUANT_GROUPS, "head": QUANT_HEADS}
#: What keys and values of the cache may be, and what says so in the name of a scheme, alone or behind ``+``.
INT8 = "int8"
KV8 = "kv8"
#: What LITEBOOST_SPECULATE may be beside the folder of a draft model: candidates are looked up in the text.
LOOKUP = "lookup"


@dataclass(frozen=True)
class Sparse:
    """Block-sparse attention of long prompts; see docs/sparse_attention.md.

    Attributes:
        sparsity: Share of the blocks of keys that is not read, above 0 and below 1.
        block: Positions in a block.
        sinks: Blocks at the beginning that are always read.
        window: Blocks up to a query's own that are always read.
        min_length: Tokens of the shortest prompt that is served.
    """

    sparsity: float
    block: int = 128
    sinks: int = 1
    window: int = 2
    min_length: int = 4096

    def spelled(self) -> str:
        """As it is written in LITEBOOST_SPARSE."""
        details = [f"{name}={getattr(self, name)}" for name in _SPARSE_DETAILS]
        return ",".join([str(self.sparsity), *details])


@dataclass(frozen=True)
class Quant:
    """Weights of linear layers, or keys and values of the cache, as integers; see docs/quantization.md.

    Attributes:
        scheme: ``"w8a16"``, ``"w4a16"``, ``"w8a8"`` or ``"w4a8"``; empty: weights stay.
        group: Weights that share a scale, of 4 bits.
        symmetric: Without zero points.
        head: Bits of the output layer: 8, or 16 for as it is.
        kv_cache: ``"int8"``, or empty: keys and values stay.
    """

    scheme: str
    group: int = 32
    symmetric: bool = True
    head: int = 8
    kv_cache: str = ""

    def spelled(self) -> str:
        """As it is written in LITEBOOST_QUANT."""
        details = [f"head={self.head}"] if self.scheme else []
        if self.scheme == "w4a16":
            details += [f"group={self.group}", *([] if self.symmetric else ["asymmetric"])]
        named = "+".join(part for part in (self.scheme, KV8 if self.kv_cache else "") if part)
        return ",".join([named, *details])


def sparse(text: str) -> Sparse | None:
    """What a value of LITEBOOST_SPARSE says; a `ValueError` where it is none."""
    share, *details = (part.strip() for part in text.split(","))
    sparsity = float(share)
    if not 0 <= sparsity < 1:
        raise ValueError(f"{share} is not a share")
    given: dict[str, int] = {}
    for detail in details:
        name, _, value = (part.strip() for part in detail.partition("="))
        if name not in _SPARSE_DETAILS or name in given:
            raise ValueError(f"{detail!r} is none of the details, or there twice")
        given[name] = int(value)
        if given[name] < _SPARSE_DETAILS[name]:
            raise ValueError(f"{name} is at least {_SPARSE_DETAILS[name]}")
    return Sparse(sparsity, **given) if sparsity else None


def split_scheme(text: str) -> tuple[str, str]:
    """(scheme of weights, `INT8` or empty) of ``"w4a16"``, ``"w4a16+kv8"`` or ``"kv8"``."""
    weights, plus, cache = text.rpartition("+")
    if cache == KV8 and bool(weights) == bool(plus):
        return weights, INT8
    return text, ""


def quant(text: str) -> Quant | None:
    """What a value of LITEBOOST_QUANT says; a `ValueError` where it is none."""
    named, *details = (part.strip() for part in text.split(","))
    if named in ("", "0"):
        return None
    scheme, kv_cache = split_scheme(named)
    if scheme not in QUANT_SCHEMES and (scheme or not kv_cache):
        raise ValueError(f"{scheme!r} is no scheme")
    given: dict[str, Any] = {"kv_cache": kv_cache}
    for detail in details:
        name, _, value = (part.strip() for part in detail.partition("="))
        if detail == "asymmetric" and scheme in W4_SCHEMES:
            given["symmetric"] = False
        elif (
            name not in _QUANT_DETAILS
            or name in given
            or not scheme
            or (name == "group" and scheme not in W4_SCHEMES)
        ):
            raise ValueError(f"{detail!r} is none of the details of {named}, or there twice")
        else:
            given[name] = int(value)
            if given[name] not in _QUANT_DETAILS[name]:
                raise ValueError(f"{name} is one of {', '.join(map(str, _QUANT_DETAILS[name]))}")
    return Quant(scheme, **given)


def speculate(text: str) -> str:
    """What a value of LITEBOOST_SPECULATE says: nothing, `LOOKUP`, or the absolute path of a draft model."""
    value = text.strip()
    if value.lower() in ("", "0", "off"):
        return ""
    if value.lower() == LOOKUP:
        return LOOKUP
    folder = Path(value).absolute()  # the process may go to another folder before the model is loaded
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"no model in that folder: {folder} has no config.json")
    return str(folder)

"""Checkpoints with one thing wrong: each key of a configuration, each kind of tensor."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

#: Values that stand in the place of any other.
_VALUES = (None, "text", "", [], ["text"], {}, {"text": 1}, 0, -5, 1, 2, 3, 5, 2.5, 10**12, True, False)
#: And strings that mean something elsewhere.
_WORDS = ("gptq", "gptq_v2", "marlin", "awq", "gemm", "gemv", "compressed-tensors", "liteboost", "group")
_WORDS += (
    "channel",
    "tensor",
    "float",
    "int",
    "pack-quantized",
    "int-quantized",
    "w8a16",
    "w4a16",
    "w8a8",
    "w4a8",
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32)


@dataclass(frozen=True)
class Checkpoint:
    """A folder, in memory.

    Attributes:
        values: What ``config.json`` says.
        metadata: Of the file with the tensors.
    """

    name: str
    values: dict[str, Any]
    tensors: Tensors
    metadata: dict[str, str]

    @classmethod
    def read(cls, name: str, folder: Path) -> Checkpoint:
        """The checkpoint in ``folder``, of one file."""
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            metadata = dict(file.metadata())
        return cls(name, json.loads((folder / "config.json").read_text()), tensors, metadata)

    def write(self, folder: Path) -> None:
        """Write it."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: value.contiguous() for key, value in self.tensors.items()},
            folder / "model.safetensors",
            metadata=self.metadata,
        )
        (folder / "config.json").write_text(json.dumps(self.values))

    def with_tensor(self, name: str, value: torch.Tensor) -> Checkpoint:
        """With another tensor."""
        return replace(self, tensors=self.tensors | {name: value})


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        subject: The key of the configuration or the tensor that it concerns.
        is_valid: Whether what results is as good a checkpoint, whose numbers are others, rightly.
        write: Writes it into a folder.
    """

    name: str
    subject: str
    is_valid: bool
    write: Callable[[Path], None]


def of(base: Checkpoint, has_checksums: bool = False) -> Iterator[Mutant]:
    """All mutants of a checkpoint.

    Args:
        has_checksums: Whether values that a format allows are found out nevertheless.
    """
    yield from _of_config(base)
    layer = "model.layers.0.mlp.up_proj"
    for name in base.tensors:
        if name.startswith(layer) or name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
            yield from _of_tensor(base, name, has_checksums)
    yield from _of_file(base)


def _paths(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _changed(base: Checkpoint, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Checkpoint:
    values = copy.deepcopy(base.values)
    owner: Any = values
    for key in path[:-1]:
        owner = owner[key]
    change(owner, path[-1])
    return replace(base, values=values)


def _of_config(base: Checkpoint) -> Iterator[Mutant]:
    for path in [(), *_paths(base.values["quantization_config"])]:
        full = ("quantization_config", *path)
        said = ".".join(map(str, full))
        now = _at(base.values, full)
        others = [*_VALUES, *_WORDS]
        if isinstance(now, int) and not isinstance(now, bool):
            others += [now + 1, now - 1, 2 * now, str(now), float(now), [now]]
        made = _changed(base, full, lambda owner, key: owner.pop(key))
        yield Mutant(f"{base.name}: without {said}", said, _means_another(path, None), made.write)
        for other in others:
            if other == now and type(other) is type(now):
                continue
            made = _changed(base, full, lambda owner, key, other=other: owner.__setitem__(key, other))
            name = f"{base.name}: {said} = {other!r}"
            yield Mutant(name, said, _means_another(path, other), made.write)


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _means_another(path: tuple[Any, ...], value: Any) -> bool:
    """Whether a key says how stored bits are meant, which nothing else in the checkpoint says."""
    return path == ("checkpoint_format",) and value in ("gptq", "gptq_v2", None, "")


def _of_tensor(base: Checkpoint, name: str, has_checksums: bool) -> Iterator[Mutant]:
    tensor = base.tensors[name]

    def mutant(what: str, made: Checkpoint, is_valid: bool = False) -> Mutant:
        return Mutant(f"{base.name}: {name} {what}", name, is_valid and not has_checksums, made.write)

    without = {key: value for key, value in base.tensors.items() if key != name}
    yield mutant("deleted", replace(base, tensors=without))
    yield mutant("renamed", replace(base, tensors=without | {f"{name}_": tensor}))
    owner, _, part = name.rpartition(".")
    yield mutant("of another layer", replace(base, tensors=without | {f"{owner}_2.{part}": tensor}))
    is_plain = part in ("bias",) or name == "model.norm.weight"
    for dtype in _DTYPES:
        if dtype != tensor.dtype:
            same = torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
            # Other floating point is rounded where its range ends, as in any checkpoint.
            is_valid = dtype.is_floating_point and tensor.is_floating_point() and not same
            yield mutant(f"as {dtype}", base.with_tensor(name, tensor.to(dtype)), is_valid or is_plain)
    for what, value in _shapes(tensor):
        yield mutant(what, base.with_tensor(name, value))
    for what, value, is_valid in _values(tensor, part):
        if not torch.equal(value, tensor):
            yield mutant(what, base.with_tensor(name, value), is_valid or is_plain)


def _shapes(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "flat", tensor.reshape(-1)[:-1] if tensor.dim() == 1 else tensor.reshape(-1)
    yield "of one more dimension", tensor[None]
    yield "a scalar", tensor.reshape(-1)[0].clone()
    yield "empty", tensor[:0]
    yield "short", tensor[:-1]
    yield "long", torch.cat([tensor, tensor[-1:]])
    if tensor.dim() == 2:
        yield "narrow", tensor[:, :-1]
        yield "wide", torch.cat([tensor, tensor[:, -1:]], dim=1)
        if tensor.shape[0] != tensor.shape[1]:
            yield "transposed", tensor.t()


def _values(tensor: torch.Tensor, part: str) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(what, value, whether it is as good as before)."""
    rng = torch.Generator().manual_seed(0)
    flat = tensor.reshape(-1)

    def one(value: float) -> torch.Tensor:
        changed = flat.clone()
        changed[len(flat) // 2] = value
        return changed.reshape(tensor.shape)

    if tensor.is_floating_point():
        for value in (float("nan"), float("inf"), float("-inf"), 0.0):
            yield f"all {value}", torch.full_like(tensor, value), False
            yield f"one {value}", one(value), False
        yield "negated", -tensor, False
        yield "one negated", one(-flat[len(flat) // 2].item()), False
        yield "doubled", tensor * 2, True
        yield "shuffled", flat[torch.randperm(len(flat), generator=rng)].reshape(tensor.shape), True
        return
    limits = torch.iinfo(tensor.dtype)
    is_index = part in ("g_idx", "weight_g_idx", "columns", "weight_shape")
    for value in (limits.min, limits.max, 0, 1):
        # Any pattern of packed bits is integers.
        yield f"all {value}", torch.full_like(tensor, value), not is_index
        yield f"one {value}", one(value), not is_index
    permuted = flat[torch.randperm(len(flat), generator=rng)].reshape(tensor.shape)
    yield "shuffled", permuted, part != "weight_shape"
    yield "backwards", tensor.flip(0), part != "weight_shape"


def _of_file(base: Checkpoint) -> Iterator[Mutant]:
    def mutant(what: str, change: Callable[[bytearray], bytes | bytearray]) -> Mutant:
        def write(folder: Path) -> None:
            base.write(folder)
            path = folder / "model.safetensors"
            path.write_bytes(change(bytearray(path.read_bytes())))

        return Mutant(f"{base.name}: file {what}", "model.safetensors", False, write)

    yield mutant("empty", lambda content: b"")
    yield mutant("of seven bytes", lambda content: content[:7])
    yield mutant("without its end", lambda content: content[:-40])
    yield mutant("with a header only", lambda content: content[: 8 + int.from_bytes(content[:8], "little")])
    yield mutant("with a long header", lambda content: b"\xff" * 8 + content[8:])
    for header in ("[]", "3", '{"a": 3}', '{"a": {"dtype": "I32"}}', "{", '{"__metadata__": [], "a": null}'):
        text = header.encode().ljust(64)
        yield mutant(
            f"with the header {header}", lambda content, text=text: (64).to_bytes(8, "little") + text
        )
    for old, new in (
        (b'"shape":[', b'"shape":"'),
        (b'"dtype":"I32"', b'"dtype":"I99"'),
        (b'"data_offsets":[0,', b'"data_offsets":[9,'),
        (b'"F16"', b'"I16"'),
    ):
        yield mutant(f"{new!r} for {old!r}", lambda content, old=old, new=new: content.replace(old, new, 1))


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Some of them."""
    return random.Random(seed).sample(mutants, min(count, len(mutants)))

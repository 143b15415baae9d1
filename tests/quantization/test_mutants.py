"""Checkpoints with one thing wrong: an error that says what, or the same numbers."""

from __future__ import annotations

import collections
import functools
import json
import shutil
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from support import mutants, numbers, stored_weights
from support.mutants import Checkpoint, Mutant
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import liteboost_adaptor
from liteboost_adaptor.errors import LiteBoostError
from liteboost_adaptor.quantization import LiteBoostConfig, quantize_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}
IDS = torch.tensor([[3, 9, 27]])


def gptq(bits: int = 4, size: int = 32, symmetric: bool = True, act: bool = False, v2: bool = False):
    config = {"quant_method": "gptq", "bits": bits, "group_size": size or -1, "sym": symmetric}
    config |= {"desc_act": act, "checkpoint_format": "gptq_v2" if v2 else "gptq", "damp_percent": 0.01}
    make = functools.partial(stored_weights.random, bits=bits, size=size, symmetric=symmetric, act=act)
    return config, make, functools.partial(stored_weights.gptq, v2=v2)


def awq(size: int):
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    config["modules_to_not_convert"] = None
    return config, functools.partial(stored_weights.random, size=size, symmetric=False), stored_weights.awq


def compressed(form: str, bits: int, size: int, symmetric: bool, act: bool = False):
    config = stored_weights.compressed_config(form, bits, size, symmetric)
    config["config_groups"]["group_0"]["weights"] |= {"actorder": "group" if act else None, "dynamic": False}
    pack = stored_weights.pack_quantized if form == "pack-quantized" else stored_weights.int_quantized
    make = functools.partial(stored_weights.random, bits=bits, size=size, symmetric=symmetric, act=act)
    return config, make, functools.partial(pack, symmetric=symmetric)


THEIRS = {
    "gptq": gptq(),
    "gptq asymmetric desc_act": gptq(symmetric=False, act=True),
    "gptq v2 8 bits": gptq(bits=8, size=0, symmetric=False, v2=True),
    "gptq 3 bits": gptq(bits=3),
    "awq": awq(32),
    "pack-quantized": compressed("pack-quantized", 4, 32, True),
    "pack-quantized asymmetric act": compressed("pack-quantized", 4, 32, False, act=True),
    "pack-quantized 8 bits by channel": compressed("pack-quantized", 8, 0, True),
    "int-quantized": compressed("int-quantized", 8, 0, True),
    "int-quantized 4 bits": compressed("int-quantized", 4, 32, False),
}
OURS = {
    "w8a16": LiteBoostConfig("w8a16"),
    "w4a16": LiteBoostConfig("w4a16"),
    "w4a16 asymmetric": LiteBoostConfig("w4a16", symmetric=False, head=16),
    "w8a8": LiteBoostConfig("w8a8"),
    "w4a8": LiteBoostConfig("w4a8", symmetric=False),
}
#: Theirs, saved as ours.
AGAIN = ("gptq asymmetric desc_act", "int-quantized 4 bits")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)).eval()


@functools.cache
def base(name: str) -> Checkpoint:
    folder = Path(tempfile.mkdtemp())
    try:
        kind, _, said = name.partition(" ")
        if kind == "theirs":
            stored_weights.write(folder, model(), *THEIRS[said])
        elif kind == "again":
            stored_weights.write(folder / "theirs", model(), *THEIRS[said])
            load(folder / "theirs").save_pretrained(folder)
        else:
            quantize_model(model(), OURS[said]).save_pretrained(folder)
        return Checkpoint.read(name, folder)
    finally:
        shutil.rmtree(folder)


BASES = [f"theirs {name}" for name in THEIRS] + [f"ours {name}" for name in OURS]
BASES += [f"again {name}" for name in AGAIN]


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    loaded = load(folder)
    first = loaded(input_ids=IDS, use_cache=True)
    second = loaded(input_ids=IDS[:, :1], past_key_values=first.past_key_values)
    return torch.cat([first.logits, second.logits], dim=1)


@functools.cache
def expected(name: str) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        base(name).write(Path(folder))
        return logits(Path(folder))


@functools.cache
def all_of(name: str) -> list[Mutant]:
    checkpoint = base(name)
    return list(mutants.of(checkpoint, not name.startswith("theirs")))


def outcome(name: str, mutant: Mutant) -> str:
    """``same``, ``valid`` (other numbers, rightly), ``typed``, ``theirs``, or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        mutant.write(Path(folder))
        try:
            found = logits(Path(folder))
        except LiteBoostError as fault:
            last = mutant.subject.split(".")[-1]
            return "typed" if names(str(fault), mutant.subject, last) else f"unnamed: {fault}"
        except Exception as fault:  # noqa: BLE001 - that is the question
            return _of_others(fault, Path(folder))
    if found.shape == expected(name).shape and numbers.relative(found, expected(name)) <= 5e-5:
        return "same"
    return "valid" if mutant.is_valid else "WRONG NUMBERS"


def names(text: str, subject: str, last: str) -> bool:
    layer = subject.rpartition(".")[0]
    return last in text or layer in text or "quantization_config" in text


def _of_others(fault: Exception, folder: Path) -> str:
    frames = traceback.extract_tb(fault.__traceback__)
    is_ours = "liteboost_adaptor" in frames[-1].filename
    is_said = isinstance(fault, (ValueError, RuntimeError, OSError, ImportError, SafetensorError))
    if is_said and not is_ours and not isinstance(fault, (UnicodeError, json.JSONDecodeError)):
        return "theirs"
    return "theirs" if _without_us(folder) == repr(fault) else f"UNTYPED {fault!r}"[:200]


def _without_us(folder: Path) -> str:
    """What transformers alone raises."""
    liteboost_adaptor.undo()
    try:
        load(folder)
    except Exception as fault:  # noqa: BLE001 - whatever it is
        return repr(fault)
    finally:
        liteboost_adaptor.apply(level=2)
    return ""


def run(chosen: list[tuple[str, Mutant]]) -> tuple[collections.Counter, list[str]]:
    counts: collections.Counter = collections.Counter()
    wrong = []
    for name, mutant in chosen:
        found = outcome(name, mutant)
        counts[found if found in ("same", "valid", "typed", "theirs") else "wrong"] += 1
        if found not in ("same", "valid", "typed", "theirs"):
            wrong.append(f"{mutant.name} -> {found}")
    return counts, wrong


SEED = 18
#: For each base, in the first tier.
FEW = 12


@pytest.mark.parametrize("name", BASES)
def test_a_checkpoint_with_one_thing_wrong(name: str) -> None:
    _, wrong = run([(name, mutant) for mutant in mutants.sample(all_of(name), FEW, SEED)])
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
def test_two_thousand() -> None:
    every = [(name, mutant) for name in BASES for mutant in all_of(name)]
    assert len(every) >= 2000
    counts, wrong = run(every)
    assert not wrong, f"{dict(counts)}\n" + "\n".join(wrong)

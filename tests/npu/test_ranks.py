"""Models sharded over NPUs: unmodified scripts under ``torchrun``, on the simulator's hccl."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from cann_sim.environment import environment as simulated
from npu.launching import Launch, run_ranks, torchrun, without_torchrun
from support import tiny_models

import liteboost_adaptor

FAMILIES = ("llama", "qwen2", "phi3", "mixtral")
PLACES = ("auto", "npu", "cuda", "to npu", "to cuda")
SETTINGS = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}


def _alone(family: str, folder: Path) -> dict[str, Any]:
    """Inputs, a batch of three with left padding, and the tokens of one process on the CPU without us."""
    with liteboost_adaptor.patched(level=0):
        model = tiny_models.build(family)
        model.save_pretrained(folder)
        inputs = tiny_models.example_inputs(model, batch=3, padding=3)
        tokens = model.generate(**inputs, do_sample=False, return_dict_in_generate=False, **SETTINGS)
    return {
        "inputs": {name: value.tolist() for name, value in inputs.items()},
        "tokens": tokens.tolist(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def ran(
    ranks: int,
    families: tuple[str, ...],
    places: tuple[str, ...],
    with_launches: bool = False,
    sizes: str = "",
    soc: str = "",
    launch: Launch = without_torchrun,
) -> Any:
    """What one process gave, and what each rank found.

    Args:
        sizes: How the ranks share, as ``"SP=2 CP=2"``; by their weights, if empty.
        soc: Of the NPUs; then a prompt's products are looked at as well. Empty: the present one.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        alone = {family: _alone(family, Path(scratch) / family) for family in families}
        scripts = [(family, place) for family in families[:1] for place in places]
        scripts += [(family, "auto") for family in families[1:]]
        task = {
            "scripts": [(family, str(Path(scratch) / family), place) for family, place in scripts],
            "inputs": {family: each["inputs"] for family, each in alone.items()},
            "settings": SETTINGS,
            "launches": with_launches,
            "fused": bool(soc),
        }
        changes = {f"LITEBOOST_{name}": size for name, size in _sizes(sizes).items()}
        environment = simulated(soc=soc) if soc else {}
        return alone, run_ranks(
            ranks, "ranks_program.py", task, Path(scratch), launch, **environment | changes
        )


def _sizes(text: str) -> dict[str, str]:
    return dict(each.split("=") for each in text.split())


def check(alone: dict[str, Any], found: list[dict[str, Any]], ranks: int) -> None:
    for rank, results in enumerate(found):
        for script, result in results.items():
            if script in ("launches", "fused"):
                continue
            family = script.split()[0]
            assert result["greedy"] == alone[family]["tokens"], script
            assert result["sampled"] == found[0][script]["sampled"], script
            assert result["devices"] == [f"npu:{rank}"], script
            assert result["held"] < alone[family]["parameters"] * (1 / ranks + 0.1), script
            planned = result["planned"]
            sums = sum(planned.values()) - planned["head"]
            # Beside those of the plan: a digest of the inputs, and the state that sampling draws from.
            assert result["exchanged"]["HcclAllReduce"] == sums, script
            assert result["exchanged"]["HcclAllGather"] == 1, script
            assert planned["sum"] + planned.get("sum_output", 0) == 2 * 2, script  # two a layer


def test_two_ranks() -> None:
    """Tokens, sizes, exchanges; launches of a layer, and a prompt's products as one operator with sums."""
    alone, found = ran(2, FAMILIES, PLACES, with_launches=True, soc="910B", launch=torchrun)
    assert len(found[0]) == len(PLACES) + len(FAMILIES) + 1
    check(alone, found, 2)
    check_products(found, is_fused=True)
    for results in found:
        (launches, none), (sharded, exchanges) = results["launches"]["alone"], results["launches"]["sharded"]
        assert none == 0 and exchanges == 2
        assert sharded == launches


def check_products(found: list[dict[str, Any]], is_fused: bool) -> None:
    """A prompt's products and their sums, as one operator or apart; a single token's always apart."""
    for results in found:
        ways = results["fused"]
        layers = 2 * 2  # sums of two layers; beside them that of the embedding
        assert ways["fused"] == [layers if is_fused else 0, 0]
        assert ways["sums"] == [1 if is_fused else layers + 1, layers + 1]
        assert ways["sharded"] <= 1.5 * ways["alone"]


@pytest.mark.full
def test_products_of_a_prompt_are_not_fused_with_their_sums_on_an_a3() -> None:
    check_products(ran(2, (), (), soc="910C")[1], is_fused=False)


@pytest.mark.full
def test_four_ranks() -> None:
    alone, found = ran(4, ("llama", "phi3"), ("auto",))
    check(alone, found, 4)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, "CP=2"),
        pytest.param(2, "SP=2", marks=pytest.mark.full),
        pytest.param(2, "DP=2", marks=pytest.mark.full),
        pytest.param(4, "SP=2 CP=2", marks=pytest.mark.full),
        pytest.param(4, "DP=2 CP=2", marks=pytest.mark.full),
        pytest.param(4, "TP=2 SP=2", marks=pytest.mark.full),
        pytest.param(4, "TP=2 DP=2", marks=pytest.mark.full),
    ],
)
def test_shared_prompts_and_batches(ranks: int, sizes: str) -> None:
    alone, found = ran(ranks, ("llama", "qwen2"), ("auto",), sizes=sizes)
    parts = int(_sizes(sizes).get("TP", 1))
    for rank, results in enumerate(found):
        for script, result in results.items():
            family = script.split()[0]
            assert result["greedy"] == alone[family]["tokens"], script
            assert result["sampled"] == found[0][script]["sampled"], script
            assert result["devices"] == [f"npu:{rank}"], script
            assert result["held"] <= alone[family]["parameters"] * (1 / parts + (0.1 if parts > 1 else 0))
            assert _moved(result["exchanged"]) == _expected_moves(rank, ranks, _sizes(sizes)), script


LAYERS = 2  # of the tiny models


def _moved(exchanged: dict[str, int]) -> dict[str, int]:
    """What the cards, and not the hosts, have exchanged for the attention of a prompt."""
    return {
        "handed on": exchanged.get("HcclSend", 0),
        "taken over": exchanged.get("HcclRecv", 0),
        "both at once": exchanged.get("HcclBatchSendRecv", 0),
        "heads for tokens": exchanged.get("HcclAlltoAllV", 0),
    }


def _expected_moves(rank: int, ranks: int, sizes: dict[str, str]) -> dict[str, int]:
    size = {name: int(sizes.get(name, 1)) for name in ("DP", "CP", "SP")}
    of_weights = ranks // (size["DP"] * size["CP"] * size["SP"])
    place = rank // (of_weights * size["SP"]) % size["CP"]
    is_first, is_last = place == 0, place == size["CP"] - 1
    return {
        "handed on": LAYERS * (is_first and not is_last),
        "taken over": LAYERS * (is_last and not is_first),
        "both at once": LAYERS * (not is_first and not is_last),
        "heads for tokens": 2 * LAYERS * (size["SP"] > 1),
    }

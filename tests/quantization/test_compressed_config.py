"""What the configuration of a compressed-tensors checkpoint may say, and why the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from liteboost_adaptor.errors import QuantizationError
from liteboost_adaptor.quantization.formats.compressed_tensors import (
    CompressedTensorsFormat,
    config_groups,
    group_of,
)

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "format": "pack-quantized"}
CONFIG: dict[str, Any] = {
    "quantization_status": "compressed",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
}


def with_group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": GROUP | changes}}


def with_weights(**changes: Any) -> dict[str, Any]:
    return with_group(weights=WEIGHTS | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"sparsity_config": {"format": "dense"}}, ""),
        ({"quantization_status": "frozen"}, "without compressed weights"),
        ({"config_groups": {}}, "without compressed weights"),
        ({"dequantize": True}, "that are to be dequantized"),
        ({"run_compressed": False}, "that are to be dequantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparse weights"),
        ({"transform_config": {"config_groups": {}}}, "with transforms of activations"),
        ({"format": "mxfp4-pack-quantized"}, "in the MX format mxfp4-pack-quantized: dequantize it with"),
        (with_group(format="nvfp4-pack-quantized"), "in the format nvfp4-pack-quantized"),
        (with_weights(type="float"), "with weights of type float, 4 bits"),
        (with_weights(num_bits=16), "with weights of type int, 16 bits"),
        (with_weights(strategy="token"), "with a scale for each token"),
    ],
)
def test_what_is_not_read_is_named(changes: dict[str, Any], words: str) -> None:
    found = CompressedTensorsFormat.why_unsupported(CONFIG | changes, "0.12")
    assert found.startswith("compressed-tensors ") is bool(words) and words in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config_groups": {"group_0": ["Linear"]}}, "config_groups.group_0"),
        (with_group(targets="Linear"), "config_groups.group_0.targets"),
        (with_group(targets=[]), "it must be a list of names"),
        (with_group(targets=["re:(a"]), "config_groups.group_0.targets"),
        (with_weights(strategy="row"), "config_groups.group_0.weights.strategy"),
        (with_weights(strategy="channel"), "the strategy channel has none"),
        (with_weights(actorder="sorted"), "config_groups.group_0.weights.actorder"),
        (with_weights(num_bits=9), "num_bits"),
    ],
)
def test_values_that_are_not_of_the_format_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(QuantizationError) as raised:
        config_groups(CONFIG | changes)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("order", "has_index"),
    [(None, False), ("group", True), ("weight", None), (True, True), (False, False), ("dynamic", True)],
)
def test_orders_of_columns(order: Any, has_index: bool | None) -> None:
    (group,) = config_groups(CONFIG | with_weights(actorder=order))
    assert group.config.has_group_index is has_index


def test_a_name_comes_before_a_class_and_a_layer_of_no_group_is_refused() -> None:
    groups = {
        "all": GROUP,
        "heads": GROUP | {"targets": ["re:.*head$"], "weights": WEIGHTS | {"num_bits": 8}},
        "not quantized": {"targets": ["Embedding"], "weights": None},
    }
    found = config_groups(CONFIG | {"config_groups": groups})
    assert [each.config.bits for each in found] == [4, 8]
    assert group_of(found, ("lm_head",)) is found[1] and group_of(found, ("fc1", "Linear")) is found[0]
    named = CONFIG | {"config_groups": {name: GROUP | {"targets": [name]} for name in ("fc1", "fc2")}}
    with pytest.raises(QuantizationError, match="no group has targets for fc3"):
        CompressedTensorsFormat(named).layer("fc3", "Conv1D", {}, None)

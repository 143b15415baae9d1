"""`bench --modelled`: the time of a step from the launches in a trace."""

import json

import pytest

from liteboost_adaptor import cli
from liteboost_adaptor.bench import modelled
from liteboost_adaptor.bench.cards import all_reduce_seconds
from liteboost_adaptor.bench.modelled import CARDS, HOST_LAUNCH_S, STATIC_S, Launch

CARD = CARDS["910B"]


def event(op, dtype="bf16", flops=0.0, read=0.0, written=0.0):
    return json.dumps(
        {
            "event": "launch",
            "op": op,
            "arguments": [{"name": "x", "tensors": [None, {"dtype": dtype}]}, {"name": "eps", "value": 1}],
            "flops": flops,
            "read": read,
            "written": written,
        }
    )


def mark(label):
    return json.dumps({"event": "mark", "label": label})


def test_only_the_launches_behind_the_mark_are_taken():
    lines = [
        event("aclnnAdd"),
        mark("token 1"),
        event("aclnnMatmul", "f32", 8.0, 3.0, 1.0),
        json.dumps({"event": "copy", "bytes": 4}),
        event("aclnnRmsNorm", "bf16", 2.0, 5.0, 6.0),
        mark("token 2"),
        event("aclnnMul"),
    ]
    assert modelled.launches_of(lines, "token 1") == [
        Launch("matmul", "float32", 8.0, 4.0),
        Launch("vector", "bfloat16", 2.0, 11.0),
    ]
    assert modelled.launches_of(lines, "token 3") == []


@pytest.mark.parametrize(
    ("op", "unit"),
    [
        ("aclnnMm", "matmul"),
        ("aclnnFusedInferAttentionScoreV3", "matmul"),
        ("aclnnRecurrentGatedDeltaRule", "matmul"),
        ("aclnnMatmulAllReduce", "collective"),
        ("hcclAllGather", "collective"),
        ("aclnnSwiGlu", "vector"),
    ],
)
def test_units(op, unit):
    (launch,) = modelled.launches_of([mark("t"), event(op)], "t")
    assert launch.unit == unit


def test_a_collective_takes_the_time_of_its_links():
    lines = [mark("t")]
    for op, graph in (("HcclAllReduce", 0), ("HcclAllGather", 3)):
        fields = {"event": "collective", "op": op, "rank": 0, "ranks": 4, "bytes": 4000, "graph": graph}
        lines.append(json.dumps(fields))
    summed, gathered = modelled.launches_of(lines, "t")
    assert modelled.device_seconds(summed, CARD) == all_reduce_seconds(CARD, 4000, 4)
    assert gathered.bytes == 3 * 4000
    assert [summed.is_captured, gathered.is_captured] == [False, True]


def test_a_launch_takes_the_longer_of_its_arithmetic_and_its_traffic():
    reads = Launch("matmul", "bfloat16", 1.0, 1e9)
    seconds = 1e9 / (1.6 * 2**40 * 0.6)
    assert modelled.device_seconds(reads, CARD) == pytest.approx(STATIC_S["matmul"] + seconds)
    computes = Launch("matmul", "bfloat16", 1e12, 1.0)
    assert modelled.device_seconds(computes, CARD) == pytest.approx(5e-6 + 1e12 / (353.9e12 * 0.7))
    # The vector units are far slower, whatever the dtype.
    assert modelled.device_seconds(Launch("vector", "bfloat16", 1e12, 1.0), CARD) > 1e12 / 22e12


def test_the_slower_of_host_and_device_sets_the_pace_but_in_a_graph():
    small = modelled.step_time([Launch("vector", "bfloat16", 0.0, 0.0)] * 10, CARD)
    assert small.eager == pytest.approx(10 * HOST_LAUNCH_S)
    assert small.graph == pytest.approx(10 * STATIC_S["vector"] + HOST_LAUNCH_S)
    large = modelled.step_time([Launch("matmul", "bfloat16", 1e12, 0.0)] * 10, CARD)
    assert large.eager == large.device > large.host


def test_of_a_replay_the_host_launches_the_graph_and_what_is_renewed():
    captured = json.dumps(json.loads(event("aclnnMm")) | {"graph": 3})
    replay, update = (json.dumps({"event": name, "graph": 3, "tasks": 2}) for name in ("replay", "update"))
    lines = [mark("t"), event("aclnnAdd"), replay, captured, captured, update, mark("u"), update]
    launches, of_graphs = modelled.launches_of(lines, "t"), modelled.graph_calls_of(lines, "t")
    assert [launch.is_captured for launch in launches] == [False, True, True] and of_graphs == 2
    time = modelled.step_time(launches, CARD, of_graphs)
    assert time.host == pytest.approx(3 * HOST_LAUNCH_S)
    assert time.device == modelled.step_time(launches, CARD).device


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "npu"], "--device is cpu, or npu together with --modelled"),
        (["--modelled"], "found --device cpu --modelled"),
        (["--device", "npu", "--modelled", "--card", "910X"], "--card must be one of 910B, 910B-280T, 910C"),
    ],
)
def test_what_cannot_be_modelled_is_refused(options, words, capsys):
    assert cli.main(["bench", "--arch", "tiny", *options]) == 1
    assert words in capsys.readouterr().err

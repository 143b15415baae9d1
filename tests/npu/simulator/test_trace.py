"""The trace: bytes and FLOPs come from the arguments, and what a launch does too much is counted."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from cann_sim.summary import summary
from cann_sim.trace import Trace, mark, read, recording
from npu.marks import launched_by_a_replay

F32 = 4


def launched(function, *arguments) -> Trace:
    function(*arguments)  # what only the first call does (lazy set-up) is not of interest
    with recording() as trace:
        function(*arguments)
    return trace


def test_a_launch_is_recorded_with_its_arguments() -> None:
    x, weight = torch.randn(3, 64).npu(), torch.randn(64).npu()
    trace = launched(lambda: torch_npu.npu_rms_norm(x, weight, epsilon=1e-5))
    (launch,) = trace.launches
    assert launch.op == "aclnnRmsNorm"
    assert [a.kind for a in launch.arguments] == ["tensor", "tensor", "double", "tensor", "tensor"]
    assert [a.direction for a in launch.arguments] == ["in", "in", "in", "out", "out"]
    given, gamma, epsilon = launch.arguments[:3]
    assert (given.tensor.shape, given.tensor.dtype, given.tensor.address) == ((3, 64), "f32", x.data_ptr())
    assert gamma.tensor.strides == (1,)
    assert epsilon.value == 1e-5
    assert launch.read == (3 * 64 + 64) * F32
    assert launch.written == (3 * 64 + 3) * F32


def test_a_matrix_product_counts_its_flops_and_bytes() -> None:
    x, weight = torch.randn(5, 32).npu(), torch.randn(16, 32).npu()
    trace = launched(torch.nn.functional.linear, x, weight)
    assert trace.flops == 2 * 5 * 32 * 16
    assert trace.bytes == (5 * 32 + 16 * 32 + 5 * 16) * F32


def test_an_expanded_axis_is_read_once() -> None:
    x = torch.randn(1, 64).npu().expand(8, 64)
    (launch,) = launched(lambda: x + 1).launches
    assert (launch.read, launch.written) == (64 * F32, 8 * 64 * F32)


def test_views_that_overlap_are_read_once() -> None:
    x = torch.randn(8, 64).npu()
    (launch,) = launched(lambda: x[:6] + x[2:]).launches
    assert launch.read == 8 * 64 * F32
    assert launch.arguments[0].tensor.overlaps(launch.arguments[1].tensor)


def test_a_gather_reads_the_rows_it_takes() -> None:
    table, ids = torch.randn(100, 16).npu(), torch.tensor([3, 7, 3]).npu()
    (launch,) = launched(torch.nn.functional.embedding, ids, table).launches
    assert launch.argument("w").read == 2 * 16 * F32


def test_a_scatter_writes_the_rows_it_puts() -> None:
    cache, rows = torch.zeros(100, 16).npu(), torch.randn(2, 16).npu()
    where = torch.tensor([3, 7]).npu()
    (launch,) = launched(lambda: cache.index_copy_(0, where, rows)).launches
    assert launch.written == 2 * 16 * F32


@pytest.mark.parametrize(
    "layout, axis", [pytest.param("BNSD", 2, id="heads first"), pytest.param("BSND", 1, id="sequence first")]
)
def test_attention_reads_keys_and_values_by_their_lengths(layout: str, axis: int) -> None:
    shape = (2, 2, 64, 32) if layout == "BNSD" else (2, 64, 2, 32)
    query = torch.randn(2, 4, 1, 32) if layout == "BNSD" else torch.randn(2, 1, 4, 32)
    query, key, value = query.half().npu(), torch.randn(shape).half().npu(), torch.randn(shape).half().npu()

    def attend() -> None:
        torch_npu.npu_fused_infer_attention_score(
            *(query, key, value),
            num_heads=4,
            num_key_value_heads=2,
            input_layout=layout,
            scale=0.2,
            actual_seq_lengths_kv=[10, 33],
        )

    (launch,) = launched(attend).launches
    assert launch.arguments[1].read == launch.arguments[2].read == (10 + 33) * 2 * 32 * 2
    assert launch.flops == 2 * (10 + 33) * 4 * (32 + 32)


def test_paged_attention_reads_the_rows_in_its_blocks() -> None:
    blocks = torch.randn(9, 16, 2 * 32).half().npu()
    query = torch.randn(2, 1, 4 * 32).half().npu()
    table = torch.tensor([[4, 2, 0], [4, 5, 6]], dtype=torch.int32).npu()

    def attend() -> None:
        torch_npu.npu_fused_infer_attention_score(
            *(query, blocks, blocks),
            num_heads=4,
            num_key_value_heads=2,
            input_layout="BSH",
            scale=0.2,
            actual_seq_lengths_kv=[17, 40],
            block_table=table,
            block_size=16,
        )

    (launch,) = launched(attend).launches
    # Block 4 is shared: 16 + 1 rows of the first sequence, 16 + 8 more of the second.
    assert launch.arguments[1].read == (17 + 24) * 2 * 32 * 2


@pytest.mark.parametrize(
    "planted, extra",
    [
        pytest.param(lambda x: x.t().contiguous().t() + 1, 2 * 8 * 64 * F32, id="hidden copy"),
        pytest.param(lambda x: x.half().float() + 1, 2 * 8 * 64 * (F32 + 2), id="hidden casts"),
        pytest.param(lambda x: (x.sum(), x + 1), 8 * 64 * F32 + F32, id="second read"),
    ],
)
def test_a_planted_waste_raises_the_count(planted, extra: int) -> None:
    x = torch.randn(8, 64).npu()
    honest = launched(lambda: x + 1)
    wasteful = launched(planted, x)
    assert wasteful.bytes - honest.bytes == extra
    assert len(wasteful.launches) > len(honest.launches)


def test_a_view_costs_nothing() -> None:
    x = torch.randn(8, 64).npu()
    assert not launched(lambda: x.view(64, 8).t()[1:3].unsqueeze(0)).events


def test_copies_and_synchronisations_of_the_host_are_counted() -> None:
    x = torch.randn(8).npu()
    trace = launched(lambda: (x.sum().item(), x + 1))
    assert [copy.fields["bytes"] for copy in trace.copies("d2h")] == [F32]
    assert len(trace.synchronisations) == 1
    assert not launched(lambda: x + 1).synchronisations
    assert [copy.fields["bytes"] for copy in launched(lambda: torch.ones(8).npu()).copies("h2d")] == [8 * F32]


def test_marks_divide_a_trace() -> None:
    x = torch.randn(8).npu()
    with recording() as trace:
        mark("one")
        x + 1
        mark("two")
        x + 1
        x * 2
    assert trace.labels == ["one", "two"]
    assert [len(trace.part(label).launches) for label in trace.labels] == [1, 2]


def test_replayed_launches_name_their_graph() -> None:
    x = torch.randn(8).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x + 1
    with recording() as trace:
        graph.replay()
    (replay,) = trace.of("replay")
    # Beside it torch_npu 2.9.0 writes the seed and the offset of its generator, by launches of the host.
    replayed = [launch for launch in trace.launches if launch.graph]
    assert "aclnnAdds" in [launch.op for launch in replayed]
    assert {launch.graph for launch in replayed} == {replay.fields["graph"]}
    assert [launch.op for launch in trace.launches if not launch.graph] == launched_by_a_replay()


def test_a_summary_divides_by_tokens_and_layers(tmp_path) -> None:
    line = (
        '{"event":"launch","op":"aclnnAdd","stream":0,"device":0,"graph":0,'
        '"read":8,"written":4,"flops":0,"arguments":[]}\n'
    )
    path = tmp_path / "trace.jsonl"
    path.write_text(line * 12)
    text = summary(read(path), tokens=2, layers=3)
    assert text.splitlines()[1].split() == ["launches", "12", "6", "2"]
    assert text.splitlines()[2].split() == ["bytes", "144", "72", "24"]
    assert text.splitlines()[-1].split() == ["aclnnAdd", "12", "144"]

"""Comparing ops with their references, and remembering the answers; on the CPU. On an NPU: tests/npu."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from liteboost_adaptor import cli, native
from liteboost_adaptor.ops import npu_ops, ops
from liteboost_adaptor.selftest import compare, first_use, kit, report
from liteboost_adaptor.selftest.case import DTYPES, Kind, cases_of, kinds_of, ops_with_cases

IDENTITY = {"soc": "Ascend910B2", "cann": "8.5.0", "operators": [["/opt/libopapi.so", 10, 20]]}


@pytest.fixture(autouse=True)
def library() -> None:
    native.load()


def short_kinds_of(op: str) -> list[str]:
    """Without those of thousands of keys, which take seconds each."""
    return [kind for kind in kinds_of(op) if not kind.endswith(" long")]


def long_kinds() -> list[tuple[str, str]]:
    return [(op, kind) for op in ops_with_cases() for kind in kinds_of(op) if kind.endswith(" long")]


def test_every_op_has_cases_of_every_dtype() -> None:
    assert set(ops_with_cases()) == {*ops(), *npu_ops()}
    for op in ops_with_cases():
        for kind in short_kinds_of(op):
            cases = cases_of(op, kind)
            assert len({case.label for case in cases}) == len(cases) >= 2
            tensors = [value for case in cases for value in case.arguments.values() if torch.is_tensor(value)]
            assert DTYPES[kind.split()[0]] in {tensor.dtype for tensor in tensors}


@pytest.mark.parametrize("op", ops())
def test_every_kernel_of_the_cpu_passes(op: str) -> None:
    for kind in short_kinds_of(op):
        result = compare.compare(op, kind, "cpu")
        assert result.reason == "" and len(result.served) >= 4


def test_attention_is_compared_at_8k_and_32k_keys_and_with_a_long_prompt() -> None:
    assert {op for op, _ in long_kinds()} == {
        "attention",
        "attention_part",
        "int8_attention",
        "paged_attention",
    }
    for phase, (queries, keys) in {"decode": (1, 32768), "prefill": (2304, 2304)}.items():
        cases = cases_of("attention", f"bf16 {phase} head-64 long")
        shapes = {(case.arguments["query"].shape[2], case.arguments["key"].shape[2]) for case in cases}
        assert (queries, keys) in shapes and all(keys > 2048 for _, keys in shapes)
        assert any(8192 <= keys < 9000 for _, keys in shapes)
        assert {case.arguments["query"].shape[3] for case in cases} == {64}


@pytest.mark.full
@pytest.mark.parametrize(("op", "kind"), long_kinds())
def test_every_kernel_of_the_cpu_passes_with_many_keys(op: str, kind: str) -> None:
    result = compare.compare(op, kind, "cpu")
    assert result.reason == "" and len(result.served) >= 4


def test_a_head_size_that_is_not_listed_has_cases_of_its_own() -> None:
    for op, layout in (
        ("attention", "decode mask"),
        ("paged_attention", "pages"),
        ("attention_part", "decode"),
    ):
        (size,) = {case.arguments["query"].shape[-1] for case in cases_of(op, f"bf16 {layout} head-112")}
        assert size == 112 and f"bf16 {layout} head-112" not in kinds_of(op)
    assert cases_of("rms_norm", "bf16 head-64") == cases_of("attention", "bf16 decode head-0") == []


def test_seed_changes_the_values_and_nothing_else() -> None:
    first, again, other = (cases_of("rms_norm", "bf16", seed)[1].arguments["x"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and first.shape == other.shape and not torch.equal(first, other)


@pytest.mark.parametrize(
    ("op", "kind"), [("rms_norm", "fp64"), ("rms_norm", "bf16 upside down"), ("no_such_op", "bf16")]
)
def test_what_nobody_wrote_cases_for_is_refused(op: str, kind: str) -> None:
    assert cases_of(op, kind) == []
    assert compare.compare(op, kind, "cpu").reason == f"nothing is known to compare it by ({kind})"


def test_strides_survive_the_way_to_the_device() -> None:
    kind = Kind("fp32", torch.float32, "")
    for tensor in (kind.strided(3, 5, 64), kind.swapped(2, 3, 4, 8), kind.normal(2, 6).chunk(2, -1)[1]):
        placed = compare.place(tensor, "cpu")
        assert placed.stride() == tensor.stride() and placed.storage_offset() == tensor.storage_offset()
        assert torch.equal(placed, tensor) and placed.data_ptr() != tensor.data_ptr()


def test_halves_of_one_tensor_are_halves_of_one_on_the_device_too() -> None:
    gate, up = Kind("fp32", torch.float32, "").normal(2, 6).chunk(2, -1)
    there = compare.placed({"gate": gate, "up": up, "limit": None, "other": gate.clone()}, "cpu")
    assert there["up"].data_ptr() - there["gate"].data_ptr() == up.data_ptr() - gate.data_ptr()
    assert there["gate"].data_ptr() != gate.data_ptr() and there["limit"] is None
    assert all(torch.equal(there[name], x) for name, x in (("gate", gate), ("up", up), ("other", gate)))


def _wrong(monkeypatch: pytest.MonkeyPatch, op: str, change: Any) -> None:
    """Let ``torch.ops.liteboost.X`` give what ``change`` makes of its arguments and its true result."""
    right = getattr(torch.ops.liteboost, op)

    class Namespace:
        def __getattr__(self, name: str) -> Any:
            wrong = lambda **arguments: change(right, arguments)  # noqa: E731
            return wrong if name == op else getattr(torch.ops.liteboost, name)

    monkeypatch.setattr(compare, "torch", _TorchWith(Namespace()))


class _TorchWith:
    def __init__(self, liteboost: Any) -> None:
        self.ops = type("ops", (), {"liteboost": liteboost})

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


#: What could be wrong about an operator, or about how it is called: (op, kind, what is done instead).
WRONG = {
    "cos and sin swapped": (
        "rope",
        "bf16 half",
        lambda op, given: op(**{**given, "cos": given["sin"], "sin": given["cos"]}),
    ),
    "the other layout of pairs": (
        "rope",
        "bf16 half",
        lambda op, given: op(**{**given, "layout": "interleaved"}),
    ),
    "heads taken for positions": (
        "attention",
        "bf16 prefill",
        lambda op, given: op(
            **{**given, "query": given["query"].transpose(1, 2).reshape(given["query"].shape)}
        ),
    ),
    "eps lost": ("rms_norm", "bf16", lambda op, given: op(**{**given, "eps": 0.0})),
    "offset lost": ("rms_norm", "bf16 offset", lambda op, given: op(**{**given, "weight_offset": 0.0})),
    "sum not returned": (
        "add_rms_norm",
        "fp16",
        lambda op, given: (op(**given)[0], torch.zeros_like(given["x"])),
    ),
    "halves exchanged": (
        "gated_activation",
        "fp32 silu",
        lambda op, given: op(**{**given, "gate": given["up"], "up": given["gate"]}),
    ),
    "one element lost": ("rms_norm", "fp32", lambda op, given: _with_one_zero(op(**given))),
    "computed in bf16": ("layer_norm", "fp32", lambda op, given: op(**given).bfloat16().float()),
    "not a number": ("linear", "bf16", lambda op, given: op(**given) * math.nan),
    "written to other places": (
        "kv_append",
        "bf16",
        lambda op, given: op(**{**given, "slots": given["slots"].flatten().flip(0).view_as(given["slots"])}),
    ),
    "one half of a cache not written": (
        "kv_append",
        "fp32",
        lambda op, given: op(**{**given, "values": given["values"].clone()}),
    ),
    "not written": ("kv_append", "fp16", lambda op, given: None),
    "another shape": ("linear", "bf16", lambda op, given: op(**given).flatten(0, 1)),
    "another dtype": ("linear", "bf16", lambda op, given: op(**given).float()),
}


def _with_one_zero(result: torch.Tensor) -> torch.Tensor:
    result.view(-1)[result.abs().argmax()] = 0
    return result


@pytest.mark.parametrize("what", WRONG)
def test_wrong_op_is_refused_with_its_figures(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    op, kind, change = WRONG[what]
    _wrong(monkeypatch, op, change)
    result = compare.compare(op, kind, "cpu")
    reason = result.reason
    assert reason.startswith(f"differs from its reference ({kind}) in ")
    assert f" of {len(result.figures)} cases; " in reason
    assert "error " in reason or " instead of " in reason


def test_result_of_the_shape_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    def stale(op: Any, given: dict[str, Any]) -> torch.Tensor:
        return kept.setdefault(given["x"].shape, op(**given))

    _wrong(monkeypatch, "rms_norm", stale)
    figures = compare.compare("rms_norm", "bf16", "cpu").figures
    half = len(figures) // compare.ROUNDS
    assert all(figure.passed for figure in figures[:half]) and not any(f.passed for f in figures[half:])


def test_op_that_raises_is_refused_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(op: Any, given: dict[str, Any]) -> torch.Tensor:
        raise RuntimeError("status 161002:\n  the last axis must be a multiple of 16")

    _wrong(monkeypatch, "linear", raising)
    reason = compare.compare("linear", "bf16", "cpu").reason
    assert "RuntimeError: status 161002: the last axis must be a multiple of 16" in reason


@pytest.mark.parametrize(
    "fault",
    [torch.OutOfMemoryError("no memory left"), RuntimeError("NPU out of memory. Tried to allocate 1 GiB")],
    ids=["torch", "torch_npu 2.9.0"],
)
def test_full_memory_says_nothing_about_an_op(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def full(op: Any, given: dict[str, Any]) -> torch.Tensor:
        raise fault

    _wrong(monkeypatch, "linear", full)
    with pytest.raises(torch.OutOfMemoryError):
        compare.compare("linear", "bf16", "cpu")


def test_global_state_is_neither_used_nor_changed() -> None:
    plain = compare.compare("rope", "bf16 half", "cpu")
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float16)
    try:
        assert compare.compare("rope", "bf16 half", "cpu") == plain
        assert cases_of("attention", "bf16 prefill mask")[1].arguments["mask"].dtype == torch.bool
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_answer_is_kept_and_read(tmp_path: Path) -> None:
    path = tmp_path / "made" / "rms_norm-bf16.json"
    assert first_use.read(path, IDENTITY, "rms_norm", "bf16") is None
    for reason in ("", "differs by 3.2"):
        first_use.write(path, IDENTITY, "rms_norm", "bf16", reason)
        assert first_use.read(path, IDENTITY, "rms_norm", "bf16") == reason
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("identity", "op", "kind"),
    [
        ({**IDENTITY, "cann": "8.1.RC1"}, "rms_norm", "bf16"),
        ({**IDENTITY, "operators": [["/opt/libopapi.so", 11, 20]]}, "rms_norm", "bf16"),
        (IDENTITY, "add_rms_norm", "bf16"),
        (IDENTITY, "rms_norm", "fp16"),
    ],
)
def test_answer_holds_for_its_machine_and_kind_alone(
    tmp_path: Path, identity: dict[str, Any], op: str, kind: str
) -> None:
    first_use.write(tmp_path / "x.json", IDENTITY, "rms_norm", "bf16", "")
    assert first_use.read(tmp_path / "x.json", identity, op, kind) is None


def test_answer_that_cannot_be_trusted_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    first_use.write(path, IDENTITY, "rms_norm", "bf16", "differs by 3.2")
    whole = path.read_text()
    edited = json.dumps({**json.loads(whole), "reason": ""})
    for text in ("", whole[: len(whole) // 2], "[]", "null", "\x00" * 100, edited, '{"reason": ""}'):
        path.write_text(text)
        assert first_use.read(path, IDENTITY, "rms_norm", "bf16") is None
    path.write_bytes(b"\xff\xfe\x00")
    assert first_use.read(path, IDENTITY, "rms_norm", "bf16") is None
    path.unlink()
    path.mkdir()
    assert first_use.read(path, IDENTITY, "rms_norm", "bf16") is None
    first_use.write(path, IDENTITY, "rms_norm", "bf16", "")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.json"
    first_use.write(path, IDENTITY, "rms_norm", "bf16", "")
    assert first_use.read(path, IDENTITY, "rms_norm", "bf16") is None


def test_verdict_without_an_npu_is_a_reason_and_no_exception() -> None:
    reason = first_use.verdict("rms_norm", "bf16")
    assert reason.startswith("could not be compared with its reference (bf16): ")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["selftest", *arguments])
    return code, *capsys.readouterr()


def test_command_prints_a_table_and_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = _run(capsys, "--device", "cpu", "--ops", "rms_norm,rope", "--json", "all.json")
    assert code == 0 and out.count("pass") == len(kinds_of("rms_norm")) + len(kinds_of("rope"))
    text = (tmp_path / "selftest-cpu.md").read_text()
    assert text.startswith("# liteboost_adaptor selftest on cpu: passes\n") and torch.__version__ in text
    count = compare.ROUNDS * len(cases_of("rope", "bf16 half"))
    assert f"| rope | bf16 half | {count} of {count} |" in text
    figures = json.loads((tmp_path / "all.json").read_text())
    assert figures["passed"] and {each["op"] for each in figures["results"]} == {"rms_norm", "rope"}


def test_command_ends_with_status_1_when_an_op_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _wrong(monkeypatch, "rms_norm", lambda op, given: op(**{**given, "eps": 0.0}))
    path = tmp_path / "report.md"
    code, out, err = _run(capsys, "--device", "cpu", "--ops", "rms_norm,linear", "--output", str(path))
    wrong, right = len(kinds_of("rms_norm")), len(kinds_of("linear"))
    assert (
        code == 1 and f"{wrong} of {wrong + right} kinds differ from their reference: rms_norm (fp32)" in err
    )
    assert out.count("FAIL") == wrong and "allowed" in out
    assert "**fails**" in path.read_text() and "- [1, 1, 64]: error" in path.read_text()


def test_command_fails_first_where_its_report_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")  # not even root writes a file there
    monkeypatch.setattr(report, "run", lambda *_: pytest.fail("ops were compared"))
    code, out, err = _run(capsys, "--device", "cpu")
    assert (code, out) == (1, "") and "cannot be written in /proc" in err and "by --output" in err


def test_the_full_report_grows_with_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.md"
    stages = [kit.Stage("capture", "pass", "3 replays", 1.0), kit.Stage("launches", "FAIL", "it hung", 2.0)]
    seen: list[str] = []

    def staged(device: str, names: tuple[str, ...], progress: report.Progress) -> Iterator[kit.Stage]:
        assert (device, names) == ("npu:1", kit.STAGES)
        for each in stages:
            progress(0, 2, each.name)
            seen.append(path.read_text())
            yield each

    right = compare.Result("rope", "bf16", (compare.Figure("[1]", 0.0, 1.0),))
    found = report.Report("npu:1", {"torch": "2.9"}, {}, (right,))
    monkeypatch.setattr(report, "run", lambda *_: found)
    monkeypatch.setattr(kit, "run", staged)
    code, out, err = _run(capsys, "--device", "npu:1", "--report", "--output", str(path), "--json", "-")
    assert (
        code == 1 and err.strip().endswith("error: launches: it hung") and "capture: pass, 3 replays" in err
    )
    assert [(each["name"], each["outcome"]) for each in json.loads(out)["stages"]] == [
        ("capture", "pass"),
        ("launches", "FAIL"),
    ]
    assert "| rope | bf16 | 1 of 1 |" in seen[0] and "| capture | pass |" not in seen[0]
    assert "| capture | pass |" in seen[1] and "| launches | FAIL |" not in seen[1]
    assert path.read_text() == report.text(found) + kit.text(stages)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "gpu"), "must be cpu, npu or npu:0"),
        (("--device", "npu:x"), "must be cpu, npu or npu:0"),
        (("--device", "npu:1", "--ops", "linear"), "npu:1"),
        (("--device", "cpu", "--ops", "rms"), "no op is called rms. Ops: activation"),
        (("--device", "cpu", "--output", "/nowhere/to/be/found.md"), "Make it first"),
        (("--device", "cpu", "--report"), "--report is about an NPU"),
    ],
)
def test_command_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Any,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    code, _, err = _run(capsys, *arguments)
    assert code == 1 and words in err and list(tmp_path.iterdir()) == []

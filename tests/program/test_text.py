"""Programs as text: what an instruction does, when a run stops, and what is said of a text that is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from liteboost_adaptor import native
from liteboost_adaptor.program import lower, reasons

native.load()
ops = torch.ops.liteboost


@contextmanager
def loaded(text: str, *constants: torch.Tensor) -> Iterator[int]:
    number = ops._program_load(text, list(constants))
    yield number
    ops._program_unload(number)


def run(text: str, inputs: list[torch.Tensor], numbers: list[int], *constants: torch.Tensor) -> list:
    with loaded(text, *constants) as number:
        return ops._program_run(number, inputs, numbers)


def stopped_by(words: str) -> bool:
    return reasons.STOPS[ops._program_stopped_by()].startswith(words)


def lies_at(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether both begin at one place; ``data_ptr`` is for writing, and makes a copy of what is shared."""
    is_shared = torch._C._data_address(tensor) == torch._C._data_address(whole)
    return is_shared and tensor.storage_offset() == whole.storage_offset()


def test_operators_arithmetic_and_lists() -> None:
    text = """slots 1 2 9
add y 1 i 3 -> 3
floordiv i -7 y 2 -> 4
op aten::mul Tensor 2 0 t 0 1 y 3 -> 5
op aten::split Tensor 3 0 t 5 1 i 2 2 i 0 -> 6
item 6 1 -> 7
op aten::add Scalar 2 0 t 7 1 y 4 -> 8
return 8"""
    x = torch.arange(6.0).reshape(3, 2)
    (found,) = run(text, [x], [2, 2])
    assert torch.equal(found, x[2:] * 5 - 4)


def test_a_constant_is_read_where_it_lies_and_stops_the_run_when_it_is_another() -> None:
    weight, x = torch.nn.Parameter(torch.ones(3)), torch.arange(3.0)
    text = "slots 1 0 3\nop aten::mul Tensor 2 0 t 1 1 t 0 -> 2\nreturn 2"
    with loaded(text, weight) as number, torch.no_grad():
        weight.mul_(2)
        assert torch.equal(ops._program_run(number, [x], [])[0], 2 * x)
        weight.data = torch.full((3,), 5.0)
        assert torch.equal(ops._program_run(number, [x], [])[0], 5 * x)
        for other in (torch.ones(1), torch.ones(3, dtype=torch.float64), torch.ones(6)[::2]):
            weight.data = other
            assert not ops._program_run(number, [x], []) and stopped_by("a parameter or buffer")
            weight.data = torch.full((3,), 5.0)
        assert torch.equal(ops._program_run(number, [x], [])[0], 5 * x)


def test_two_appends_are_one_operator_and_share_their_places() -> None:
    text = """slots 6 4 16
places 0 y 6 y 7 1 y 8 y 9 -1 -> 12
both 0 y 6 y 7 4 1 y 8 y 9 5 12
part 0 y 6 y 7 1 2 -> 10
part 1 y 8 y 9 1 2 -> 11
places 2 y 6 y 7 3 y 8 y 9 12 -> 15
both 2 y 6 y 7 4 3 y 8 y 9 5 15
part 2 y 6 y 7 1 2 -> 13
part 3 y 8 y 9 1 2 -> 14
return 10 11 13 14"""
    for ends in ([1, 3, 1, 3], [1, 3, 0, 2]):  # together, and each for itself
        memory = [
            torch.zeros(2, 3, 8, 4),
            torch.zeros(2, 3, 8, 6),
            torch.zeros(2, 3, 8, 4),
            torch.zeros(2, 3, 8, 6),
        ]
        new = [torch.randn(2, 3, 1, 4), torch.randn(2, 1, 3, 6).transpose(1, 2)]
        before = [each.clone() for each in memory]
        results = run(text, [*memory, *new], ends)
        for at, (whole, was, result) in enumerate(zip(memory, before, results, strict=True)):
            start, length = ends[2 * (at % 2)], ends[2 * (at % 2) + 1]
            was[:, :, start + length] = new[at % 2][:, :, 0]
            assert torch.equal(whole, was)
            assert lies_at(result, whole[:, :, start:]) and result.shape[2] == length + 1


@pytest.mark.parametrize("dtype", lower._DTYPES, ids=str)
def test_dtypes_are_the_numbers_torch_gives_them(dtype: torch.dtype) -> None:
    text = f"slots 1 0 2\nop aten::_to_copy default 2 0 t 0 1 {lower.constant(dtype)} -> 1\nreturn 1"
    (found,) = run(text, [torch.ones(2)], [])
    assert found.dtype is dtype


ROOM = """slots 3 1 6
kv_buffer 0 1 1 3 1 -> 4
append 1 y 4 i 2 2 1 -> 5
return 5"""


def test_what_is_appended_lies_behind_what_is_kept() -> None:
    memory = torch.zeros(2, 8, 3)
    memory[:, :2] = 1
    (found,) = run(ROOM, [memory[:, :2], memory, torch.full((2, 1, 3), 7.0)], [2])
    assert found.shape == (2, 3, 3) and lies_at(found, memory)
    assert found[:, 2].eq(7).all() and memory[:, 3:].eq(0).all()


def test_how_much_room_there_has_to_be_may_be_a_number_of_the_run() -> None:
    text = """slots 3 2 7
kv_buffer 0 1 1 3 y 4 -> 5
append 1 y 5 i 2 2 1 -> 6
return 6"""
    memory = torch.zeros(2, 8, 3)
    for count in (1, 4, 6):
        (found,) = run(text, [memory[:, :2], memory, torch.full((2, count, 3), 7.0)], [2, count])
        assert found.shape == (2, 2 + count, 3) and found[:, 2:].eq(7).all()
    assert run(text, [memory[:, :2], memory, torch.full((2, 7, 3), 1.0)], [2, 7]) == []
    assert memory[:, 2:].eq(7).all()
    for count in ("y 7", "y", "z"):
        with pytest.raises(ValueError, match="record the step again"):
            ops._program_load(text.replace("y 4", count), [])


@pytest.mark.parametrize("width", [3, 5000])
def test_what_is_appended_may_lie_otherwise(width: int) -> None:
    # Heads of a token side by side, two tokens; many bytes at once; values of another dtype.
    text = "slots 2 0 3\nappend 0 i 1 i 2 1 2 -> 2\nreturn 2"
    for dtype in (torch.float32, torch.bfloat16):
        memory, new = torch.zeros(2, 4, 8, width), torch.randn(2, 2, 4, width, dtype=dtype).transpose(1, 2)
        (found,) = run(text, [memory, new], [])
        assert torch.equal(found, memory[:, :, 1:5]) and lies_at(found, memory[:, :, 1:])
        assert torch.equal(found[:, :, 2:], new.float()) and memory[:, :, :3].eq(0).all()
    with pytest.raises(ValueError, match="are not within 8"):
        run(text.replace("i 2 1", "i 6 1"), [memory, new], [])


def test_an_alias_shows_a_part_in_another_shape() -> None:
    text = "slots 1 0 2\nalias 0 6 2 2 3 1 2 -> 1\nreturn 1"
    x = torch.arange(24.0).reshape(4, 6)
    (found,) = run(text, [x[1:]], [])
    assert torch.equal(found, x[2].view(3, 2).t()) and found.data_ptr() == x[2].data_ptr()
    with pytest.raises(ValueError, match="not contiguous"):
        run(text, [x.t()], [])


@pytest.mark.parametrize("fault", ["end", "full", "other memory", "other shape", "other dtype"])
def test_a_run_stops_before_it_writes_what_is_not_its_own(fault: str) -> None:
    memory = torch.zeros(2, 2 if fault == "full" else 8, 3)
    kept, end = memory[:, :2], 3 if fault == "end" else 2
    if fault == "other memory":
        kept = kept.clone()
    elif fault == "other shape":
        kept = memory[:1, :2]
    elif fault == "other dtype":
        kept = memory.view(torch.int32)[:, :2]
    assert run(ROOM, [kept, memory, torch.ones(2, 1, 3)], [end]) == []
    assert stopped_by("the cache's keys or values")
    assert memory.eq(0).all()


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        ("like 0 6 cpu 2 2 -1 -1 1", torch.ones(2, 5), torch.ones(3, 5)),
        ("like 0 6 cpu 2 2 -1 -1 1", torch.ones(2, 5), torch.ones(5, 2).t()),
        ("like 0 6 cpu 2 2 -1 -1 1", torch.ones(2, 1), torch.ones(2, 1).double()),
        ("like 0 6 cpu 2 2 -1 -1 1", torch.ones(2, 1), torch.ones(2)),
        ("size 0 1 1", torch.ones(2, 4), torch.ones(2, 5)),
        ("expect 0 1", torch.tensor(True), torch.tensor(False)),
        ("expect 0 0", torch.tensor([0.0]), torch.tensor([0.1])),
    ],
)
def test_a_check_stops_the_run(check: str, right: torch.Tensor, wrong: torch.Tensor) -> None:
    text = f"slots 1 1 2\n{check}\nreturn 0"
    assert run(text, [right], [4])[0] is right
    assert run(text, [wrong], [4]) == []
    assert stopped_by("the model decides" if check.startswith("expect") else "an argument")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slots 0 0 0\nfly 1", "no instruction"),
        ("slots 0 0 x", "no number"),
        ("slots 0 0 1\nop aten::relu default 1 0", "ends too early"),
        ("slots 1 0 2\nop aten::relu default 1 4 t 0 -> 1", "takes no argument"),
        ("slots 1 0 2\nop aten::relu default 1 0 q 0 -> 1", "no kind of value"),
    ],
)
def test_a_text_that_is_no_program_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops._program_load(text, [])


def test_the_wrong_number_of_inputs_is_refused() -> None:
    with loaded("slots 1 0 1\nreturn 0") as number:
        with pytest.raises(ValueError, match="takes 1 tensors"):
            ops._program_run(number, [], [])
    with pytest.raises(ValueError, match="no program"):
        ops._program_run(number, [torch.ones(1)], [])


@pytest.mark.parametrize(
    "text",
    [
        "alias 7 0 1 1 1 -> 2",
        "alias 0 0 1 1 1 -> 7",
        "alias 0 -1 1 1 1 -> 2",
        "alias 0 0 2 4611686018427387904 3 4611686018427387904 1 -> 2",
        "op aten::neg default 1 0 t 9 -> 2",
        "op aten::neg default 1 0 t 0 -> 9",
        "op aten::neg default 99999999 0 t 0 -> 2",
        "op aten::cat default 1 0 [ 99999999 t 0 -> 2",
        "op aten::cat default 1 0 [ 1 [ 1 [ 1 [ 1 [ 1 t 0 -> 2",
        "op aten::div Tensor_mode 3 0 t 0 1 t 0 2 s 99999999999:x -> 2",
        "append 0 y 9 y 1 0 0 -> 2",
        "drop 3",
        "item 0 -1 -> 2",
    ],
)
def test_what_lies_outside_of_a_program_is_no_program(text: str) -> None:
    with pytest.raises((ValueError, TypeError), match="record the step again"):
        ops._program_load(f"slots 1 1 3\n{text}\nreturn 2", [])
    with pytest.raises(ValueError, match="record the step again"):
        ops._program_load("slots 1 1 3\nreturn 3", [])
    with pytest.raises(ValueError, match="record the step again"):
        ops._program_load("slots 9000000000000000000 9000000000000000000 3\nreturn 2", [])


def test_a_view_shows_no_more_than_the_tensor() -> None:
    text = "slots 1 0 2\nalias 0 2 2 2 2 2 1 -> 1\nreturn 1"
    (found,) = run(text, [torch.arange(6.0)], [])
    assert found.tolist() == [[2, 3], [4, 5]]
    with pytest.raises(ValueError, match="5 elements, and another view of it shows 6"):
        run(text, [torch.arange(5.0)], [])


def test_a_profile_names_each_instruction_and_what_it_moves() -> None:
    x, table = torch.ones(2, 3), torch.ones(50, 4)
    index = torch.tensor([1, 7])
    lines = [
        "slots 2 1 6",
        "op aten::mul Tensor 2 0 t 1 1 t 1 -> 4",
        "op aten::embedding default 2 0 t 0 1 t 2 -> 5",
        "add y 3 i 1 -> 3",
        "return 4 5",
    ]
    with loaded("\n".join(lines), table) as number:
        ops._program_begin_profile()
        for _ in range(2):
            ops._program_run(number, [x, index], [0])
        names, operands, numbers = ops._program_end_profile()
        ops._program_run(number, [x, index], [0])
    assert names == ["aten::mul", "aten::embedding", "add"] * 2
    assert operands == ["Float [2, 3]", "Long [2]", ""] * 2
    runs, begins, ends, moved = (numbers[at::4] for at in range(4))
    assert runs == [1, 1, 1, 2, 2, 2]
    # Twice read and once written; two indices and two rows of four; none of a number.
    assert moved == [3 * 24, 16 + 32, 0] * 2
    assert all(map(int.__le__, begins, ends)) and all(map(int.__le__, ends, begins[1:]))


def test_what_gives_views_moves_nothing_and_an_expanded_tensor_is_what_lies_in_memory() -> None:
    x = torch.ones(4, 6)
    program = [
        "slots 2 0 8",
        "op aten::permute default 2 0 t 0 1 [ 2 i 1 i 0 -> 2",
        "op aten::expand default 2 0 t 0 1 [ 3 i 10 i 4 i 6 -> 3",
        "op aten::split Tensor 3 0 t 0 1 i 2 2 i 0 -> 4",
        "op aten::sum default 1 0 t 3 -> 5",
        "op aten::add_ Tensor 2 0 t 0 1 t 0 -> 6",
        "op aten::to_sparse default 1 0 t 0 -> 7",
        "append 0 i 0 i 3 1 0 -> 7",
        "return 5",
    ]
    with loaded("\n".join(program)) as number:
        ops._program_begin_profile()
        ops._program_run(number, [x, torch.ones(1, 6)], [])
        names, operands, numbers = ops._program_end_profile()
    found = dict(zip(names, numbers[3::4], strict=True))
    whole = x.nbytes
    assert found == {
        "aten::permute": 0,
        "aten::expand": 0,
        "aten::split": 0,
        "aten::sum": whole + 4,
        "aten::add_": 3 * whole,
        "aten::to_sparse": whole,
        "append": 2 * 24,
    }
    assert operands[:3] == ["", "", ""]


def test_a_profile_that_was_not_begun_is_refused_and_a_stopped_run_is_in_it() -> None:
    with pytest.raises(ValueError, match="no profile was begun"):
        ops._program_end_profile()
    with loaded("slots 1 0 2\nop aten::neg default 1 0 t 0 -> 1\nexpect 0 1\nreturn 1") as number:
        ops._program_begin_profile()
        assert not ops._program_run(number, [torch.zeros(1)], [])
        names, _, numbers = ops._program_end_profile()
        assert names == ["aten::neg"] and numbers[0] == -1  # below zero: it is no run that served

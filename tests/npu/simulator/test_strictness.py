"""What faults on hardware is an error here: wrong objects and addresses, no workspace, absent operators."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch_npu
from cann_sim import environment
from cann_sim.faults import failing, wrong
from cann_sim.operators import operators
from cann_sim.trace import recording
from npu.simulator.ctypes_acl import Call, create_tensor, error_message, library
from npu.simulator.programs import output

BAD_PARAMETER, RUNTIME_ERROR = 161002, 361001


@pytest.fixture
def ones() -> torch.Tensor:
    return torch.ones(8).npu()


def test_a_call_by_hand_computes(ones: torch.Tensor) -> None:
    out = torch.zeros(8).npu()
    call = Call("aclnnNeg", [create_tensor(ones), create_tensor(out)])
    assert (call.prepare(), call.workspace, call.launch()) == (0, 0, 0)
    assert out.tolist() == [-1.0] * 8


def test_an_object_that_was_destroyed_is_refused(ones: torch.Tensor) -> None:
    first, out = create_tensor(ones), create_tensor(torch.zeros(8).npu())
    assert library().aclDestroyTensor(ctypes.c_void_p(first)) == 0
    assert Call("aclnnNeg", [first, out]).prepare() == BAD_PARAMETER
    assert "no live acl object" in error_message()
    assert library().aclDestroyTensor(ctypes.c_void_p(first)) != 0  # a second time


def test_an_object_of_another_type_is_refused(ones: torch.Tensor) -> None:
    numbers = library().aclCreateIntArray
    numbers.restype = ctypes.c_void_p
    array = numbers((ctypes.c_int64 * 1)(1), ctypes.c_uint64(1))
    assert Call("aclnnNeg", [array, create_tensor(ones)]).prepare() == BAD_PARAMETER
    assert "is a int array, a tensor is expected" in error_message()


def test_arguments_live_until_phase_two_in_copies(ones: torch.Tensor) -> None:
    out = torch.zeros(8).npu()
    handles = [create_tensor(ones), create_tensor(out)]
    call = Call("aclnnNeg", list(handles))
    assert call.prepare() == 0
    for handle in handles:
        library().aclDestroyTensor(ctypes.c_void_p(handle))
    assert call.launch() == 0
    assert out.tolist() == [-1.0] * 8


def test_memory_of_the_host_is_refused(ones: torch.Tensor) -> None:
    host = torch.ones(8)
    call = Call("aclnnNeg", [create_tensor(host), create_tensor(ones)])
    assert call.prepare() == 0
    assert call.launch() == RUNTIME_ERROR
    assert "is not memory of the device" in error_message()


def test_a_tensor_that_ends_past_its_memory_is_refused(ones: torch.Tensor) -> None:
    described = create_tensor(ones, strides=[1 << 30])
    call = Call("aclnnNeg", [described, create_tensor(torch.zeros(8).npu())])
    assert call.prepare() == 0
    assert call.launch() == RUNTIME_ERROR


def test_an_executor_runs_once_and_only_its_own_operator(ones: torch.Tensor) -> None:
    call = Call("aclnnNeg", [create_tensor(ones), create_tensor(torch.zeros(8).npu())])
    assert call.prepare() == 0
    assert Call("aclnnAbs", [], executor=call.executor).launch() == BAD_PARAMETER
    assert call.launch() == 0
    assert call.launch() == BAD_PARAMETER


def test_a_workspace_that_is_asked_for_must_be_given(ones: torch.Tensor) -> None:
    a, out = torch.ones(4, 4).npu(), torch.zeros(4, 4).npu()
    arguments = [create_tensor(a), create_tensor(a), create_tensor(out), ctypes.c_int8(0)]
    codes = []
    for workspace in (
        None,
        torch.empty(16, dtype=torch.uint8).npu(),
        torch.empty(1 << 16, dtype=torch.uint8).npu(),
    ):
        call = Call("aclnnMm", list(arguments))
        assert call.prepare() == 0
        assert call.workspace > 0
        codes.append(call.launch(workspace))
    assert codes == [BAD_PARAMETER, BAD_PARAMETER, 0]
    assert out[0, 0].item() == 4
    call = Call("aclnnMm", list(arguments))
    call.prepare()
    assert call.launch(torch.empty(1 << 16, dtype=torch.uint8)) == RUNTIME_ERROR  # of the host


def test_a_workspace_is_overwritten(ones: torch.Tensor) -> None:
    a, out = torch.ones(4, 4).npu(), torch.zeros(4, 4).npu()
    workspace = torch.zeros(1 << 16, dtype=torch.uint8).npu()
    call = Call("aclnnMm", [create_tensor(a), create_tensor(a), create_tensor(out), ctypes.c_int8(0)])
    call.prepare()
    call.launch(workspace)
    assert workspace[: call.workspace].eq(0xA5).all()


def test_a_copy_of_a_host_pointer_as_if_it_were_of_a_device_is_refused() -> None:
    host = torch.ones(8)
    to = torch.zeros(8)
    copy = ctypes.CDLL("libascendcl.so").aclrtMemcpy
    arguments = [ctypes.c_void_p(to.data_ptr()), ctypes.c_size_t(32), ctypes.c_void_p(host.data_ptr())]
    device_to_host = 2
    assert copy(*arguments, ctypes.c_size_t(32), ctypes.c_int(device_to_host)) != 0
    assert "not where its kind says" in error_message()


def test_an_error_code_can_be_planted(ones: torch.Tensor) -> None:
    with failing("aclnnNeg:561002"), pytest.raises(RuntimeError, match="561002"):
        torch.neg(ones)
    assert torch.neg(ones).tolist() == [-1.0] * 8
    with failing("aclnnN*@2:361001:2"):
        torch.neg(ones)
        with pytest.raises(RuntimeError, match="361001"):
            torch.neg(ones)
        torch.neg(ones)


def test_wrong_numbers_can_be_planted(ones: torch.Tensor) -> None:
    with wrong("aclnnNeg"):
        assert torch.neg(ones).tolist() != [-1.0] * 8
        assert torch.abs(ones).tolist() == [1.0] * 8
    assert torch.neg(ones).tolist() == [-1.0] * 8


def test_every_operator_says_the_kinds_of_its_arguments() -> None:
    every = operators()
    assert every["aclnnRmsNorm"] == ["tensor", "tensor", "double", "tensor", "tensor"]
    assert every["aclnnMm"] == ["tensor", "tensor", "tensor", "int8"]
    assert all(every.values())
    assert len(every) > 400


def bare(**choice) -> dict[str, str]:
    """The environment of a program that loads the libraries itself."""
    return environment(**choice) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


HAS = "import ctypes; o = ctypes.CDLL('libopapi.so'); print([hasattr(o, n) for n in {names!r}])"


@pytest.mark.parametrize(
    "release, without, there",
    [
        pytest.param("8.1.RC1", (), [True, False, True], id="older release"),
        pytest.param("8.5.0", (), [True, True, True], id="newer release"),
        pytest.param("8.5.0", ("aclnnSwiGlu",), [True, True, False], id="without one"),
    ],
)
def test_a_release_has_no_symbol_of_operators_that_came_later(
    release: str, without: tuple[str, ...], there: list[bool]
) -> None:
    code = HAS.format(names=["aclnnRmsNorm", "aclnnClippedSwiglu", "aclnnSwiGlu"])
    assert output(code, bare(release=release, without=without)) == [str(there)]


def test_a_soc_refuses_what_it_does_not_run() -> None:
    code = (
        "import torch, torch_npu\nx = torch.ones(2, 64).npu()\nprint(torch.npu.get_device_name())\n"
        "print(torch_npu.npu_rms_norm(x, x[0])[0].shape)\n"
        "try: torch.nn.functional.layer_norm(x, (64,))\n"
        "except RuntimeError as error: print(161002 if '161002' in str(error) else error)"
    )
    assert output(code, bare(soc="310P")) == ["Ascend310P3", "torch.Size([2, 64])", "161002"]


def test_a_broken_library_cannot_be_loaded() -> None:
    code = "import ctypes\ntry: ctypes.CDLL('libopapi.so')\nexcept OSError as error: print('refused')"
    assert output(code, bare(broken=True)) == ["refused"]


def test_the_launch_says_what_aliases_what(ones: torch.Tensor) -> None:
    with recording() as trace:
        ones.mul_(2)
        torch_npu.npu_swiglu(torch.cat([ones, ones]))
    inplace = trace.launches[0]
    assert inplace.op == "aclnnInplaceMuls"
    assert [tensor.address for tensor in inplace.tensors("inout")] == [ones.data_ptr()]

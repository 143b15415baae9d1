"""``examples/custom_op`` on an NPU: as an operator of CANN, and as one of the user's own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import custom_op

#: What an AscendC project makes, as far as a caller can tell: a library of its own with the two phases.
OWN_OPERATOR = """
#include <dlfcn.h>
#include <cstdint>
#include <cstdlib>
#include <fstream>
namespace {
template <class F> F* found(const char* name) {
  return reinterpret_cast<F*>(dlsym(dlopen("libopapi.so", RTLD_NOW), name));
}
}
extern "C" int aclnnMixGetWorkspaceSize(
    void* a, void* b, void* weight, void* out, uint64_t* size, void** executor) {
  return found<int(void*, void*, void*, void*, uint64_t*, void**)>("aclnnLerpGetWorkspaceSize")(
      a, b, weight, out, size, executor);
}
extern "C" int aclnnMix(void* workspace, uint64_t size, void* executor, void* stream) {
  std::ofstream(std::getenv("MIX_CALLS"), std::ios::app) << "called\\n";
  return found<int(void*, uint64_t, void*, void*)>("aclnnLerp")(workspace, size, executor, stream);
}
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("custom_op")
    return custom_op.build(folder, options=("-DCMAKE_UNITY_BUILD=ON",))  # torch's headers are read less often


def test_op_runs_as_one_operator_of_cann(example: Path, tmp_path: Path) -> None:
    row, printed = custom_op.status(example, "npu", SIMCANN_TRACE=str(tmp_path / "trace"))
    assert (row["state"], row["calls"], row["fallbacks"]) == ("applied", 4, {})
    assert float(re.search(r"largest difference: (\S+)", printed)[1]) < 1e-6
    assert (tmp_path / "trace").read_text().count("aclnnLerp") >= 4


@pytest.mark.full  # the example is compiled again, against all of torch_npu's headers
def test_op_runs_as_an_operator_of_the_users_own(example: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(example, tmp_path / "changed")
    source = (changed / "mix_npu.cpp").read_text()
    assert source.count('"aclnnLerp"') == 1
    (changed / "mix_npu.cpp").write_text(source.replace('"aclnnLerp"', '"aclnnMix"'))
    custom_op.rebuild(changed)
    vendor = tmp_path / "vendor" / "op_api" / "lib"
    vendor.mkdir(parents=True)
    (tmp_path / "own.cpp").write_text(OWN_OPERATOR)
    command = ["c++", "-shared", "-fPIC", tmp_path / "own.cpp", "-o", vendor / "libcust_opapi.so", "-ldl"]
    subprocess.run(command, check=True)
    calls = tmp_path / "calls"
    row, printed = custom_op.status(
        changed, "npu", ASCEND_CUSTOM_OPP_PATH=str(tmp_path / "vendor"), MIX_CALLS=str(calls)
    )
    assert (row["state"], row["calls"]) == ("applied", 4) and calls.read_text() == "called\n" * 4
    assert float(re.search(r"largest difference: (\S+)", printed)[1]) < 1e-6


@pytest.mark.full
def test_op_runs_beside_a_torch_npu_without_the_calls_for_libraries(tmp_path: Path) -> None:
    """As 2.9.0 and 2.10.0: CANN is called as their own operators call it, with and without its cache."""
    example = custom_op.build(tmp_path, options=("-DLITEBOOST_OWN_TORCH_NPU_API=ON",))
    library = example / "build" / "mix_npu.so"
    names = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True).stdout
    assert re.search(r" [tT] ConvertType\(", names)
    for cache in ("0", "1"):
        row, printed = custom_op.status(example, "npu", SIMCANN_EXEC_CACHE=cache)
        assert (row["state"], row["calls"], row["fallbacks"]) == ("applied", 4, {})
        assert float(re.search(r"largest difference: (\S+)", printed)[1]) < 1e-6

"""Mistakes that a call of an aclnn operator can contain, planted: each is caught where the op is first used.

A vendor's library is looked up before CANN's. So one that passes a call on with the mistake in it makes our
kernel as wrong as if the mistake were ours. The result is right all the same: the reference runs.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from liteboost_adaptor import config, native_npu

PREAMBLE = """
#include <dlfcn.h>
#include <cstdint>
using P = void*;
template <class... A> int pass_on(const char* name, A... arguments) {
  return reinterpret_cast<int (*)(A...)>(dlsym(dlopen("libopapi.so", RTLD_NOW), name))(arguments...);
}
#define PHASE_TWO(OP) \\
  extern "C" int OP(P space, uint64_t bytes, P executor, P stream) { \\
    return pass_on(#OP, space, bytes, executor, stream); \\
  }
"""
ROPE = """
PHASE_TWO(aclnnRotaryPositionEmbedding)
extern "C" int aclnnRotaryPositionEmbeddingGetWorkspaceSize(
    P x, P cos, P sin, int64_t mode, P out, uint64_t* bytes, P* executor) {
  return pass_on("aclnnRotaryPositionEmbeddingGetWorkspaceSize", x, %s, out, bytes, executor);
}
"""
RMS_NORM = """
PHASE_TWO(aclnnRmsNorm)
extern "C" int aclnnRmsNormGetWorkspaceSize(
    P x, P weight, double eps, P out, P rstd, uint64_t* bytes, P* executor) {
  %s
}
"""
KV_APPEND = """
PHASE_TWO(aclnnScatterPaKvCache)
extern "C" int aclnnScatterPaKvCacheGetWorkspaceSize(
    P key, P keys, P slots, P value, P values, P lens, P offset, P lengths, P mode, P scatter, P strides,
    P offsets, uint64_t* bytes, P* executor) {
  return pass_on("aclnnScatterPaKvCacheGetWorkspaceSize", %s, lens, offset, lengths, mode, scatter,
                 strides, offsets, bytes, executor);
}
"""
PASS_ON = 'pass_on("aclnnRmsNormGetWorkspaceSize", x, weight, eps, out, %s, bytes, executor)'

#: (op, mistake): the library, and what the refusal says.
PLANTS = {
    ("rope", "cos and sin swapped"): (
        ROPE % "sin, cos, mode",
        "differs from its reference (fp32 half) in ",
    ),
    ("rope", "wrong layout constant"): (
        ROPE % "cos, sin, 1 - mode",
        "differs from its reference (fp32 half) in ",
    ),
    ("kv_append", "key and value exchanged"): (
        KV_APPEND % "value, keys, slots, key, values",
        "differs from its reference (bf16) in ",
    ),
    ("kv_append", "one of the caches twice"): (
        KV_APPEND % "key, keys, slots, key, keys",
        "differs from its reference (bf16) in ",
    ),
    ("rms_norm", "missing output tensor"): (
        RMS_NORM % f"return {PASS_ON % 'P(nullptr)'};",
        "none of the cases to compare it by is served (fp32): "
        "liteboost: aclnnRmsNorm refuses its arguments with status 16100",
    ),
    # The caller puts a double into the register of which the callee takes the lower half.
    ("rms_norm", "double passed for float"): (
        (RMS_NORM % f"return {PASS_ON % 'rstd'};")
        .replace("double eps", "float eps")
        .replace(" eps, out", " double(eps), out"),
        "differs from its reference (fp32) in 14 of 14",
    ),
    ("rms_norm", "stale executor after a shape change"): (
        RMS_NORM
        % f"""
  static P kept = nullptr;
  if (kept == nullptr) {{
    const int status = {PASS_ON % "rstd"};
    if (status != 0) return status;
    pass_on("aclSetAclOpExecutorRepeatable", *executor);
    kept = *executor;
  }}
  *executor = kept;
  *bytes = 0;
  return 0;""",
        "differs from its reference (fp32) in 1",
    ),
}

#: Mistakes in operators of their own, which one process meets. Those of one operator are apart.
TOGETHER = (
    (
        ("rope", "cos and sin swapped"),
        ("kv_append", "key and value exchanged"),
        ("rms_norm", "missing output tensor"),
    ),
    (
        ("rope", "wrong layout constant"),
        ("kv_append", "one of the caches twice"),
        ("rms_norm", "double passed for float"),
    ),
    (("rms_norm", "stale executor after a shape change"),),
)

#: With strides that neither `clone` nor `npu` of torch_npu 2.9.0 keeps.
CALLS = {
    "rms_norm": (
        "x, weight = torch.randn(2, 5, 64), torch.rand(64)",
        "torch.ops.{namespace}.rms_norm(x, weight, 1e-6)",
    ),
    "rope": (
        "q, k = torch.randn(2, 4, 7, 64), torch.randn(2, 2, 7, 64)\n"
        "angles = torch.rand(2, 7, 32).repeat(1, 1, 2)\ncos, sin = angles.cos(), angles.sin()",
        "torch.cat(torch.ops.{namespace}.rope(q, k, cos, sin), dim=1)",
    ),
    "kv_append": (
        "caches = torch.randn(2, 2, 16, 4, 64).bfloat16().transpose(2, 3)\n"
        "new = torch.randn(2, 2, 4, 3, 64).bfloat16()\n"
        "slots = torch.tensor([[3, 17, 0], [20, 5, 31]])\n"
        "def written(op):\n    to = [each.transpose(1, 2).clone().transpose(1, 2) for each in caches]\n"
        "    op(*to, *new, slots)\n"
        "    return torch.cat(to)",
        "written(torch.ops.{namespace}.kv_append)",
    ),
}

PROGRAM = """
import json, torch, torch_npu
from liteboost_adaptor import native_npu
from liteboost_adaptor.selftest.compare import place

assert native_npu.load().loaded
torch.set_grad_enabled(False)
found = {{}}
for op, (inputs, reference, ours) in {calls!r}.items():
    torch.manual_seed(0)
    values = {{"torch": torch}}
    exec(inputs, values)
    expected = eval(reference, values)
    values |= {{name: place(value, "npu") for name, value in values.items() if torch.is_tensor(value)}}
    error = (eval(ours, values).cpu() - expected).abs().max().item()
    own = [[each for each in all if each[0] == op] for all in (native_npu.verdicts(), native_npu.calls())]
    found[op] = [*own, error]
print(json.dumps(found))
"""

#: verdicts, calls, and the error of the result
Found = tuple[list[list[str]], list[list[object]], float]


def run(folder: Path, plants: dict[str, str], ops: Iterable[str], **environment: str) -> dict[str, Found]:
    """What one process finds that calls each op once.

    Args:
        plants: Op -> what is planted for it, all in one library.
        environment: Changes of it.
    """
    variables = {"XDG_CACHE_HOME": str(folder / "cache"), "TASK_QUEUE_ENABLE": "0", **environment}
    if plants:
        vendor = folder / "vendor" / "op_api" / "lib"
        vendor.mkdir(parents=True)
        (folder / "plant.cpp").write_text(PREAMBLE + "".join(plants.values()))
        compiler = ["c++", "-std=c++17", "-shared", "-fPIC", folder / "plant.cpp", "-ldl"]
        subprocess.run([*compiler, "-o", vendor / "libcust_opapi.so"], check=True)
        variables["ASCEND_CUSTOM_OPP_PATH"] = str(folder / "vendor")
    spelled = {
        op: (
            CALLS[op][0],
            *(CALLS[op][1].format(namespace=name) for name in ("liteboost_reference", "liteboost")),
        )
        for op in ops
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(calls=spelled)],
        env=config.child_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Found] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_served(found: dict[str, Found]) -> None:
    for op, (verdicts, calls, error) in found.items():
        assert [verdict[2] for verdict in verdicts] == [""] and calls == [[op, "", 1]] and error < 1e-5, op


def with_kernels() -> list[str]:
    """The ops that have one."""
    return [op for op in CALLS if op not in native_npu.load().references]


def test_unplanted_ops_are_served(tmp_path: Path) -> None:
    check_served(run(tmp_path, {}, with_kernels()))


@pytest.mark.parametrize("mistakes", TOGETHER, ids=lambda mistakes: ", ".join(name for _, name in mistakes))
def test_mistakes_are_refused_with_figures_and_the_results_are_right(
    mistakes: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    planted = {op: PLANTS[op, mistake] for op, mistake in mistakes if op in with_kernels()}
    found = run(tmp_path, {op: plant for op, (plant, _) in planted.items()}, planted)
    for op, (_, words) in planted.items():
        ((found_op, _, reason),), calls, error = found[op]
        assert found_op == op and words in reason
        assert calls == [[op, reason, 1]] and error < 1e-5


def test_every_mistake_is_planted() -> None:
    assert sorted(mistake for mistakes in TOGETHER for mistake in mistakes) == sorted(PLANTS)


def test_cached_executors_serve_calls_of_other_shapes(tmp_path: Path) -> None:
    check_served(run(tmp_path, {}, with_kernels(), SIMCANN_EXEC_CACHE="1"))


def test_operator_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    (verdict,), calls, error = run(tmp_path, {}, ["rms_norm"], SIMCANN_WRONG="aclnnRmsNorm")["rms_norm"]
    assert "differs from its reference (fp32) in 14 of 14" in verdict[2]
    assert calls == [["rms_norm", verdict[2], 1]] and error < 1e-5


# ---- the types of arguments, which are compared without a call ----

#: How the simulator spells what we call otherwise.
SPELLED = {"tensors": "tensor_list", "integers": "int_array", "text": "string", "dtype": "int32"}


def differences(ours: dict[str, str], theirs: dict[str, str | None]) -> list[str]:
    """Operators whose signature is not the one they are called with."""
    spelled = {
        name: ",".join(SPELLED.get(kind, kind) for kind in text.split(",")) for name, text in ours.items()
    }
    return [
        f"{name}: called with ({text}), has ({theirs[name]})"
        for name, text in sorted(spelled.items())
        if theirs[name] is not None and theirs[name].replace("dtype", "int32") != text
    ]


def of_simulator(names: list[str]) -> dict[str, str | None]:
    library = ctypes.CDLL("libopapi.so")
    if not hasattr(library, "simcann_signature"):
        pytest.skip("needs the simulator, whose operators know their signatures")
    library.simcann_signature.restype = ctypes.c_char_p
    found = {name: library.simcann_signature(name.encode()) for name in names}
    return {name: text.decode() if text is not None else None for name, text in found.items()}


def test_every_operator_is_called_with_its_own_types() -> None:
    native_npu.load()
    found = native_npu.operators()
    theirs = of_simulator(list(found))
    known = {name for name, text in theirs.items() if text is not None}
    # What the simulator does not have is never called on it.
    assert known >= {name for name, facts in found.items() if facts["available"]} and len(known) >= 4
    assert differences({name: facts["signature"] for name, facts in found.items()}, theirs) == []


def test_double_passed_for_float_is_a_difference() -> None:
    native_npu.load()
    ours = {name: found["signature"] for name, found in native_npu.operators().items()}
    theirs = of_simulator(list(ours))
    assert "double" in theirs["aclnnRmsNorm"]
    planted = {**theirs, "aclnnRmsNorm": theirs["aclnnRmsNorm"].replace("double", "float")}
    (difference,) = differences(ours, planted)
    assert difference.startswith("aclnnRmsNorm: called with (tensor,tensor,double,")

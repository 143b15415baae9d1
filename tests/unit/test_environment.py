"""Level 0: a torch_npu that cannot be loaded, what is found of Ascend, and what doctor says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import liteboost_adaptor
from liteboost_adaptor import native
from liteboost_adaptor.environment import ascend, backend_autoload, diagnosis, machine

FAULT = "libhccl.so: cannot open shared object file: No such file or directory"


@pytest.fixture
def torch_npu(tmp_path: Path) -> Path:
    """A folder with a torch_npu as the wheel installs it, on a machine without CANN."""
    package = tmp_path / "site" / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise ImportError({FAULT!r})\n")
    info = tmp_path / "site" / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path / "site"


def run(code: str, *places: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [*map(str, places), os.environ.get("PYTHONPATH", ""), os.getcwd()]
    clean = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_torch_alone_fails_where_torch_npu_has_no_cann(torch_npu: Path) -> None:
    done = run("import torch", torch_npu)
    assert done.returncode != 0 and "Failed to load the backend extension: torch_npu" in done.stderr


def test_our_line_first_makes_torch_and_transformers_importable(torch_npu: Path) -> None:
    code = """
        import os
        import liteboost_adaptor
        import torch
        import transformers
        from transformers.models.llama import modeling_llama
        from transformers.utils import is_torch_npu_available
        from accelerate.utils import is_npu_available
        assert not is_torch_npu_available() and not is_npu_available()
        assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
        (note,) = liteboost_adaptor.environment.notes()
        print(note)
    """
    done = run(code, torch_npu)
    assert done.returncode == 0, done.stderr
    for part in ("torch_npu 2.13.0 is installed", "libascendcl.so", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert part in done.stdout
    assert done.stderr.count("CANN cannot be loaded") == 1


def test_a_process_started_by_ours_is_served_too(torch_npu: Path) -> None:
    code = """
        import liteboost_adaptor, subprocess, sys
        child = "import liteboost_adaptor, transformers.models.llama.modeling_llama as m; print(m.__name__)"
        print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
    """
    assert "modeling_llama" in run(code, torch_npu).stdout


def test_an_autoload_asked_for_is_left_to_torch(torch_npu: Path) -> None:
    code = "import liteboost_adaptor\nassert not liteboost_adaptor.environment.notes()\nimport torch"
    done = run(code, torch_npu, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.returncode != 0 and "Failed to load the backend extension: torch_npu" in done.stderr


def test_torch_imported_first_with_the_autoload_off(torch_npu: Path) -> None:
    code = """
        import torch, liteboost_adaptor
        from transformers.models.llama import modeling_llama
    """
    assert run(code, torch_npu, TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0


def test_release_restores_what_was_there(torch_npu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(torch_npu))
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setattr(ascend, "cann_fault", lambda: FAULT)
    with pytest.warns(RuntimeWarning, match="CANN cannot be loaded"):
        sentence = backend_autoload.prepare()
    try:
        assert sentence is not None and FAULT in sentence
        assert sys.modules["torch_npu"] is None and os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
        assert backend_autoload.prepare() is None
    finally:
        backend_autoload.release()
    assert "torch_npu" not in sys.modules and "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ
    assert backend_autoload.notes() == []


@pytest.mark.parametrize("reason", ["not installed", "CANN is there"])
def test_nothing_is_done_where_nothing_is_wrong(
    reason: str, torch_npu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "CANN is there":
        monkeypatch.syspath_prepend(str(torch_npu))
        monkeypatch.setattr(ascend, "cann_fault", lambda: None)
    elif ascend.torch_npu_installed():
        pytest.skip("torch_npu is installed here")
    before = dict(os.environ)
    assert backend_autoload.prepare() is None
    assert "torch_npu" not in sys.modules and dict(os.environ) == before


def test_folder_of_cann_is_named_with_its_set_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert ascend.cann_folder() != str(tmp_path)
    (tmp_path / "set_env.sh").touch()
    assert ascend.cann_folder() == str(tmp_path)
    assert f"source {tmp_path}/set_env.sh" in backend_autoload.explanation(FAULT)


def test_survey_imports_neither_torch_nor_torch_npu() -> None:
    code = """
        import sys
        from liteboost_adaptor.environment import ascend
        print(ascend.survey(), "torch" in sys.modules, "torch_npu" in sys.modules)
    """
    done = run(code)
    assert done.stdout.strip().endswith("False False"), done.stderr


def test_instruction_sets_agree_with_the_kernels() -> None:
    library = native.find()
    if library is None or library.reason is not None:
        pytest.skip("needs the compiled kernels")
    code = """
        from liteboost_adaptor import native
        native.load()
        import torch
        print(*torch.ops.liteboost._isas())
    """
    done = run(code, ATEN_CPU_CAPABILITY="")
    built = library.build_info["isas"]
    assert done.stdout.split() == [isa for isa in machine.cpu_isas() if isa in built], done.stderr


def test_instruction_sets_that_the_compiler_did_not_know_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"compiler": "GNU 10.2.1", "isas": ["baseline", "avx2"]}
    monkeypatch.setattr(machine, "cpu_isas", lambda: ["baseline", "avx2"])
    assert machine.isas_left_out(info) is None and machine.isas_left_out({}) is None
    monkeypatch.setattr(machine, "cpu_isas", lambda: ["baseline", "avx2", "amx_bf16"])
    assert machine.isas_left_out(info) == (
        "this CPU has amx_bf16, the kernels have not: GNU 10.2.1, with which they were built, knows none, "
        "or they were built for another CPU (LITEBOOST_ISAS=native)"
    )


@pytest.mark.usefixtures("native_only")
def test_what_the_compiler_left_out_is_in_status_and_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [note for note in liteboost_adaptor.status().environment if "the kernels have not" in note]
    monkeypatch.setattr(machine, "cpu_isas", lambda: ["baseline", "tiles_of_tomorrow"])
    assert [note for note in liteboost_adaptor.status().environment if "has tiles_of_tomorrow," in note]
    (problem,) = [each for each in diagnosis.diagnose().problems if "tiles_of_tomorrow" in each.what]
    assert not problem.fatal and "newer compiler" in problem.do and native.BUILD_COMMAND in problem.do


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from liteboost_adaptor.cli import main; sys.exit(main(['doctor', *{arguments!r}]))"
    places = [Path(environment.pop("place"))] if "place" in environment else []
    return run(code, *places, **environment)


def test_doctor_json_is_complete() -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["usable"] and set(report) == {
        *("usable", "versions", "cpu", "native", "ascend", "settings", "problems")
    }
    assert {"python", "torch", "torch_npu", "transformers", "wrapt"} <= set(report["versions"])
    assert report["cpu"]["isas"][0] == "baseline"
    assert report["native"]["backend"] in ("native", "reference")


def test_doctor_names_the_cause_of_a_torch_that_does_not_import(torch_npu: Path) -> None:
    done = doctor("--json", place=str(torch_npu), TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.returncode == 1
    fatal = [problem for problem in json.loads(done.stdout)["problems"] if problem["fatal"]]
    assert len(fatal) == 1 and "import torch fails" in fatal[0]["what"] and "CANN" in fatal[0]["do"]


def test_doctor_reports_torch_npu_without_cann(torch_npu: Path) -> None:
    done = doctor(place=str(torch_npu))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "torch_npu 2.13.0 is installed, but CANN cannot be loaded" in said


@pytest.mark.parametrize(
    ("versions", "what", "do"),
    [
        ({"torch": None}, "torch is not installed", "pip install 'torch>="),
        ({"torch": "2.1.0"}, "torch 2.1.0 is older than", "pip install 'torch>="),
        ({"transformers": "4.40.0"}, "transformers 4.40.0 is older than", "pip install 'transformers>="),
        ({"wrapt": None}, "wrapt is not installed", "pip install 'wrapt>="),
    ],
)
def test_versions_that_do_not_do(versions: dict[str, str | None], what: str, do: str) -> None:
    found = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "wrapt": "2.5.2", **versions}
    problems: list[diagnosis.Problem] = []
    diagnosis._check_versions(found, problems)
    (problem,) = problems
    assert problem.fatal and what in problem.what and do in problem.do


@pytest.mark.parametrize(
    ("state", "torch", "expected"),
    [
        (ascend.AscendState("2.12.0", True, None, None, ()), "2.13.0", "torch_npu==2.13.0"),
        (ascend.AscendState(None, True, None, None, ("/dev/davinci0",)), "2.13.0+cpu", "torch_npu==2.13.0"),
        (
            ascend.AscendState("2.13.0", False, FAULT, "/opt/cann", ()),
            "2.13.0",
            "source /opt/cann/set_env.sh",
        ),
        (ascend.AscendState("2.13.0", False, FAULT, None, ()), "2.13.0", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        (ascend.AscendState("2.13.0.post1", True, None, None, ()), "2.13.0+cpu", None),
        (ascend.AscendState(None, False, FAULT, None, ()), "2.13.0", None),
    ],
)
def test_ascend_problems(
    state: ascend.AscendState, torch: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend, "survey", lambda: state)
    problems: list[diagnosis.Problem] = []
    diagnosis._ascend({"torch": torch}, problems)
    if expected is None:
        assert problems == []
    else:
        assert len(problems) == 1 and expected in problems[0].do and not problems[0].fatal


@pytest.mark.parametrize(
    ("features", "isas"),
    [
        ("fp asimd evtstrm aes crc32", ["baseline"]),
        ("fp asimd atomics asimdrdm asimddp fphp asimdhp", ["baseline", "dotprod"]),
        ("fp asimd atomics asimdrdm i8mm bf16", ["baseline"]),
        ("fp asimd atomics asimdrdm asimddp sve i8mm bf16", ["baseline", "dotprod", "i8mm_bf16"]),
    ],
)
def test_instruction_sets_of_arm_cpus(
    monkeypatch: pytest.MonkeyPatch, features: str, isas: list[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(machine, "_cpuinfo", lambda: {"Features": features})
    assert machine.cpu_isas() == isas


@pytest.mark.parametrize("before", ["import liteboost_adaptor", ""], ids=["before transformers", "after"])
def test_one_thread_has_set_up_vector_math_before_models_run(before: str) -> None:
    code = f"""
        {before or "import transformers.modeling_utils"}
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        called = []

        class Calls(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                called.append(str(function))
                return function(*args, **(kwargs or {{}}))

        with Calls():
            import transformers.modeling_utils
            import liteboost_adaptor
        assert "aten.exp.default" in called, called
    """
    done = run(code)
    assert done.returncode == 0, done.stderr

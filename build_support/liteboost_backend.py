"""Build backend: scikit-build-core, and a package without compiled kernels where they cannot be built.

scikit-build-core's own ``if.failed`` retry covers a CMake that ran and failed (no compiler, no torch) but not
a CMake or a ninja/make that is absent, which ``--no-build-isolation`` allows. Here both end the same way: a
pure Python wheel, which leaves models alone and says so. ``LITEBOOST_REQUIRE_NATIVE=1`` turns
the fallback off, so that the first failure is the result. Where only the kernels for NPUs fail to compile,
those of the CPU are built without them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.errors import ScikitBuildError

build_sdist = _build.build_sdist
get_requires_for_build_sdist = _build.get_requires_for_build_sdist
get_requires_for_build_wheel = _build.get_requires_for_build_wheel
get_requires_for_build_editable = _build.get_requires_for_build_editable

ConfigSettings = dict[str, Any] | None

# Settings of scikit-build-core that leave CMake out and make the wheel one for any platform.
_PURE = {"wheel.cmake": "false", "wheel.platlib": "false"}


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: ConfigSettings = None) -> str:
    """Write the metadata, which is the same with and without the kernels (PEP 517)."""
    return _build.prepare_metadata_for_build_wheel(metadata_directory, _pure(config_settings))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: ConfigSettings = None
) -> str:
    """Write the metadata, which is the same with and without the kernels (PEP 660)."""
    return _build.prepare_metadata_for_build_editable(metadata_directory, _pure(config_settings))


def build_wheel(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with the kernels, else one without (PEP 517)."""
    return _native_or_pure(_build.build_wheel, wheel_directory, config_settings)


def build_editable(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    """Build an editable wheel with the kernels, else one without (PEP 660)."""
    return _native_or_pure(_build.build_editable, wheel_directory, config_settings)


def _native_or_pure(build: Callable[..., str], wheel_directory: str, config_settings: ConfigSettings) -> str:
    # The prepared metadata is not handed on: it names the tag of a pure wheel.
    requires_native = _requires_native()
    try:
        if requires_native:
            return build(wheel_directory, config_settings)
        return _with_or_without_npu(build, wheel_directory, config_settings)
    except (ScikitBuildError, SystemExit) as fault:
        # A CMake run that fails ends in SystemExit; a CMake or ninja that is not there in an exception.
        if requires_native:
            _say(
                "LITEBOOST_REQUIRE_NATIVE=1 asks for the compiled kernels, and they could not be built "
                f"({_reason(fault)}). Needed: an installed torch, a C++20 compiler, CMake, ninja or make."
            )
            raise
        _say(
            f"the compiled kernels could NOT be built ({_reason(fault)}); installing without them, and "
            "models run their original code. Once torch, a C++20 compiler and CMake are there, "
            "`python -m liteboost_adaptor build` adds them."
        )
    return build(wheel_directory, _pure(config_settings))


def _with_or_without_npu(
    build: Callable[..., str], wheel_directory: str, config_settings: ConfigSettings
) -> str:
    """Build all kernels; if that fails where torch_npu is installed, those of the CPU alone."""
    try:
        return build(wheel_directory, config_settings)
    except SystemExit as fault:
        if not _torch_npu_is_installed():
            raise
        settings = {**(config_settings or {}), "cmake.define.LITEBOOST_NPU": "OFF"}
        wheel = build(wheel_directory, settings)
        _say(
            f"the kernels for NPUs could NOT be built ({_reason(fault)}), those for the CPU are; "
            "`python -m liteboost_adaptor build --npu` tries again."
        )
        return wheel


def _torch_npu_is_installed() -> bool:
    # Isolated from PYTHONPATH, behind which pip hides the user's packages; CMake seeks torch in the same way.
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch_npu') is None)"
    return any(
        subprocess.run([sys.executable, *isolated, "-c", code], check=False).returncode == 0
        for isolated in ((), ("-I",))
    )


def _pure(config_settings: ConfigSettings) -> dict[str, Any]:
    return {**(config_settings or {}), **_PURE}


def _requires_native() -> bool:
    value = os.environ.get("LITEBOOST_REQUIRE_NATIVE", "").strip().lower()
    if value not in ("", "0", "1", "true", "false"):
        raise SystemExit(f"LITEBOOST_REQUIRE_NATIVE must be 0 or 1; found {value!r}. Change or unset it.")
    return value in ("1", "true")


def _reason(fault: BaseException) -> str:
    return "CMake failed, see above" if isinstance(fault, SystemExit) else str(fault)


def _say(sentence: str) -> None:
    sys.stderr.write(f"liteboost_adaptor: {sentence}\n")
    sys.stderr.flush()

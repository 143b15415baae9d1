"""The kernels use the C++ runtime that torch uses, whatever the compiler would link by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import kernel_build

PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(small LANGUAGES CXX)
include("{root}/kernels/cmake/torch.cmake")
add_library(small SHARED small.cpp)
target_link_libraries(small PRIVATE liteboost_torch)
"""
PRINTS = """
#include <sstream>
#include <string>
std::string words(double number) {
  std::ostringstream out;
  out << number;
  return out.str();
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libstdc++ is what GCC links on Linux")
def test_a_static_runtime_that_is_asked_for_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=kernel_build.ROOT), encoding="utf-8")
    (tmp_path / "small.cpp").write_text(PRINTS, encoding="utf-8")
    cmake = kernel_build.find("cmake", why="builds the kernels")
    readelf = kernel_build.find("readelf", why="tells what a library needs; Debian has it in binutils")
    environment = {**os.environ, "LDFLAGS": "-static-libstdc++"}
    configure = [
        cmake,
        "-S",
        str(tmp_path),
        "-B",
        str(tmp_path / "b"),
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    subprocess.run(configure, env=environment, check=True, capture_output=True)
    kernel_build.run([cmake, "--build", str(tmp_path / "b")])
    assert "libstdc++.so.6" in kernel_build.run([readelf, "--dynamic", str(tmp_path / "b/libsmall.so")])

"""``python -m liteboost_adaptor cmake-dir``: where the CMake function for ops of one's own is."""

from __future__ import annotations

import typer

from .. import native_build


def cmake_dir() -> None:
    """Print the folder of liteboost_op.cmake, which a CMakeLists.txt of your own includes.

    It has the function liteboost_add_op; examples/custom_op shows how it is used.
    """
    typer.echo(native_build.find_sources() / "cmake")

"""``python -m liteboost_adaptor cmake-dir``: where the CMake function for ops of one's own is."""

from __future__ import annotations

import typer

from .. import native_build


def cmake_dir() -> None:
    """Print the folder of liteboost_op.cmake, for ops of your own.

    A CMakeLists.txt of yours includes it for the function liteboost_add_op; see examples/custom_op.
    """
    typer.echo(native_build.find_sources() / "cmake")

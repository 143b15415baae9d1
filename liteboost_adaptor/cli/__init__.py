"""``python -m liteboost_adaptor``, or ``liteboost``: doctor, status, run, selftest, bench, build, cmake-dir,
fingerprint, plan, shard, quantize, export, audit, new-op.

The modules of the commands import neither torch nor transformers before they need them, so that ``doctor``
starts where torch does not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import LiteBoostError
from .audit import audit
from .bench import bench
from .build import build
from .cmake_dir import cmake_dir
from .doctor import doctor
from .export import export
from .fingerprint import fingerprint
from .new_op import new_op
from .plan import plan
from .quantize import quantize
from .run import run
from .selftest import selftest
from .shard import shard
from .status import status

#: What most commands import and a machine may lack; doctor runs without them.
_REQUIRED = frozenset({"torch", "transformers", "accelerate", "safetensors"})
#: A script's options stand behind its name and are not ours to read.
_BEHIND_SCRIPT = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def app() -> typer.Typer:
    """The command line, one command for each module of this package."""
    commands = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # frames around it would not fit a screen of 24 lines
        # Typer's own tracebacks print every local variable, tensors and prompts included.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    commands.callback()(_of_all)
    commands.command("doctor")(doctor)
    commands.command("status", context_settings=_BEHIND_SCRIPT)(status)
    commands.command("run", context_settings={"allow_interspersed_args": False})(run)
    commands.command("selftest")(selftest)
    commands.command("bench")(bench)
    commands.command("build")(build)
    commands.command("cmake-dir")(cmake_dir)
    commands.command("fingerprint")(fingerprint)
    commands.command("plan")(plan)
    commands.command("shard")(shard)
    commands.command("quantize")(quantize)
    commands.command("export")(export)
    commands.command("audit")(audit)
    commands.command("new-op")(new_op)
    return commands


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"liteboost_adaptor {__version__}")
        raise typer.Exit


def _of_all(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Fused kernels for Hugging Face models: what is installed, served, gained."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: In place of those of the process.

    Returns:
        The exit status: 0, 1 for an error we explain, 2 for a command line that cannot be read.
    """
    try:
        app()(args=arguments)
    except LiteBoostError as fault:
        sys.stderr.write(f"error: {fault}\n")
        return 1
    except ModuleNotFoundError as missing:
        if missing.name not in _REQUIRED:
            raise
        sys.stderr.write(
            f"error: this command needs {missing.name}, which {sys.executable} does not have. Install it "
            f"(pip install {missing.name}); `python -m liteboost_adaptor doctor` says what else is missing.\n"
        )
        return 1
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0

"""What ``bench --serve`` is asked to measure."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence

from ...errors import ConfigError


def at_once(text: str) -> tuple[int, ...]:
    """Numbers of requests, by commas, in rising order.

    Raises:
        ConfigError: One of them is no number above 0.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--serve takes numbers of requests by commas, such as 1,4,16,64; found {text!r}.")
    return tuple(sorted({int(part) for part in parts}))


#: Engines to measure beside ours. The command of llama.cpp is ``llama-batched-bench -m MODEL.gguf``, a model
#: of the same architecture and dtype (other weights make no difference to time); that of vLLM a Python that
#: has it.
NAMES = ("llama.cpp", "vLLM")


def peers_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """The commands that ``NAME=COMMAND`` give, by name, in the order of `NAMES`.

    Raises:
        ConfigError: One is unknown, or its program is missing.
    """
    commands = {}
    for text in texts:
        name, _, command = text.partition("=")
        parts = shlex.split(command)
        if name not in NAMES or not parts:
            raise ConfigError(f"--peer takes {' or '.join(NAMES)}, = and a command; found {text!r}.")
        if shutil.which(parts[0]) is None:
            raise ConfigError(f"--peer {text}: there is no program {parts[0]}. Give its path.")
        commands[name] = parts
    return {name: commands[name] for name in NAMES if name in commands}

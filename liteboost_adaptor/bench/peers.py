"""``llama-bench`` beside the variants of a benchmark, a process for each round."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import Any

from ..errors import ConfigError
from .processes import WorkerError
from .settings import Settings


def commands_of(texts: Sequence[str], settings: Settings) -> dict[str, list[str]]:
    """The commands that ``NAME=llama-bench -m MODEL.gguf`` give, by name.

    Raises:
        ConfigError: A name is missing, taken or there twice, a program is missing, or there are several
            sequences, which ``llama-bench`` does not decode.
    """
    commands: dict[str, list[str]] = {}
    for text in texts:
        name, _, command = text.partition("=")
        parts = shlex.split(command)
        if not name or not parts or name in commands or name in settings.variants:
            raise ConfigError(
                f"--peer takes a name of its own, = and a command, llama-bench -m MODEL.gguf; found {text!r}."
            )
        if shutil.which(parts[0]) is None:
            raise ConfigError(f"--peer {text}: there is no program {parts[0]}. Give its path.")
        commands[name] = parts
    if commands and settings.batch > 1:
        raise ConfigError("--peer is measured with --batch 1; with --serve, several requests at once are.")
    return commands


class LlamaBench:
    """A model of llama.cpp, asked as the workers are. Loading it is not timed."""

    def __init__(self, command: Sequence[str], settings: Settings) -> None:
        """
        Args:
            command: The program and its model.
            settings: Tokens of prompt and text, and threads.
        """
        common = [*command, "-t", str(settings.threads), "-r", "1", "-o", "json"]
        prompt, new = str(settings.prompt), str(settings.new - 1)
        # The first token comes from the prompt; the others follow it, at its depth.
        self._prefill = [*common, "-p", prompt, "-n", "0"]
        self._decode = [*common, "-p", "0", "-n", new, "-d", prompt]
        self._peak_kib = 0
        #: Of the file's weights. All are read for a token, unless the embedding is a matrix of its own.
        self.model_bytes = 0

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """``round`` gives the seconds of both phases, ``finish`` the peak memory.

        Raises:
            WorkerError: It failed.
        """
        if do == "finish":
            return {"peak_rss_mb": self._peak_kib / 1024, "status": None}
        return {"prefill_s": self._seconds(self._prefill), "decode_s": self._seconds(self._decode)}

    def _seconds(self, command: list[str]) -> float:
        with (
            TemporaryFile() as out,
            TemporaryFile() as log,
            subprocess.Popen(command, stdout=out, stderr=log) as process,
        ):
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self._peak_kib = max(self._peak_kib, usage.ru_maxrss)
            out.seek(0)
            log.seek(0)
            text, said = out.read().decode(errors="replace"), log.read().decode(errors="replace")
        try:
            (found,) = json.loads(text)
            seconds = found["samples_ns"][0] / 1e9
            self.model_bytes = found["model_size"]
        except (ValueError, LookupError, TypeError):
            raise WorkerError(
                f"{' '.join(command)} gave no figures and ended with {process.returncode}. It last printed:\n"
                + "\n".join((text + said).splitlines()[-20:])
            ) from None
        return seconds

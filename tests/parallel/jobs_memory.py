"""What a rank needs of memory and asks of files while it loads a model."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from parallel.jobs import _quiet
from transformers import AutoModelForCausalLM

from liteboost_adaptor.checkpoint import files as checkpoint
from liteboost_adaptor.parallel.runtime import groups

_STATUS = Path("/proc/self/status")
_PERIOD = 0.005


def _status(*fields: str) -> int:
    """Sum of fields of the process's status, in bytes."""
    values = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return sum(int(values[field].split()[0]) * 1024 for field in fields)


class Peak:
    """The most memory that belongs to the process itself, sampled while the block runs."""

    def __enter__(self) -> Peak:
        self._ended = threading.Event()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.before = self.most = _status("RssAnon", "RssShmem")
        self.resident = _status("VmRSS")
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.is_set():
            self.most = max(self.most, _status("RssAnon", "RssShmem"))
            time.sleep(_PERIOD)

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
        self.grown = self.most - self.before
        self.high_water = _status("VmHWM") - self.resident


def load(first: str, folder: str) -> dict[str, Any]:
    """Figures of loading ``folder``, after ``first`` has been loaded so that everything is imported."""
    _quiet()
    groups.join()
    AutoModelForCausalLM.from_pretrained(first)
    before = checkpoint.requests.bytes
    with Peak() as peak:
        model = AutoModelForCausalLM.from_pretrained(folder)
    asked = checkpoint.requests.bytes - before
    files = [checkpoint.File(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    return {
        "grown": peak.grown,
        "high_water": peak.high_water,
        "asked": asked,
        "shard": sum(parameter.nbytes for parameter in model.parameters()),
        "largest": max(entry.nbytes for file in files for entry in file.entries.values()),
    }

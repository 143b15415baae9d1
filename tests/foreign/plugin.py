"""The pytest plugin of a run of other projects' tests: `python -m pytest -p foreign.plugin`.

Set by environment: ``FOREIGN_RECORD`` is the file that gets a line of JSON a test and one at the end,
``FOREIGN_SEED`` a number added to every test's seed, ``FOREIGN_CODE`` what the last line says of the code.
`liteboost_adaptor` is imported, before anything else, only when ``LITEBOOST_LEVEL`` is set: a run
without it is a run without the package.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

LEVEL = os.environ.get("LITEBOOST_LEVEL")
if LEVEL is not None:
    import liteboost_adaptor  # noqa: F401 - before torch and transformers, as a user would


class Recorder:
    """Writes what became of each test as soon as it is known, so that a crash names the test it hit."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._served_before = 0
        self._started = 0.0

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        seed_everything(zlib.crc32(item.nodeid.encode()) + int(os.environ.get("FOREIGN_SEED", "0")))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(started=nodeid)
        self._reports[nodeid] = []
        self._started, self._served_before = time.perf_counter(), sum(served().values())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports[report.nodeid].append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, reason = conclude(self._reports.pop(nodeid))
        self.write(
            test=nodeid,
            outcome=outcome,
            reason=reason,
            served=sum(served().values()) - self._served_before,
            seconds=round(time.perf_counter() - self._started, 2),
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", reason=_last_line(report), served=0, seconds=0)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        imported = "liteboost_adaptor" in sys.modules
        code = os.environ.get("FOREIGN_CODE", "")
        self.write(finished=int(exitstatus), served=served(), imported=imported, code=code)


def pytest_configure(config: pytest.Config) -> None:
    if record := os.environ.get("FOREIGN_RECORD"):
        config.pluginmanager.register(Recorder(Path(record)))


def pytest_collection_finish() -> None:
    """Keep PEFT's tests offline: their helper goes online once for each model, unless it has been seen."""
    helper = sys.modules.get("tests.testing_utils")
    if hasattr(helper, "_HUB_MODEL_ACCESSES"):
        helper._HUB_MODEL_ACCESSES = _AllSeen()


class _AllSeen(collections.Counter):
    """Counts of accesses in which every model counts as seen: what there is lies in the cache."""

    def __contains__(self, name: object) -> bool:
        return True


def seed_everything(seed: int) -> None:
    """The generators that the tests draw from, the same for a test in every run."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    for name, module in list(sys.modules.items()):
        if name.endswith("test_modeling_common") and hasattr(module, "global_rng"):
            module.global_rng.seed(seed)


def served() -> dict[str, int]:
    """Calls our ops have served so far, by rule; nothing in a run without the package."""
    if LEVEL is None:
        return {}
    from liteboost_adaptor.report import report

    return {rule: counter.calls for rule, counter in report.counters.items() if counter.calls}


def conclude(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """One outcome for a test's phases and subtests: failed before skipped before passed; and why."""
    for report in reports:
        if report.failed:
            return "failed", _last_line(report)
    # A test with some subtests skipped has run; only the test's own report says that it was skipped.
    own = [report for report in reports if type(report) is pytest.TestReport]
    for report in own:
        if hasattr(report, "wasxfail"):
            return "passed", f"expected failure: {report.wasxfail}"
        if report.skipped:
            return "skipped", str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    return "passed", ""


def _last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (lines[0] if crash is not None and lines else lines[-1] if lines else "")[:300]

"""The simulator is built with the headers of torch_npu; without torch_npu these tests are not collected.

Some run torch_npu on it in the process of the tests: ``python -m cann_sim run -m pytest tests/npu``.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]
elif "SIMCANN_VERSION" not in os.environ:  # of every program that runs on the simulator
    collect_ignore = ["test_programs.py", "test_trace.py", "test_strictness.py", "test_executor_cache.py"]
    collect_ignore += ["test_hccl.py"]

"""Op tests on the NPU: the kernels are loaded, and nothing an earlier process found out is believed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from liteboost_adaptor import native_npu


@pytest.fixture(autouse=True, scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        status = native_npu.load()
        assert status is not None and status.loaded, status
        torch.ops.liteboost._npu_forget_verdicts()
        yield
        torch.ops.liteboost._npu_forget_verdicts()


@pytest.fixture(autouse=True)
def uncounted(kernels: None, no_grad: None) -> None:
    """A test begins with no call counted, and without grad mode, in which nothing is served."""
    torch.ops.liteboost._npu_forget_counts()

"""Where steps of several tokens are recorded, by release of transformers; results are the same in all."""

from __future__ import annotations

import pytest

from liteboost_adaptor.report import report

from .conftest import served
from .test_multi_token import COUNTS, IS_RECORDED, Parts


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_this_release(family: str) -> None:
    pair = Parts(family)
    pair.start(count=21)
    pair.parts((5, 3, 7, 3, 5, 6))
    counter, before = report.counter("step.program"), served()
    fallbacks = counter.fallbacks.copy()
    for count in COUNTS:
        pair.part(count)
        if family != "mistral":  # a window is cropped while it is not full
            pair.crop(count - 1)
    pair.keeps_the_same()
    reasons = counter.fallbacks - fallbacks
    assert served() - before + reasons.total() == len(COUNTS)
    assert served() - before == (len(COUNTS) if IS_RECORDED else 0), reasons
    if not IS_RECORDED:
        assert any(reason.startswith("reads values") for reason in reasons), reasons

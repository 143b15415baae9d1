"""Everything that ``LITEBOOST_DISABLE`` may name; patterns that name nothing are warned of."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import warnings

from .config import Settings
from .environment.npu import FIXES
from .huggingface.features import FEATURES
from .huggingface.runtime import load_catalogue
from .quantization.identifiers import CHECKPOINTS
from .report import report


def all_ids(patch_path: tuple[str, ...] = ()) -> frozenset[str]:
    """Ids of the rules, shipped and of the user's files, and of what else can be disabled like them."""
    rules = {rule.id for rule in load_catalogue(patch_path)[0]}
    others = {feature.rule for feature in FEATURES if feature.rule} | {CHECKPOINTS}
    return frozenset(rules | others | {fix.id for fix in FIXES})


def warn_of_unmatched(settings: Settings) -> None:
    """Warn, once for each, of patterns to disable that match no id; the status lists them, too."""
    for glob in settings.disable:
        _warn_of(glob, settings.patch_path)


@functools.cache
def _warn_of(glob: str, patch_path: tuple[str, ...]) -> None:
    ids = all_ids(patch_path)
    if any(fnmatch.fnmatchcase(rule, glob) for rule in ids):
        return
    close = difflib.get_close_matches(glob, sorted(ids), n=1)
    sentence = (
        f"LITEBOOST_DISABLE, or disable=, has {glob!r}, which is the id of no rule; it has no effect. "
        + (f"Did you mean {close[0]!r}? " if close else "")
        + "`python -m liteboost_adaptor status --all SCRIPT` lists the ids."
    )
    report.note(sentence)
    warnings.warn(sentence, stacklevel=4)

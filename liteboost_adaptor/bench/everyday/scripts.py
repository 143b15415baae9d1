"""All scripts by name."""

from __future__ import annotations

from . import decoding, serving, tasks
from .script import Script

SCRIPTS: dict[str, Script] = decoding.SCRIPTS | serving.SCRIPTS | tasks.SCRIPTS

"""A model's configuration as the modules of one rank see it."""

from __future__ import annotations

from typing import Any


def unsharded_config(config: Any) -> Any:
    """``config``, or the one that a `LocalConfig` wraps."""
    return config._config if isinstance(config, LocalConfig) else config


class LocalConfig:
    """A configuration in which some values are those of this rank, for one module."""

    def __init__(self, config: Any, local: dict[str, int]) -> None:
        self._config, self._local = config, local

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_config", "_local"):
            raise AttributeError(name)
        return self._local[name] if name in self._local else getattr(self._config, name)

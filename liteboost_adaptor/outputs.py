"""Files a command is asked to write, checked before minutes are spent on what goes into them."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written; it is left as it is, or not there.

    Raises:
        ConfigError: Its folder is missing, or it cannot be opened.
    """
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}. Make it first.")
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as fault:
        raise ConfigError(
            f"{option} {path}: it cannot be written in {folder}: {fault.strerror}. "
            f"Name a file in another folder by {option}."
        ) from None
    if is_new:
        path.unlink()

"""Level 0: the program runs on the machine it is started on."""

from .backend_autoload import notes, prepare, release

__all__ = ["notes", "prepare", "release"]

"""Typed errors. Every message says what was asked, what was found and what to do."""

from __future__ import annotations


class LiteBoostError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(LiteBoostError, ValueError):
    """A ``LITEBOOST_*`` variable or an argument of the same meaning has a value that is not allowed."""


class CatalogueError(LiteBoostError, ValueError):
    """A rule file cannot be used: wrong syntax, an unknown field, a name that does not resolve."""


class ShapeError(LiteBoostError, ValueError):
    """A tensor handed to an op has a shape the op is not defined for."""


class DTypeError(LiteBoostError, TypeError):
    """A tensor handed to an op has a dtype the op does not serve."""


class DeviceError(LiteBoostError, ValueError):
    """Tensors handed to one op live on different devices, or on one without a kernel."""


class DeviceFaultError(LiteBoostError, RuntimeError):
    """An accelerator has failed while it ran what was captured for it."""


class NativeLibraryError(LiteBoostError, RuntimeError):
    """The compiled library is needed and cannot be found, built or loaded."""


class StrictError(LiteBoostError, RuntimeError):
    """``LITEBOOST_STRICT=1`` and a rule was refused or failed for a model in use."""


class AuditError(LiteBoostError, RuntimeError):
    """A transformers cannot be audited: it cannot be had, imported, or compared with what was recorded."""


class PlanError(LiteBoostError, ValueError):
    """A model cannot be sharded over so many ranks; says all that does not fit, and which numbers would."""


class CheckpointError(LiteBoostError, ValueError):
    """A file of a checkpoint cannot be used: it is cut short, changed, or made for something else."""


class ExportError(LiteBoostError, ValueError):
    """A model cannot be exported: says what of it, and why."""


class ParallelError(LiteBoostError, RuntimeError):
    """Ranks cannot work together: other models, inputs or settings, or a rank that has ended."""


class QuantizationError(LiteBoostError, ValueError):
    """A model, layer or file cannot be quantized as asked, or a quantized one cannot be read."""


class StateError(QuantizationError, RuntimeError):
    """A ``state_dict`` does not hold the integers of the layers that it is loaded into."""


#: (an error's type, another's) -> one that is both.
_both: dict[tuple[type[Exception], type[Exception]], type[Exception]] = {}


def _of_both(ours: type[Exception], theirs: type[Exception]) -> type[Exception]:
    if (ours, theirs) in _both:
        return _both[ours, theirs]
    bases: list[type[Exception]] = [LiteBoostError]
    for kind in (ours, theirs):
        if not any(issubclass(base, kind) for base in bases):
            bases = [base for base in bases if not issubclass(kind, base)]
            bases.append(kind)
    _both[ours, theirs] = type("ArgumentError", tuple(bases), {"__module__": __name__})
    return _both[ours, theirs]


#: Types whose instances hold nothing but their arguments, and so can be put together.
_PLAIN = (ValueError, TypeError, IndexError, RuntimeError, KeyError, AttributeError, NotImplementedError)


def of_both_types(ours: Exception, theirs: Exception) -> Exception:
    """An error of an op and of the original in one, so that whoever catches either catches it.

    Of an original's error that is of no builtin type, the original's own.
    """
    if type(theirs) not in _PLAIN:
        return theirs
    kind = type(ours) if isinstance(ours, LiteBoostError) else next(k for k in _PLAIN if isinstance(ours, k))
    return _of_both(kind, type(theirs))(f"{theirs}\n{ours}")

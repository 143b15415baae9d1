"""The public functions: apply, undo, patched, shard, status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from . import __version__, config, environment, native, native_npu, rule_ids
from .config import settings, with_overrides
from .engine import swap
from .environment import machine
from .environment.npu import fixes
from .errors import ConfigError
from .huggingface import features, speculation
from .huggingface.runtime import listed_rules, runtime
from .huggingface.summaries import summary_of
from .huggingface.weights import weights
from .kv_cache import buffers
from .parallel import shard as parallel_shard
from .parallel.tensor.plan import ShardingPlan
from .report import Status, report
from .setting_values import Quant


def apply(
    model: torch.nn.Module | None = None,
    *,
    level: int | None = None,
    disable: str | list[str] | None = None,
    strict: bool | None = None,
    nz: str | None = None,
    graph: str | None = None,
    sparse: float | str | None = None,
    tp: int | str | None = None,
    dp: int | None = None,
    sp: int | None = None,
    cp: int | None = None,
    ep: bool | None = None,
    quant: str | None = None,
    speculate: str | None = None,
    batch_invariant: bool | None = None,
) -> Status:
    """Serve ``model`` with our ops, or, without a model, every model loaded or first used from now on.

    Args:
        model: Any module; its submodules are served where a rule fits, other models are not touched.
        level, disable, strict, nz, graph, sparse: In place of ``LITEBOOST_LEVEL``, ``LITEBOOST_DISABLE``,
            ``LITEBOOST_STRICT``, ``LITEBOOST_NZ``, ``LITEBOOST_GRAPH`` and ``LITEBOOST_SPARSE``.
        tp, dp, sp, cp, ep: In place of ``LITEBOOST_TP``, ``LITEBOOST_DP``, ``LITEBOOST_SP``,
            ``LITEBOOST_CP`` and ``LITEBOOST_EP``, for models that are loaded afterwards; `shard` shards one
            that is loaded.
        quant: In place of ``LITEBOOST_QUANT``. ``model`` is quantized in place, and `undo` does not bring its
            former weights back; ``"kv8"`` alone changes no weight.
        speculate, batch_invariant: In place of ``LITEBOOST_SPECULATE`` and ``LITEBOOST_BATCH_INVARIANT``.

    Returns:
        The status afterwards.

    Raises:
        ConfigError: A value is not allowed.
        TypeError: ``model`` is no module.
        StrictError: ``strict`` and a rule was refused or failed.
        QuantizationError: ``model`` cannot be quantized so.
        NativeLibraryError: ``sparse`` or ``quant`` was given, and there are no compiled kernels.

    Example::

        liteboost_adaptor.apply(model, level=1, disable="norm.*")  # without fused norms
        liteboost_adaptor.apply(quant="w4a16")  # every model that is loaded from now on
    """
    sizes = {"tp": tp, "dp": dp, "sp": sp, "cp": cp, "ep": ep}
    wanted = with_overrides(
        settings(),
        **{"level": level, "disable": disable, "strict": strict, "nz": nz, "graph": graph},
        **{"sparse": sparse, "quant": quant, "speculate": speculate, "batch_invariant": batch_invariant},
        **sizes,
    )
    rule_ids.warn_of_unmatched(wanted)
    if model is None:
        runtime.deactivate()
        runtime.activate(wanted)
        fixes.start(wanted)
    else:
        _check(model, "apply")
        for name, size in sizes.items():
            if size is not None:
                raise ConfigError(
                    f"{name} is for models that are loaded afterwards, and this one is loaded. Call "
                    f"apply({name}=...) before it is loaded, or liteboost_adaptor.shard(model)."
                )
        if quant is not None and wanted.quant is not None and wanted.quant.scheme:
            _quantize(model, wanted.quant)
        runtime.bind(model, wanted)
    return status()


def _check(model: object, function: str) -> None:
    """Raise TypeError unless ``model`` is one."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{function} takes a torch.nn.Module, got {type(model).__name__}. Pass the loaded model."
        )


def _quantize(model: torch.nn.Module, quant: Quant) -> None:
    from .quantization.config import of_settings  # imports transformers
    from .quantization.model import quantize_model

    native.require(f"quant={quant.scheme!r}")
    runtime.unbind(model)
    quantize_model(model, of_settings(quant))


def undo(model: torch.nn.Module | None = None) -> list[str]:
    """Take back what was done to ``model``, or everything.

    The model, or after ``undo()`` every model, is then left alone until ``apply``.

    Args:
        model: One that was bound; None for all of them, and for what is set for the process.

    Returns:
        A sentence for each thing that someone else has changed since, and that was therefore left.

    Raises:
        TypeError: ``model`` is no module.

    Example::

        for sentence in liteboost_adaptor.undo():
            print(sentence)
    """
    if model is not None:
        _check(model, "undo")
        return runtime.leave_alone(model)
    left = runtime.unbind_all()
    left += runtime.deactivate() + fixes.stop()
    report.forget_models()
    return left


@contextlib.contextmanager
def patched(*models: torch.nn.Module, level: int | None = None, disable: str | None = None) -> Iterator[None]:
    """Serve ``models`` (or, without any, every model used) inside the block, and as before it afterwards.

    What was bound before the block is bound after it, whatever is raised inside.

    Args:
        models: Loaded models.
        level, disable: In place of ``LITEBOOST_LEVEL`` and ``LITEBOOST_DISABLE``.

    Raises:
        ConfigError: A value is not allowed.
        TypeError: One of ``models`` is no module; nothing has been bound then.

    Example::

        with liteboost_adaptor.patched(model, level=1):
            ours = model.generate(**inputs)
    """
    wanted = with_overrides(settings(), level=level, disable=disable)
    for model in models:
        _check(model, "patched")
    rule_ids.warn_of_unmatched(wanted)
    before = runtime.state()
    try:
        if models:
            for model in models:
                runtime.bind(model, wanted)
        else:
            for model in runtime.models():
                runtime.unbind(model)
            runtime.deactivate()
            runtime.activate(wanted)
        yield
    finally:
        runtime.return_to(before)


def shard(model: torch.nn.Module) -> ShardingPlan:
    """Shard ``model`` over all processes, in place, and free what this one no longer holds.

    Every process calls it with the same model. `torchrun` starts them; a process group that exists is used.
    The model is for inference afterwards, and is not put together again by `undo`.

    Args:
        model: A loaded model of transformers, in eval mode.

    Returns:
        What each process holds, and where they communicate.

    Raises:
        PlanError: The model cannot be sharded over so many processes; before anything is changed.
        ParallelError: No launcher has started the processes, or they have different models; the model is
            sharded already, or in training mode.
        NativeLibraryError: There are no compiled kernels.

    Example::

        plan = liteboost_adaptor.shard(model)  # in every process of torchrun --nproc-per-node=2
        print(plan.replicated)  # what is not sharded, and why
    """
    return parallel_shard.shard(model)


def status(*, full: bool = False) -> Status:
    """What happened so far: every rule with state, targets, reasons and calls; the models; the library.

    Args:
        full: Have the text list every rule, also those that no model has a use for.

    Example::

        print(liteboost_adaptor.status())  # a line for each model, what is not served and why, totals
        served = sum(rule.calls for rule in liteboost_adaptor.status().rules)
    """
    current = runtime.active or settings()
    notes = [*config.unknown(config.child_environment()), *environment.notes(), *report.environment]
    notes += speculation.notes()
    if runtime.is_dismissed:
        notes.append("Switched off by undo() for models not applied by name; apply() switches it on.")
    library = native.load()
    if library.loaded and (left_out := machine.isas_left_out(library.build_info)):
        notes.append(left_out)
    backend = "native" if library.loaded else "reference"
    models = [
        {
            "class": type(model).__name__,
            "modules": sum(1 for m in model.modules() if swap.mark_of(m) is not None),
        }
        for model in runtime.models()
    ]
    details: dict[str, Any] = {
        "backend": backend,
        "library": str(library.path) if library.path else None,
        "reason": library.reason,
        "isa": library.isa,
    }
    if npu := native_npu.status():
        details["npu"] = npu.to_dict() | {"nz": weights.to_dict()}
        details["npu"]["lines"] += weights.lines()
    listed = [
        *fixes.rows(),
        *listed_rules(current),
        *features.rows(current),
    ]
    return Status(
        version=__version__,
        level=current.level,
        native=details,
        environment=notes,
        models=models,
        caches_bytes=buffers.bytes_held(),
        rules=report.rows(listed, backend),
        summaries=[summary_of(model) for model in runtime.models()],
        missing="" if library.loaded else library.sentence.removeprefix("liteboost_adaptor: "),
        full=full,
    )

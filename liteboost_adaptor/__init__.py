"""Fast inference for Hugging Face models on Ascend NPUs and CPUs, with one line.

``import liteboost_adaptor`` reads the settings and registers import hooks; models are then served
as they are loaded or first used. It imports neither torch nor transformers by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import config, environment, status_file
from .engine.hooks import after_import

if TYPE_CHECKING:
    from .api import apply, patched, shard, status, undo

__version__ = "0.1.0"
__all__ = ["apply", "patched", "shard", "status", "undo"]

_settings = config.settings()  # a wrong LITEBOOST_* value is the one thing that raises here
environment.prepare()
status_file.start(_settings.status_file)


def _activate(_: Any) -> None:
    from .environment import vector_math
    from .huggingface.runtime import runtime
    from .parallel.checkpoint import offline
    from .parallel.runtime import mesh

    vector_math.set_up()
    offline.register(runtime)
    if config.launched() or mesh.needs_several_processes(_settings):
        from .parallel import from_pretrained

        from_pretrained.register(runtime)
    from .quantization import registration

    registration.register(runtime)
    runtime.start(_settings)
    if _settings.disable:
        from . import rule_ids

        rule_ids.warn_of_unmatched(_settings)


def _serve_adapted(_: Any) -> None:
    from .huggingface.runtime import runtime

    runtime.serve_adapted()
    if config.launched():
        from .parallel import adapters

        adapters.register(runtime)


def _wrap_quantized(_: Any) -> None:
    from .huggingface.runtime import runtime
    from .quantization import registration

    registration.register_peft(runtime)


def _share_server(_: Any) -> None:
    if config.launched() and _settings.tp > 1:
        from .parallel import serving

        serving.hook_server()


def _fix(module: Any) -> None:
    from .environment.npu import fixes

    fixes.imported(module.__name__, _settings)


after_import("transformers.modeling_utils", _activate)
after_import("peft.peft_model", _serve_adapted)
after_import("peft.tuners.lora.model", _wrap_quantized)
after_import("transformers.cli.serving.server", _share_server)
for _module in environment.FIXED_MODULES:
    after_import(_module, _fix)


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Our quantizer among transformers', and ``LITEBOOST_QUANT`` for scripts that know nothing of it."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import config
from ..report import REFUSED, Outcome, report
from .identifiers import CHECKPOINTS, QUANT_METHOD, RULE

if TYPE_CHECKING:
    from ..engine.undo_stack import UndoStack
    from ..huggingface.runtime import Runtime

_AUTO = "transformers.quantizers.auto"
_MODELING = "transformers.modeling_utils"


def register(runtime: Runtime) -> None:
    """Have `install` called whenever ``runtime`` prepares models. Idempotent."""
    runtime.extend(install)


def register_peft(runtime: Runtime) -> None:
    """Let PEFT, which has been imported, wrap our layers whenever ``runtime`` prepares models. Idempotent."""
    from .layers import lora

    runtime.extend(lora.extend)


def install(stack: UndoStack, settings: config.Settings) -> None:
    """Register our quantizer, for models that name it; with ``quant``, for those that name none, too.

    Args:
        stack: Of what is set outside of models.
        settings: Those models are prepared under.
    """
    if importlib.util.find_spec("transformers.core_model_loading") is None:
        if settings.quant is not None and settings.quant.scheme:
            report.add(Outcome(RULE, REFUSED, "LITEBOOST_QUANT", "needs transformers 5"))
        return
    from . import foreign_quantizer, from_pretrained, mx_formats
    from .config import LiteBoostConfig, of_settings
    from .hf_quantizer import LiteBoostQuantizer
    from .layers import resizing

    auto = importlib.import_module(_AUTO)
    configs, quantizers = "AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"

    def set_entry(mapping: str, method: str, entry: Any) -> None:
        stack.set_item(getattr(auto, mapping), method, entry, f"{_AUTO}.{mapping}[{method!r}]")

    set_entry(configs, QUANT_METHOD, LiteBoostConfig)
    set_entry(quantizers, QUANT_METHOD, LiteBoostQuantizer)
    from_pretrained.install(stack)
    resizing.install(stack)
    if not any(fnmatch.fnmatchcase(CHECKPOINTS, glob) for glob in settings.disable):
        for method in foreign_quantizer.METHODS:
            for mapping, wrap in (
                (configs, foreign_quantizer.ConfigFactory),
                (quantizers, foreign_quantizer.quantizer_factory),
            ):
                if method in getattr(auto, mapping):
                    set_entry(mapping, method, wrap(getattr(auto, mapping)[method]))
        for method in mx_formats.MX_FORMATS:
            if original := getattr(auto, quantizers).get(method):
                set_entry(quantizers, method, mx_formats.quantizer_factory(method, original))
    if settings.quant is not None and settings.quant.scheme:
        wanted = of_settings(settings.quant).to_dict()
        stack.set_attribute(_MODELING, "get_hf_quantizer", functools.partial(_choosing, wanted))


def _choosing(wanted: dict[str, Any], original: Callable[..., Any]) -> Callable[..., Any]:
    from .config import LiteBoostConfig
    from .hf_quantizer import LiteBoostQuantizer

    @functools.wraps(original)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        is_plain = quantization_config is None and not kwargs.get("gguf_file")
        own = (config, config.get_text_config(decoder=True))
        if is_plain and not any(getattr(each, "quantization_config", None) for each in own):
            quantization_config = LiteBoostConfig(**wanted)
        result = original(config, quantization_config, *args, **kwargs)
        quantizer = result[0] if isinstance(result, tuple) else result
        if wanted["scheme"] == "w4a8" and isinstance(quantizer, LiteBoostQuantizer):
            quantizer.overrides_w4a16_by_w4a8 = quantizer.pre_quantized
        return result

    return get_hf_quantizer

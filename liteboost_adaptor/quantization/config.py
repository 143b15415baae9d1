"""``quantization_config`` of a model: which scheme, for which layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import QuantizationError
from ..ops.quantized_linear import PACKING
from ..setting_values import INT8, Quant, split_scheme
from ..setting_values import QUANT_HEADS as HEADS
from .identifiers import QUANT_METHOD
from .schemes import QuantScheme

#: What says how a model is quantized, and is of no use once it is.
_ONCE = ("calibrate", "method")
#: What calibration may do, by scheme; the first is the default.
METHODS = {
    **dict.fromkeys(("w8a16", "w4a16", "w4a8"), ("awq", "gptq")),
    "w8a8": ("smoothquant",),
}
_FIELDS = (
    "scheme",
    "group_size",
    "symmetric",
    "head",
    "modules_to_not_convert",
    "layers",
    "kv_cache",
    "packing",
)
#: Written where they say something: a checkpoint without them is read by versions that do not know them.
_OPTIONAL = ("layers", "kv_cache")


class LiteBoostConfig(QuantizationConfigMixin):
    """Quantize linear layers: ``from_pretrained(..., quantization_config=LiteBoostConfig("w4a16"))``.

    Args:
        scheme: ``"w8a16"``, ``"w4a16"``, ``"w8a8"`` or ``"w4a8"``; with ``+kv8`` behind it,
            ``kv_cache="int8"``, too. ``"kv8"`` or None: weights stay.
        group_size: Weights that share a scale, of 4 bits: 32, 64 or 128.
        symmetric: Without zero points.
        head: Bits of the output layer: 8, or 16 for as it is. Where its weight is tied to the embedding, 8
            unties them: the embedding stays as it is, and the head is kept beside it with half of its bytes.
        modules_to_not_convert: Names of layers that stay as they are, as in transformers' quantizers.
        calibrate: A file with a text that the model reads first, with its own tokenizer: scales are moved
            from norms to the layers behind them by what is seen. The model is then loaded whole before it is
            quantized.
        method: ``"awq"``: scales are searched for; ``"gptq"``: besides, each column's rounding error is made
            up for by the next ones; ``"smoothquant"``, of w8a8: activations and weights meet half way.
        layers: The scheme of each layer, by its name, where they were read from another format: the others
            stay as they are, and the arguments above say nothing. A checkpoint says it.
        kv_cache: ``"int8"``: keys and values of the cache are kept as integers of 8 bits, with a scale for
            each token and head; None: as they are.
        packing: How 4 bits are packed; a checkpoint says it.
        checksums: False, written into ``config.json`` by hand, reads files without checksums, such as another
            program has written again. They are written whatever it says.

    Raises:
        QuantizationError: A value that is not allowed, or a packing that this version does not read.
    """

    def __init__(
        self,
        scheme: str | None = "w4a16",
        group_size: int = 32,
        symmetric: bool = True,
        head: int = 8,
        modules_to_not_convert: list[str] | None = None,
        calibrate: str | None = None,
        method: str | None = None,
        layers: dict[str, dict[str, Any]] | None = None,
        kv_cache: str | None = None,
        packing: int = PACKING,
        quant_method: str = QUANT_METHOD,
        checksums: bool = True,
        **unknown: Any,
    ) -> None:
        self.quant_method = quant_method
        if scheme is not None and not isinstance(scheme, str):
            raise QuantizationError(f"scheme must be the name of one, got {scheme!r}")
        scheme, named = split_scheme(scheme or "")
        self.kv_cache = kv_cache or named or None
        if self.kv_cache not in (None, INT8):
            raise QuantizationError(f"kv_cache must be {INT8!r} or None, got {kv_cache!r}")
        if not scheme and not self.kv_cache:
            raise QuantizationError('scheme None needs kv_cache="int8", or nothing is quantized')
        self.scheme, self.group_size, self.symmetric = scheme or None, group_size, symmetric
        self.head, self.packing, self.checksums = head, packing, checksums
        if not isinstance(checksums, bool):
            raise QuantizationError(f"checksums must be true or false, got {checksums!r}")
        self.modules_to_not_convert, self.layers = modules_to_not_convert, layers
        if type(packing) is int and packing > PACKING:
            raise QuantizationError(
                f"the weights have packing {packing}, and this liteboost_adaptor reads up to {PACKING}: "
                "install the version that wrote them, or a newer one"
            )
        if type(packing) is not int or packing != PACKING:
            raise QuantizationError(f"packing must be {PACKING}, got {packing!r}")
        if unknown:
            raise QuantizationError(
                f"quantization_config has no {', '.join(sorted(unknown))}; known: "
                f"{', '.join(_FIELDS + _ONCE)}. A checkpoint with others was written by a newer "
                "liteboost_adaptor."
            )
        if type(head) is not int or head not in HEADS:
            raise QuantizationError(f"head must be one of {', '.join(map(str, HEADS))}, got {head!r}")
        names = modules_to_not_convert
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            raise QuantizationError(f"modules_to_not_convert must be a list of names, got {names!r}")
        self.layer_scheme()  # checked
        self.calibrate, self.method = calibrate, _method(scheme, calibrate, method)
        if layers is not None and not (isinstance(layers, dict) and layers):
            raise QuantizationError(f"layers must name layers, got {layers!r}")
        self.schemes_by_layer()  # checked

    def layer_scheme(self) -> QuantScheme | None:
        """The scheme of linear layers, or None where they stay."""
        return QuantScheme(self.scheme, self.group_size, self.symmetric) if self.scheme else None

    def head_scheme(self) -> QuantScheme | None:
        """The scheme of the output layer, or None where it stays."""
        return QuantScheme("w8a16") if self.scheme and self.head == 8 else None

    def experts_scheme(self) -> QuantScheme | None:
        """That of experts that are one parameter, whose activations stay as they are."""
        scheme = self.layer_scheme()
        if scheme is None or not scheme.quantizes_activations:
            return scheme
        return QuantScheme("w8a16") if scheme.bits == 8 else replace(scheme, name="w4a16")

    def schemes_by_layer(self) -> dict[str, QuantScheme] | None:
        """The scheme of each layer, where they were read from another format."""
        if self.layers is None:
            return None
        schemes = {}
        for name, values in self.layers.items():
            try:
                schemes[name] = QuantScheme.from_dict(values)
            except QuantizationError as fault:
                raise QuantizationError(f"quantization_config says of the layer {name}: {fault}") from fault
        return schemes

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _FIELDS}
        written = {name: value for name, value in values.items() if value or name not in _OPTIONAL}
        return {"quant_method": self.quant_method, **written}


def _method(scheme: str, calibrate: str | None, method: str | None) -> str | None:
    """The method asked for, or that of the scheme."""
    if calibrate is None:
        if method is not None:
            raise QuantizationError(f"method {method!r} needs a text: name a file with calibrate")
        return None
    if not scheme:
        raise QuantizationError("calibrate is for weights, and scheme None leaves them as they are")
    if not isinstance(calibrate, str):
        raise QuantizationError(f"calibrate must be the name of a file with a text, got {calibrate!r}")
    if method is not None and method not in METHODS[scheme]:
        raise QuantizationError(
            f"method must be one of {', '.join(METHODS[scheme])} for {scheme}, got {method!r}"
        )
    return method or METHODS[scheme][0]


def of_settings(quant: Quant) -> LiteBoostConfig:
    """What ``LITEBOOST_QUANT`` asks for."""
    return LiteBoostConfig(
        quant.scheme or None, quant.group, quant.symmetric, quant.head, kv_cache=quant.kv_cache or None
    )

"""An instance of a module class nobody has built a model with, for its attributes and for a probe."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import torch

#: What a required argument of a constructor is given, by its name.
_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "dim", "hidden_dim", "embed_dim", "embedding_dim", "d_model", "size"), 64
    ),
    **dict.fromkeys(("n_embd", "n_state", "features", "num_features", "head_dim", "width", "channels"), 64),
    **dict.fromkeys(("normalized_shape", "intermediate_size", "per_head_hidden_size", "d"), 64),
    **dict.fromkeys(("eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps"), 1e-6),
    **dict.fromkeys(("num_heads", "n_groups", "num_groups"), 2),
    "group_size": 32,
    "layer_idx": 0,
}


class NotBuilt(Exception):
    """No instance could be made. The message says why."""


def build(cls: type) -> torch.nn.Module:
    """An instance of ``cls`` on the meta device, its required arguments chosen by name.

    A required ``config`` is made by the class it is annotated with, from that class's defaults.

    Raises:
        NotBuilt: An argument of unknown meaning is required, or the constructor raises.
    """
    try:
        arguments = {
            parameter.name: _argument(cls, parameter.name)
            for parameter in inspect.signature(cls).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        with torch.device("meta"):
            return cls(**arguments)
    except NotBuilt:
        raise
    except Exception as fault:
        raise NotBuilt(f"its constructor raises {type(fault).__name__}: {fault}") from fault


def _argument(cls: type, name: str) -> Any:
    if name in _ARGUMENTS:
        return _ARGUMENTS[name]
    if name == "config":
        kind = typing.get_type_hints(cls.__init__).get("config")
        if isinstance(kind, type):
            return kind()
    raise NotBuilt(f"its constructor asks for {name}")

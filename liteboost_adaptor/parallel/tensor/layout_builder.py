"""The layout while it is worked out: cuts by module, and the sizes of layers whatever their kind."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from ...huggingface.class_code import is_product
from .plan import SUM, Cut, Layout, Need, Part, WholeExperts


def is_linear(module: nn.Module | None) -> bool:
    """Whether it is exactly ``nn.Linear``, a class that only writes the product down once more, or GPT-2's
    ``Conv1D``, which keeps its weight transposed."""
    return type(module) is nn.Linear or is_transposed(module) or is_product(type(module))


def is_transposed(module: nn.Module | None) -> bool:
    """Whether it is transformers' ``Conv1D``: ``weight`` is ``[in_features, out_features]``."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


class Parts:
    """Collects a `Layout` for one model.

    Attributes:
        modules: Name -> module; one that is used in several places has its first name.
        styles: The model's own plan, by full names.
        done: Names of the modules that have been decided.
    """

    def __init__(
        self,
        model: nn.Module,
        styles: dict[str, str],
        units: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.model = model
        self._units = units or {}
        self.modules = dict(model.named_modules())
        self.styles = styles
        self.done: set[str] = set()
        self._layout = Layout(type(model).__name__)

    def unit(self, name: str) -> tuple[int, int]:
        """How many outputs, and how many inputs, of a weight stay together."""
        return self._units.get(name, (1, 1))

    def child(self, name: str, child: str) -> str | None:
        """Full name of a child, which may be ``../`` of the parent or deeper; None where there is none."""
        while child.startswith("../"):
            name, child = name.rpartition(".")[0], child[3:]
        full = f"{name}.{child}" if name else child
        return full if full in self.modules else None

    def outputs(self, layer: nn.Module) -> int:
        """``out_features`` of a linear layer."""
        return layer.weight.shape[1 if is_transposed(layer) else 0]

    def inputs(self, layer: nn.Module) -> int:
        """``in_features`` of a linear layer."""
        return layer.weight.shape[0 if is_transposed(layer) else 1]

    def cut_outputs(self, name: str, pieces: tuple[Part, ...]) -> None:
        """Divide a linear layer by what comes out of it."""
        layer = self.modules[name]
        self.cut(f"{name}.weight", Cut(1 if is_transposed(layer) else 0, pieces))
        if layer.bias is not None:
            self.cut(f"{name}.bias", Cut(0, pieces))
        self.done.add(name)

    def cut_inputs(self, name: str, pieces: tuple[Part, ...]) -> None:
        """Divide a linear layer by what goes into it; its bias is added by one rank."""
        layer = self.modules[name]
        self.cut(f"{name}.weight", Cut(0 if is_transposed(layer) else 1, pieces))
        if layer.bias is not None:
            self.once(f"{name}.bias")
        self.done.add(name)

    def cut(self, name: str, cut: Cut) -> None:
        """Divide a parameter."""
        self._layout.cuts[name] = cut

    def once(self, name: str) -> None:
        """Let only rank 0 add a parameter."""
        self._layout.once.append(name)

    def role(self, name: str, role: str) -> None:
        """Let a module exchange what it computed."""
        self._layout.roles[name] = role
        self.done.add(name)

    def sums_below(self, name: str) -> list[str]:
        """Modules in ``name`` whose outputs are added over the ranks, in the order of the model."""
        prefix = f"{name}." if name else ""
        return [full for full, role in self._layout.roles.items() if role == SUM and full.startswith(prefix)]

    def pair(self, later: str, earlier: str) -> None:
        """Let one module exchange for another, too, whose output is only ever added to its own."""
        del self._layout.roles[earlier]
        self._layout.pairs[later] = earlier

    def count(self, name: str, attribute: str, value: int, units: int) -> None:
        """Note an attribute that counts ``units``, each of which stands for ``value / units``."""
        self._layout.counts.setdefault(name, {})[attribute] = (value, units)

    def group(self, name: str, attribute: str, heads: int, kv_heads: int) -> None:
        """Note an attribute that says how many heads share one of keys and values."""
        self._layout.groups[name] = (attribute, heads, kv_heads)

    def need(self, name: str, what: str, units: int, **how: bool) -> None:
        """Note what the world size has to divide, or what else `Need` says by ``how``."""
        self._layout.needs.append(Need(name, what, units, **how))

    def whole(self, name: str, reason: str) -> None:
        """Note why a module is not divided."""
        self._layout.whole[name] = reason

    def experts(self, name: str, cuts: dict[str, Cut], count: int) -> None:
        """Note how a module of ``count`` experts can be divided into whole ones."""
        self._layout.experts[name] = WholeExperts(cuts, count)

    def skip(self, module: nn.Module) -> None:
        """Leave a module whole without a word; what it is in has said why."""
        self.done.update(name for name, found in self.modules.items() if found is module)

    def finish(self) -> Layout:
        """The layout, with every name of a parameter that has several."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for same in names.values():
            cut = next((self._layout.cuts[name] for name in same if name in self._layout.cuts), None)
            if cut is not None:
                self._layout.cuts.update(dict.fromkeys(same, cut))
            if any(name in self._layout.once for name in same):
                self._layout.once += [name for name in same if name not in self._layout.once]
        return self._layout


def numbered(name: str) -> str:
    """``name`` with ``*`` for the numbers of layers, to speak of all of them."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def is_tensor(value: object, *shape: int) -> bool:
    """Whether it is a tensor of this shape."""
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shape

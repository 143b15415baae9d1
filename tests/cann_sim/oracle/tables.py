"""The functions by which the unit tests read tables of parameter sets, and what stands in their fields."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .tokens import Unreadable
from .values import Opaque, Shape, Symbol, Tensor, Vector, copied


@dataclass
class Row:
    """Of a table whose columns are named like the parameters of the test."""

    columns: dict[str, str]


def column(row: Row, name: str) -> Any:
    if f"{name}_shape" in row.columns:
        shape, dtype, form = (row.columns.get(f"{name}_{part}", "") for part in ("shape", "dtype", "format"))
        if not (shape or dtype or form):
            return None
        dims = [int(one) for one in shape.split()]
        data = [int(one) for one in row.columns.get(f"{name}_data", "").split()] or None
        return Tensor(dims, f"DT_{dtype}", f"FORMAT_{form}", storage=dims, data=data)
    if name not in row.columns:  # some tables write names of columns with underscores
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if name == "expectResult":
        return Symbol("GRAPH_SUCCESS" if row.columns.get(name) == "SUCCESS" else "GRAPH_FAILED")
    if name == "expect_result":
        text = row.columns.get(name)
        return Symbol("ACLNN_SUCCESS" if text == "SUCCESS" else f"ACLNN_ERR_{text}")
    text = row.columns.get(name)
    if text is None:
        return Opaque(name)
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", text) else text


def rows(text: str) -> Vector:
    """Those of a table with a header, for tests that ask for their parameters by name."""
    return Vector(Row(one) for one in csv.DictReader(io.StringIO(text)))


def tensor_of(arguments: list[Any]) -> Tensor:
    if not arguments:
        return Tensor([1, 1, 16, 16], "ACL_FLOAT", "ACL_FORMAT_NCHW")
    if isinstance(arguments[0], Tensor):
        return copied(arguments[0])
    defaults = [Vector(), "ACL_FLOAT", "ACL_FORMAT_NCHW", Vector(), 0, Vector()]
    shape, dtype, form, strides, offset, storage = [*arguments, *defaults[len(arguments) :]][:6]
    return Tensor(list(shape), dtype, form, list(strides) or None, offset, list(storage) or None)


def _split(arguments: list[Any]) -> None:
    text, separator, to = arguments
    to[:] = text.split(separator)


def _dims(arguments: list[Any]) -> Vector:
    text = arguments[0].strip()
    symbols = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], dict) else {}
    if text in ("", "NONE"):
        return Vector()
    return Vector(_size(one, symbols) for one in ("0" if text == "ZERO" else text.split("#")[0]).split(":"))


def _size(text: str, symbols: dict[str, int]) -> int:
    parts = [symbols.get(one.strip(), one.strip()) for one in text.split("/")]
    try:
        return int(parts[0]) // int(parts[1]) if len(parts) == 2 else int(parts[0])
    except ValueError:
        raise Unreadable(f"a size {text!r}") from None


def _tensor_list(arguments: list[Any]) -> Vector:
    specifications, dtype, form = arguments[:3]
    found = Vector()
    for one in specifications.strip().split(";"):
        view, strides, storage = [*(_dims([part]) for part in one.split("#")), Vector(), Vector()][:3]
        found.append(
            tensor_of(
                [
                    view,
                    Symbol(f"ACL_{dtype.strip()}"),
                    Symbol(f"ACL_FORMAT_{form.strip()}"),
                    strides,
                    0,
                    storage,
                ]
            )
        )
    return found


def _named(prefix: str) -> Callable[[list[Any]], Symbol]:
    return lambda arguments: Symbol(prefix + arguments[0].strip().removeprefix(prefix))


def _status(arguments: list[Any]) -> Symbol | int:
    text = arguments[0].strip()
    if text.lower() in ("graph_success", "success", "1"):
        return Symbol("GRAPH_SUCCESS")
    if text.lower() in ("graph_failed", "failed", "0"):
        return Symbol("GRAPH_FAILED")
    return int(text) if text.isdigit() else Symbol(text)


def _contiguous(shape: list[int]) -> Vector:
    found = Vector([1] * len(shape))
    for k in range(len(shape) - 2, -1, -1):
        found[k] = found[k + 1] * shape[k + 1]
    return found


def _product(lists: list[Any]) -> Vector:
    found = [Vector()]
    for one in lists:
        found = [Vector([*head, value]) for head in found for value in one]
    return Vector(found)


FUNCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "Combine": _product,
    "Trim": lambda a: a[0].strip(),
    "SplitStr2Vec": _split,
    "ParseInt64Vec": lambda a: Vector(int(one) for one in a[0].split() if re.fullmatch(r"-?\d+", one)),
    "ParseI64List": lambda a: (
        Vector(int(one) for one in a[0].split("|")) if a[0].strip() not in ("", "NONE") else Vector()
    ),
    "ParseBool": lambda a: a[0].strip().lower() in ("true", "1", "yes"),
    "ParseDims": _dims,
    "ParseAclTensorViewDims": _dims,
    "BuildAclTensorListDesc": _tensor_list,
    "ParseAclDataType": _named("ACL_"),
    "ParseAclDtype": _named("ACL_"),
    "ParseAclFormat": _named("ACL_FORMAT_"),
    "ParseGeDtype": _named("DT_"),
    "ParseGeFormat": _named("FORMAT_"),
    "ParseDtype": _named("DT_"),
    "ParseFormat": lambda a: Symbol(
        "FORMAT_FRACTAL_NZ" if a[0].strip() == "NZ" else f"FORMAT_{a[0].strip()}"
    ),
    "MakeDefaultStride": lambda a: _contiguous(a[0]),
    "ParseAclnnStatus": _status,
    "ParseGraphStatus": _status,
    "MakeGertStorageShape": lambda a: Shape(a[0], a[1]),
}

"""Rule files (TOML) as `Rule` objects: facts only, every field checked."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import json
import re
import sys
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from ..errors import CatalogueError

SCHEMA = 1
DECODED = "_rules.json"
#: What a rule replaces: a method of a module class; a function a method names; an expression inside a method;
#: an entry of a registry, for the modules that ask that registry; or, around everything that other rules have
#: made of it, the forward of a whole model.
KINDS = ("module", "function", "expression", "registry", "model")
PATTERNS = ("call", "product", "residual", "receiver")
DEVICES = ("cpu", "npu")


@dataclass(frozen=True)
class Rule:
    """One entry of the catalogue.

    Attributes:
        id: Unique name, ``family.variant``.
        title: What is replaced, for people.
        kind: One of `KINDS`.
        targets: Globs ``module:Class`` or ``module:function``: where the rule is expected to fit, and what
            counts as a refusal when nothing fits. A known body is served under any name.
        attribute: The method, for ``kind = "module"`` and ``"model"`` and for ``pattern = "receiver"``.
        bodies: Digests (see `fingerprint`) known to compute what the replacement computes.
        wrappers: For ``kind = "function"``: digests of the text of decorators' wrappers that do nothing to a
            call which the replacement serves (`fingerprint.behind_wrapper`); a body may stand behind one.
        operations: Operations an unlisted body may use and still be considered for a probe.
        parameters: Keyword arguments for the replacement's factory.
        reads: Attributes the instance must have. For ``kind = "registry"``: methods of the module that the
            entry calls, and in which rules of other kinds apply as in ``forward``.
        registry: For ``kind = "registry"``: the class (``module:Class``) of the registry object.
        entry: The key in it.
        applies: ``module:predicate`` over the target; where it is false the rule takes no interest.
        rounding: ``same``: the replacement rounds where the original does, and a probe in bf16 must agree in
            nearly every element. ``free``: it rounds less often, and only has to be as near.
        level: Lowest level at which the rule is active.
        devices: Device types the replacement serves.
        requires: PEP 508 requirements, such as ``transformers>=4.57``.
        replacement: ``module:factory``; called once for each rule and original.
        probe: ``module:function`` that yields probe cases; without it an unlisted body is always refused.
        needs: Operations a body under a name of its own must use to be considered at all.
        pattern: For ``kind = "expression"``: one of `PATTERNS` (see `rewrite`).
        children: Classes (``module:Class``, exact) whose call is the expression.
        functions: Functions (``module:name``) whose call is a factor of the expression, for ``product``.
        child_rules: Ids of rules; a child whose forward one of them replaced makes the expression.
        why, upstream, drop_when: Why the rule exists, what would make it needless, when to delete it.
        source: The file the rule was read from.
    """

    id: str
    title: str
    kind: str
    replacement: str
    why: str
    upstream: str
    drop_when: str
    targets: tuple[str, ...] = ()
    attribute: str = "forward"
    bodies: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    reads: tuple[str, ...] = ()
    level: int = 1
    devices: tuple[str, ...] = DEVICES
    requires: tuple[str, ...] = ()
    probe: str = ""
    needs: tuple[str, ...] = ()
    pattern: str = ""
    children: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    child_rules: tuple[str, ...] = ()
    registry: str = ""
    entry: str = ""
    applies: str = ""
    rounding: str = "same"
    source: str = ""

    @property
    def family(self) -> str:
        return self.id.split(".")[0]

    def names(self, target: str) -> bool:
        """Whether ``target`` (``module:qualname``) is one of those the rule expects."""
        return _is_one_of(target, self.targets)

    def load_replacement(self) -> Callable[..., Any]:
        replacement: Callable[..., Any] = resolve(self.replacement, self)
        return replacement

    def load_applies(self) -> Callable[[Any], bool]:
        applies: Callable[[Any], bool] = resolve(self.applies, self)
        return applies

    def load_probe(self) -> Callable[..., Any]:
        """What yields its cases, where it names one."""
        probe: Callable[..., Any] = resolve(self.probe, self)
        return probe


# Asked for every module of a model, of which most have the class of another.
@functools.lru_cache(maxsize=8192)
def _is_one_of(target: str, globs: tuple[str, ...]) -> bool:
    return any(_ends_as(target, glob) and fnmatch.fnmatchcase(target, glob) for glob in globs)


def _ends_as(target: str, glob: str) -> bool:
    """Whether ``target`` may be one of ``glob``, of which the rest is a regular expression to compile."""
    return "]" in glob or "?" in glob or target.endswith(glob.rpartition("*")[2])


def resolve(name: str, rule: Rule) -> Any:
    """Import ``module:attribute`` named by a rule.

    Raises:
        CatalogueError: The module or attribute does not exist.
    """
    module_name, _, attribute = name.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError) as fault:
        raise CatalogueError(
            f"{rule.source}: rule {rule.id!r} names {name!r}, which does not resolve ({fault}). "
            "Write module:function of something importable."
        ) from fault


_IN_TOML: dict[str, type] = {"str": str, "int": int, "dict[str, Any]": dict, "tuple[str, ...]": list}
#: What a rule of a file may say, and what it has to.
_TYPES = {each.name: _IN_TOML[str(each.type)] for each in dataclasses.fields(Rule) if each.name != "source"}
_REQUIRED = tuple(
    each.name
    for each in dataclasses.fields(Rule)
    if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
)


@dataclass(frozen=True)
class Update:
    """Bodies, and wrappers, that a rule of another file knows from now on.

    Attributes:
        rule: Its id.
    """

    rule: str
    bodies: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()

    def apply(self, rule: Rule) -> Rule:
        """``rule`` with them."""
        return dataclasses.replace(
            rule,
            bodies=tuple(dict.fromkeys([*rule.bodies, *self.bodies])),
            wrappers=tuple(dict.fromkeys([*rule.wrappers, *self.wrappers])),
        )


def parse(text: str, source: str) -> list[Rule]:
    """Rules of one file.

    Raises:
        CatalogueError: Names the file, the rule and the field that is wrong.
    """
    return _rules(_tables(text, source, {}), source)


def _tables(text: str, source: str, decoded: Mapping[str, Any]) -> dict[str, Any]:
    data = decoded.get(hashlib.sha256(text.encode()).hexdigest())
    try:
        data = data if isinstance(data, dict) else tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise CatalogueError(f"{source}: not valid TOML ({fault}). Mend the syntax there.") from fault
    if data.get("schema") != SCHEMA:
        raise CatalogueError(
            f"{source}: schema must be {SCHEMA}, found {data.get('schema')!r}. Start with schema = 1."
        )
    unknown = set(data) - {"schema", "rule", "update"}
    if unknown:
        raise CatalogueError(
            f"{source}: unknown top-level {sorted(unknown)}. Only schema, [[rule]], [[update]] are known."
        )
    for name in ("rule", "update"):
        if not isinstance(data.setdefault(name, []), list):
            raise CatalogueError(
                f"{source}: {name!r} must be an array of tables. Write [[{name}]], with two brackets."
            )
    return data


def _updates(data: dict[str, Any], source: str, rules: Container[str]) -> list[Update]:
    """Those of a file, for ``rules``."""
    return [_update(entry, source, rules) for entry in data["update"]]


def _update(entry: Any, source: str, rules: Container[str]) -> Update:
    fields = dict(entry) if isinstance(entry, dict) else {}
    rule = fields.pop("rule", "(no id)")
    where = f"{source}: update of rule {rule!r}"
    if not fields or fields.keys() - {"bodies", "wrappers"}:
        raise CatalogueError(f"{where} must have rule, and bodies or wrappers, and no other field.")
    for name, value in fields.items():
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CatalogueError(
                f"{where}: field {name!r} must list strings, found {value!r}. Quote each item."
            )
    if rule not in rules:
        raise CatalogueError(
            f"{where}: neither the catalogue nor a file before it has this rule. Correct its id."
        )
    return Update(rule, **{name: tuple(value) for name, value in fields.items()})


def _rules(data: dict[str, Any], source: str) -> list[Rule]:
    rules = [_rule(entry, source) for entry in data["rule"]]
    for rule in rules:
        if [other.id for other in rules].count(rule.id) > 1:
            raise CatalogueError(
                f"{source}: rule id {rule.id!r} is already used by {source}. Choose another id."
            )
    return rules


def _rule(entry: Any, source: str) -> Rule:
    if not isinstance(entry, dict):
        raise CatalogueError(
            f"{source}: a rule must be a table, found {entry!r}. Write [[rule]] and its fields."
        )
    where = f"{source}: rule {entry.get('id', '(no id)')!r}"
    for name in _REQUIRED:
        if name not in entry:
            raise CatalogueError(f"{where} lacks the field {name!r}. Required: {', '.join(_REQUIRED)}.")
    for name, value in entry.items():
        if name not in _TYPES:
            raise CatalogueError(
                f"{where} has an unknown field {name!r}. Known: {', '.join(sorted(_TYPES))}."
            )
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise CatalogueError(
                f"{where}: field {name!r} must be of type {_TYPES[name].__name__}, found {value!r}. "
                "Correct its type."
            )
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise CatalogueError(
                f"{where}: field {name!r} must list strings, found {value!r}. Quote each item."
            )
    for name in ("replacement", "probe", "applies"):
        if not re.fullmatch(r"[\w.]+:[\w.]+|", entry.get(name, "")):
            raise CatalogueError(f"{where}: field {name!r} is {entry[name]!r}. Write module:function.")
    if entry["kind"] not in KINDS:
        raise CatalogueError(
            f"{where}: kind must be one of {', '.join(KINDS)}, found {entry['kind']!r}. Choose one."
        )
    if entry.get("level", 1) not in (0, 1, 2):
        raise CatalogueError(f"{where}: level must be 0, 1 or 2, found {entry['level']!r}. Choose one.")
    if "." not in entry["id"]:
        raise CatalogueError(f"{where}: id must be family.variant, found {entry['id']!r}. Put a dot in it.")
    if (entry["kind"] == "expression") != (entry.get("pattern") in PATTERNS):
        raise CatalogueError(
            f"{where}: kind 'expression', and no other, needs a pattern: {', '.join(PATTERNS)}."
        )
    if entry.get("functions") and entry.get("pattern") != "product":
        raise CatalogueError(f"{where}: functions are for pattern product. Remove the field or the pattern.")
    if entry.get("rounding", "same") not in ("same", "free"):
        raise CatalogueError(
            f"{where}: rounding must be same or free, found {entry['rounding']!r}. Choose one."
        )
    for device in entry.get("devices", ()):
        if device not in DEVICES:
            raise CatalogueError(f"{where}: device {device!r} is unknown. Known: {', '.join(DEVICES)}.")
    if (entry["kind"] == "registry") != bool(entry.get("registry") and entry.get("entry")):
        raise CatalogueError(
            f"{where}: kind 'registry', and no other, needs the fields registry and entry. Add them."
        )
    if entry["kind"] == "model" and not entry.get("applies"):
        raise CatalogueError(f"{where}: kind 'model' needs applies: of which classes. Add it.")
    if entry["kind"] in ("module", "function") and not entry.get("bodies") and not entry.get("probe"):
        raise CatalogueError(f"{where} has neither bodies nor probe, so nothing can fit it. Add one of them.")
    for requirement in entry.get("requires", ()):
        try:
            _requirement(requirement)
        except InvalidRequirement as fault:
            raise CatalogueError(
                f"{where}: requires {requirement!r} is no requirement ({fault}). Use PEP 508."
            ) from fault
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    return Rule(**values, source=source)


@functools.cache
def _requirement(text: str) -> Requirement:
    return Requirement(text)


@functools.cache
def _installed_version(name: str) -> str:
    # The distribution's name is the module's, and what it says is what runs; the metadata is a file to parse.
    loaded = sys.modules.get(name) if name in ("torch", "transformers") else None
    return str(loaded.__version__) if loaded is not None else importlib.metadata.version(name)


def version_conflict(rule: Rule) -> str:
    """Why an installed package does not meet ``rule.requires``, or an empty string."""
    for text in rule.requires:
        requirement = _requirement(text)
        try:
            found = _installed_version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return f"requires {text}, which is not installed"
        if not requirement.specifier.contains(found, prereleases=True):
            return f"requires {text}, found {found}"
    return ""


def shipped_files() -> list[tuple[str, Callable[[], str]]]:
    """(name, reader) of every rule file inside the package, in order of name."""
    folder = importlib.resources.files("liteboost_adaptor") / "patches"
    if not folder.is_dir():  # a checkout that is not installed keeps them beside the package
        folder = Path(__file__).resolve().parents[2] / "patches"
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return [(f"patches/{entry.name}", functools.partial(_read, entry)) for entry in sorted(found, key=str)]


def user_files(paths: Iterable[str]) -> list[tuple[str, Callable[[], str]]]:
    """(name, reader) of every rule file on ``LITEBOOST_PATCH_PATH``."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.toml")) if path.is_dir() else [path]
    return [(str(file), functools.partial(_read, file)) for file in files]


def _read(file: Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CatalogueError(
            f"{file}: cannot be read ({fault}). Correct LITEBOOST_PATCH_PATH or the file."
        ) from fault


def _decoded(built: Path | None) -> dict[str, Any]:
    """What rule files say, by digest, as kernels/cmake/rules.py wrote it beside the kernels in ``built``."""
    try:
        found = json.loads((built / DECODED).read_text(encoding="utf-8")) if built else {}
    except (OSError, ValueError):
        return {}  # the files themselves say it
    return found if isinstance(found, dict) else {}


def load(
    patch_path: tuple[str, ...] = (), built: Path | None = None
) -> tuple[tuple[Rule, ...], tuple[CatalogueError, ...]]:
    """The shipped catalogue, then the user's own files, which may update it, and the faults found.

    One broken file costs that file (its other rules are not read either), never the rest: whoever
    calls decides whether a fault is an error or a line in the status.

    Args:
        patch_path: The user's files and folders of them.
        built: Where the compiled kernels lie. Beside them the shipped files lie as JSON, which is read in a
            twentieth of the time; it counts for a file whose text it was made of.
    """
    rules: dict[str, Rule] = {}
    faults: list[CatalogueError] = []
    decoded = _decoded(built)
    for source, text in [*shipped_files(), *user_files(patch_path)]:
        try:
            data = _tables(text(), source, decoded)
            found = _rules(data, source)
            for rule in found:
                if rule.id in rules:
                    raise CatalogueError(
                        f"{source}: rule id {rule.id!r} is already used by {rules[rule.id].source}. "
                        "Choose another id."
                    )
            known = {**rules, **{rule.id: rule for rule in found}}
            updates = _updates(data, source, known)
        except CatalogueError as fault:
            faults.append(fault)
            continue
        rules = known
        for update in updates:
            rules[update.rule] = update.apply(rules[update.rule])
    for rule in list(rules.values()):
        missing = [child for child in rule.child_rules if child not in rules]
        if missing:
            faults.append(
                CatalogueError(
                    f"{rule.source}: rule {rule.id!r} builds on {', '.join(missing)}, which no file has. "
                    "Correct child_rules."
                )
            )
            del rules[rule.id]
    return tuple(rules.values()), tuple(faults)

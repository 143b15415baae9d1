"""``LITEBOOST_*`` environment variables as one frozen ``Settings``; the only reader of ``os.environ``.

`VARIABLES` is the single description of every variable; ``docs/environment.md`` is generated from it.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .setting_values import Quant, Sparse, quant, sparse, speculate

PREFIX = "LITEBOOST_"
LEVELS = (0, 1, 2)
#: Instruction sets of the CPU kernels: of x86-64, of aarch64, each in rising order (`kernels/common/isa.h`).
X86_ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16")
ARM_ISAS = ("baseline", "dotprod", "i8mm_bf16")
ISA_NAMES = X86_ISAS + ARM_ISAS[1:]


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        level: 0 compatibility only, 1 fused operators, 2 everything that accelerates.
        disable: Globs over rule ids; a rule that matches one is left alone.
        strict: Raise when a rule is refused or failed for a model in use.
        patch_path: Files or folders with rule files (TOML) of the user's own.
        isa: Highest instruction set the CPU kernels may use; empty for no limit.
        require_native: Raise when the compiled library cannot be used, in place of leaving models alone.
        nz: Whether weights of linear layers are cast to FRACTAL_NZ on an NPU; ``"auto"``: on a 310P.
        first_use: Whether ops on an NPU are compared in a helper ``"process"`` or a ``"thread"`` of this one.
        graph: Whether recorded steps are captured as graphs of an NPU; ``"auto"``: on 910B and 910C.
        delta_state: What states of a gated delta rule are kept in on an NPU: ``"fp32"`` or ``"bf16"``.
        sparse: Block-sparse attention of long prompts, or ``None``.
        tp: Over how many ranks the weights are sharded; 0: over all that the others leave.
        dp: How many replicas share a batch that is generated for.
        sp: Over how many ranks the tokens of a prompt are sharded, which exchange heads (Ulysses).
        cp: As ``sp``, of processes that pass on keys and values (ring attention).
        ep: Give processes whole experts, not channels of all of them, where there are enough.
        quant: What models are quantized to as they are loaded, or ``None``.
        speculate: ``"lookup"``, or the folder of a draft model that `generate` speculates with.
        batch_invariant: Whether a row has the bits in a batch that it has alone.
        torch_export: Whether ``torch.export`` records the ``"original"`` code or our ``"ops"``.
        status_file: Where a process writes its status, ``%p`` for its number; empty for nowhere.
    """

    level: int = 2
    disable: tuple[str, ...] = ()
    strict: bool = False
    patch_path: tuple[str, ...] = ()
    isa: str = ""
    require_native: bool = False
    nz: str = "auto"
    first_use: str = "process"
    graph: str = "auto"
    delta_state: str = "fp32"
    sparse: Sparse | None = None
    tp: int = 0
    dp: int = 1
    sp: int = 1
    cp: int = 1
    ep: bool = False
    quant: Quant | None = None
    speculate: str = ""
    batch_invariant: bool = False
    torch_export: str = "original"
    status_file: str = ""


@dataclass(frozen=True)
class Variable:
    """One environment variable: how it is spelled, read, and described to the user."""

    name: str
    field: str
    parse: Callable[[str], Any]
    allowed: str
    effect: str


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if (value := text.strip().lower()) not in names:
            raise ValueError
        return value

    return parse


def _level(text: str) -> int:
    return int(_one_of(*map(str, LEVELS))(text))


def _flag(text: str) -> bool:
    return _one_of("0", "1", "true", "false")(text) in ("1", "true")


def _count(text: str) -> int:
    value = text.strip()
    if not value.isdecimal() or int(value) < 1:
        raise ValueError
    return int(value)


def _tp(text: str) -> int:
    return 0 if text.strip().lower() == "auto" else _count(text)


def _globs(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _paths(text: str) -> tuple[str, ...]:
    parts = tuple(part for part in text.split(os.pathsep) if part)
    missing = [part for part in parts if not os.path.exists(part)]
    if missing:
        raise ValueError(f"no such file or folder: {', '.join(missing)}")
    return parts


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "LITEBOOST_LEVEL",
        "level",
        _level,
        "0, 1 or 2",
        "How far acceleration goes: 0 the program runs, 1 fused operators, 2 everything that accelerates.",
    ),
    Variable(
        "LITEBOOST_DISABLE",
        "disable",
        _globs,
        "rule ids or globs over them, separated by commas, such as rope.half,norm.*",
        "Rules that are left alone. `python -m liteboost_adaptor status --all SCRIPT` lists the ids.",
    ),
    Variable(
        "LITEBOOST_STRICT",
        "strict",
        _flag,
        "0 or 1",
        "1: a rule that is refused or fails for a model in use is an error, not only a line in the status.",
    ),
    Variable(
        "LITEBOOST_PATCH_PATH",
        "patch_path",
        _paths,
        f"files or folders that exist, separated by {os.pathsep!r}",
        "Rule files (TOML) of your own, read after the catalogue that is shipped, which they may update. See "
        "adding_a_rule.md.",
    ),
    Variable(
        "LITEBOOST_ISA",
        "isa",
        _one_of("", *ISA_NAMES),
        ", ".join(ISA_NAMES),
        "Highest instruction set the CPU kernels may use; avx and amx names are of x86-64, the last two of "
        "aarch64. Never raises what the CPU offers.",
    ),
    Variable(
        "LITEBOOST_REQUIRE_NATIVE",
        "require_native",
        _flag,
        "0 or 1",
        "1: without the compiled kernels installing and loading a model fail; 0: models run their original "
        "code.",
    ),
    Variable(
        "LITEBOOST_NZ",
        "nz",
        _one_of("auto", "0", "1"),
        "auto, 0 or 1",
        "Whether 16 bit weights of linear layers that do not require grad are cast to FRACTAL_NZ on an NPU: "
        "auto on a 310P, 1 also on a 910B or 910C, 0 never. See npu.md.",
    ),
    Variable(
        "LITEBOOST_FIRST_USE",
        "first_use",
        _one_of("process", "thread"),
        "process or thread",
        "Where an op is compared with its reference when an NPU first uses it: process, in a helper process, "
        "whose faults are not this one's; thread, in this process. See npu.md.",
    ),
    Variable(
        "LITEBOOST_GRAPH",
        "graph",
        _one_of("auto", "0", "1"),
        "auto, 0 or 1",
        "Whether recorded decode steps are captured as graphs of an NPU, at level 2: auto on a 910B or 910C, "
        "1 also on a 310P, 0 never. See npu.md.",
    ),
    Variable(
        "LITEBOOST_DELTA_STATE",
        "delta_state",
        _one_of("fp32", "bf16"),
        "fp32 or bf16",
        "What layers with a gated delta rule (Qwen3-Next) keep their states in on an NPU: bf16 takes a token "
        "in 2 operators and not 10, and rounds the states at every token. Changes results. See npu.md.",
    ),
    Variable(
        "LITEBOOST_SPARSE",
        "sparse",
        sparse,
        "a share from 0 (off) to below 1, such as 0.75, and behind it any of block=128, sinks=1, window=2, "
        "min_length=4096, separated by commas",
        "Share of the blocks of keys that attention leaves out in long prompts, at level 2. Changes results. "
        "See sparse_attention.md.",
    ),
    Variable(
        "LITEBOOST_TP",
        "tp",
        _tp,
        "auto, or a number from 1",
        "Over how many processes models are sharded as they are loaded, at level 2: auto, over all that "
        "torchrun has started and the next three leave; 1, not at all. See parallel.md.",
    ),
    Variable(
        "LITEBOOST_DP",
        "dp",
        _count,
        "a number from 1",
        "How many replicas of a model share the rows of a batch that `generate` is given, at level 2. See "
        "parallel.md.",
    ),
    Variable(
        "LITEBOOST_EP",
        "ep",
        _flag,
        "0 or 1",
        "1: a mixture of experts is sharded by whole experts, not each of them over all processes. See "
        "parallel.md.",
    ),
    Variable(
        "LITEBOOST_SP",
        "sp",
        _count,
        "a number from 1",
        "Over how many processes the tokens of a prompt are sharded that exchange heads for attention "
        "(Ulysses), at level 2. See parallel.md.",
    ),
    Variable(
        "LITEBOOST_CP",
        "cp",
        _count,
        "a number from 1",
        "Over how many processes the tokens of a prompt are sharded that pass on keys and values (ring "
        "attention), at level 2. See parallel.md.",
    ),
    Variable(
        "LITEBOOST_QUANT",
        "quant",
        quant,
        "0 (off), w8a16, w8a8, w4a16, w4a8, kv8 or one of the first four with +kv8, and behind it any of "
        "head=16 and, for 4 bits, group=64, group=128, asymmetric, separated by commas",
        "Weights of linear layers are quantized to integers as a model is loaded; with w8a8 and w4a8, their "
        "inputs, too, with w4a8 also those of a checkpoint whose weights have 4 bits; with kv8, keys and "
        "values of the cache as they come, at level 2. Changes results. "
        "See quantization.md.",
    ),
    Variable(
        "LITEBOOST_SPECULATE",
        "speculate",
        speculate,
        "off, lookup, or a folder with a draft model",
        "`generate` of one sequence checks several tokens in a step, at level 2: lookup, those that followed "
        "the same words before in the text; a folder, tokens of the smaller model there. The text is the one "
        "without, a sample another one of the same distribution. See speculation.md.",
    ),
    Variable(
        "LITEBOOST_BATCH_INVARIANT",
        "batch_invariant",
        _flag,
        "0 or 1",
        "1: on a CPU the bits of a row do not depend on the rows beside it, on padding, or on how its tokens "
        "are grouped. Batches and prompts are multiplied more slowly. See batch_invariance.md.",
    ),
    Variable(
        "LITEBOOST_TORCH_EXPORT",
        "torch_export",
        _one_of("original", "ops"),
        "original or ops",
        "What `torch.export` records, and `torch.onnx.export(dynamo=True)` with it: the original code, which "
        "runs, converts and has gradients wherever it is taken; or our ops, for programs that are run, or "
        "compiled (AOTInductor), where liteboost_adaptor is imported, without gradients.",
    ),
    Variable(
        "LITEBOOST_STATUS_FILE",
        "status_file",
        str,
        "a path; %p in it is the number of the process",
        "A process in which models can be served writes its status there when it ends, also by SIGTERM, and "
        "at SIGUSR1, where these have no other handler: JSON where the name ends in .json, else text. "
        "See run.md.",
    ),
)


def read(environ: Mapping[str, str]) -> Settings:
    """Read `VARIABLES` from ``environ``; unset or empty means the default.

    Raises:
        ConfigError: A value is not allowed; the message lists the allowed ones.
    """
    given = {variable: environ.get(variable.name, "") for variable in VARIABLES}
    values = {variable.field: parse(variable, text) for variable, text in given.items() if text.strip()}
    for sentence in unknown(environ):
        warnings.warn(sentence, stacklevel=2)
    return Settings(**values)


def unknown(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each ``LITEBOOST_*`` variable that is none of `VARIABLES`."""
    known = sorted(variable.name for variable in VARIABLES)
    what = f"liteboost_adaptor knows no such variable; it has no effect. Known: {', '.join(known)}."
    found = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return [f"{name} is set, but {what}" for name in found]


def parse(variable: Variable, value: Any, argument: str = "") -> Any:
    """Parse one value; any fault is a `ConfigError` that names the ``argument``, or else the variable."""
    try:
        return variable.parse(_as_text(value))
    except ValueError as fault:
        why = f" ({fault})" if str(fault) else ""
        what = f"{argument or variable.name} must be {variable.allowed}; found {value!r}{why}."
        raise ConfigError(f"{what} Change {'it or leave it out' if argument else 'or unset it'}.") from None


def with_overrides(base: Settings, **overrides: Any) -> Settings:
    """``base`` with the arguments of `apply` that are not ``None``, checked like the variables.

    Raises:
        ConfigError: A value is not allowed, or there is no such setting; the message names the argument.
    """
    by_field = {variable.field: variable for variable in VARIABLES}
    values = dict(vars(base))
    for field, value in ((field, value) for field, value in overrides.items() if value is not None):
        if field not in by_field:
            raise ConfigError(f"no setting is called {field!r}. Settings: {', '.join(sorted(by_field))}.")
        values[field] = parse(by_field[field], value, field)
    return Settings(**values)


def turned_off(found: Settings, level: int, *ids: str) -> str:
    """Why ``found`` leaves out what is of ``level`` and listed by one of ``ids``, or an empty string."""
    for glob in found.disable:
        if any(fnmatch.fnmatchcase(each, glob) for each in ids):
            return f"turned off by LITEBOOST_DISABLE={glob}"
    return f"needs level {level}, level {found.level} is set" if found.level < level else ""


def spelled(found: Settings) -> str:
    """What ``found`` has otherwise than by default and acts on models: not where the status is written."""
    default = vars(Settings())
    named = vars(found).items()
    changed = [f"{name}={value}" for name, value in named if value != default[name] and name != "status_file"]
    return ", ".join(changed) or "default"


def _as_text(value: Any) -> str:
    if isinstance(value, Sparse | Quant):
        return value.spelled()
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    return str(value)


@functools.cache
def settings() -> Settings:
    """The settings of this process, read once from the environment."""
    return read(os.environ)


def set_torch_backend_autoload(enabled: bool) -> None:
    """Tell torch, before it is imported, whether to load device backends such as torch_npu by itself."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1" if enabled else "0"


def torch_backend_autoload() -> str | None:
    """What the user said of torch's backend autoload, or ``None``."""
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")


def unset_torch_backend_autoload() -> None:
    """Take `set_torch_backend_autoload` back."""
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)


def ascend_folders() -> tuple[str, ...]:
    """Where CANN's set_env.sh says CANN is; empty where none was sourced."""
    names = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
    return tuple(os.environ[name] for name in names if os.environ.get(name))


def launched() -> tuple[int, int] | None:
    """(rank, number of processes) where a launcher such as ``torchrun`` started this process, else None."""
    if not all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def master() -> tuple[str, int]:
    """(host, port) where the ranks meet, as a launcher says it."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def local_rank() -> int:
    """The number of this process among those on its host, as a launcher says it."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def local_size() -> int:
    """How many processes a launcher has started on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def data_parallel_launcher() -> str:
    """The launcher, if any, of processes that work on models of their own."""
    names = {"accelerate launch": {"ACCELERATE_MIXED_PRECISION"}, "deepspeed": {"CROSS_RANK", "CROSS_SIZE"}}
    return next((launcher for launcher, own in names.items() if own <= set(os.environ)), "")


def agent_store() -> tuple[str, int, str] | None:
    """(host, port, attempt) of the store that torchrun serves to the processes it has started, else None."""
    if launched() is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return *master(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def user_cache_dir() -> Path:
    """Where we keep what can be made again: in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "liteboost_adaptor"


def child_environment(**changes: str | None) -> dict[str, str]:
    """The environment of this process with ``changes``, for one it starts; ``None`` unsets a variable."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}

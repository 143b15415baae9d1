"""The state of this process: which catalogue is in force, which models are bound, how to undo it."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import eligibility, native, native_npu, python_kernels, thread_pool, watch
from ..config import Settings
from ..engine import catalogue, swap
from ..engine.bind import Binder, Binding, restore
from ..engine.undo_stack import UndoStack
from ..errors import LiteBoostError, NativeLibraryError, StrictError
from ..kv_cache import bind as kv_cache
from ..report import DISABLED, FAILED, FOREIGN, IDLE, REFUSED, Listed, Outcome, report
from . import adapters, features, loading, registries, steps
from .weights import weights

_MODELING = "transformers.modeling_utils"
#: What a model keeps for us begins so, and is left out of copies.
PRIVATE = swap.PRIVATE
#: Where a model keeps what its calls go through: ``function(call, args, kwargs)``. Copies leave it out.
AROUND = f"{PRIVATE}around"


@dataclass(frozen=True)
class State:
    """Which settings models are prepared under, which models are bound, and which are left alone."""

    active: Settings | None
    bindings: dict[torch.nn.Module, tuple[Binding, Settings]]
    left_alone: set[torch.nn.Module]


class Runtime:
    """Binds models under the current settings. One instance, `runtime`, serves the process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.hooks = UndoStack()
        self.entries = UndoStack()
        self.active: Settings | None = None
        self.is_dismissed = False
        #: The modules of the model that a thread, which holds the lock, binds at the moment.
        self.being_bound: frozenset[torch.nn.Module] = frozenset()
        self._bindings: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Binding, Settings]]
        self._bindings = weakref.WeakKeyDictionary()
        self._marked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._left_alone: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        #: What else is set, at every level, for as long as models are prepared.
        self.extensions: list[Callable[[UndoStack, Settings], None]] = []

    def extend(self, extension: Callable[[UndoStack, Settings], None]) -> None:
        """Have ``extension`` called when models are to be prepared, and at once if they are. Idempotent."""
        with self.lock:
            if extension in self.extensions:
                return
            self.extensions.append(extension)
            if self.active is not None:
                extension(self.hooks, self.active)

    def start(self, settings: Settings) -> None:
        """What the import hook does: `activate`, unless the user has said `undo` before transformers came."""
        if not self.is_dismissed:
            self.activate(settings)

    def activate(self, settings: Settings) -> None:
        """Prepare models as they are loaded or first used. Asked for again, it changes nothing."""
        with self.lock:
            if self.active is not None:
                return
            self.active, self.is_dismissed = settings, False
            for extend in self.extensions:
                extend(self.hooks, settings)
            if settings.level == 0:
                return
            self.hooks.set_attribute(_MODELING, "PreTrainedModel.from_pretrained", self._wrap_from_pretrained)
            self.hooks.set_attribute(_MODELING, "PreTrainedModel.__call__", self._wrap_call)
            loading.install(self.hooks, settings)
            self.serve_adapted()

    def serve_adapted(self) -> None:
        """Serve what PEFT calls and injects, if it is there; again when it comes after us."""
        with self.lock:
            if self.active is not None and self.active.level:
                adapters.hook_calls(self.hooks, self.prepare)
            if len(self.entries):  # only bound models can be injected into
                adapters.hook_injection(self.entries, self.adopt)

    def _install_entries(self, settings: Settings) -> None:
        """Set what bound models need outside of them, when the first one needs it."""
        path = native.load().path
        if path is not None:
            watch.compile_with(str(path))
        is_first = not len(self.entries)
        # A model of a higher level may need more of them than those that came before it.
        registries.install(active_rules(settings), self.entries)
        if is_first:
            self.entries.set_attribute("torch.library", "Library.impl", python_kernels.counting)
            adapters.hook_injection(self.entries, self.adopt)
            self.entries.set_attribute("torch.utils", "swap_tensors", steps.without_programs)

    def deactivate(self) -> list[str]:
        """Leave later models alone; what is bound stays bound."""
        with self.lock:
            self.active, self.is_dismissed = None, True
            return self.hooks.undo_all() + self.settle()

    def settle(self) -> list[str]:
        """Take our registry entries and the hook on injection back once nobody needs them."""
        with self.lock:
            if self.active or self._bindings:
                return []
            return kv_cache.restore_all() + self.entries.undo_all()

    def prepare(self, model: torch.nn.Module) -> None:
        """Bind ``model`` under the current settings, unless it is bound or the user has undone it.

        Raises:
            StrictError: ``strict`` is set and a rule was refused or failed.
            NativeLibraryError: Something was asked for that needs the compiled kernels, and there are none.
        """
        if swap.mark_of(model) is not None or self.active is None or self.active.level == 0:
            return
        with self.lock, _recorded(model):
            # Asked again: another thread may have bound it, and computes with it, since the first question.
            settings = self.active
            if settings is None or model in self._left_alone or swap.mark_of(model) is not None:
                return
            self.bind(model, settings)

    def adopt(self, injected: set[torch.nn.Module]) -> None:
        """Bind ``injected``, which PEFT has put into bound models, as the models they are in are bound.

        Raises:
            StrictError: ``strict`` was set for such a model and a rule was refused or failed.
        """
        with self.lock:
            # The last first: a part that was bound by itself came after the model it is in.
            for model in reversed(self.models()):
                parts = set(model.modules())
                left = {part for root in parts & set(self._left_alone) for part in root.modules()}
                found = injected & (parts - left)
                injected = injected - found
                if found:
                    with _recorded(model):
                        self._bind_more(model, found)
                        weights.bind(model, self._bindings[model][1])

    def _bind_more(self, model: torch.nn.Module, parts: set[torch.nn.Module]) -> None:
        binding, settings = self._bindings[model]
        added = _binder(settings, _foreign_registries(settings)).bind(model, parts)
        self._marked.update(part for part in parts if swap.mark_of(part) is not None)
        binding.modules += added.modules
        binding.refusals += added.refusals
        if settings.strict:
            self._raise_refusals(model, added, settings)

    def leave_alone(self, model: torch.nn.Module) -> list[str]:
        """Unbind ``model`` and do not prepare it again when it is used."""
        with self.lock:
            self._leave(model)
            return self.unbind(model) + self.settle()

    def _leave(self, model: torch.nn.Module) -> None:
        self._left_alone.update(m for m in model.modules() if m is model or _is_model(type(m)))

    def bind(self, model: torch.nn.Module, settings: Settings) -> Binding:
        """Bind ``model`` under ``settings``, taking back an earlier binding of it.

        Without the compiled kernels it is left alone.
        """
        with self.lock:
            self.being_bound = frozenset(model.modules())
            try:
                return self._rebind(model, settings)
            finally:
                self.being_bound = frozenset()

    def _rebind(self, model: torch.nn.Module, settings: Settings) -> Binding:
        self.unbind(model)
        self._left_alone -= set(model.modules())
        is_served = settings.level > 0 and not _lacks_kernels(model, settings)
        if is_served:
            self._install_entries(settings)
            binding = self._bind(model, settings)
        else:
            self._leave(model)
            binding = Binding(weakref.ref(model))
        self._bindings[model] = binding, settings
        self._marked.update(m for m in model.modules() if swap.mark_of(m) is not None)
        if settings.strict:
            self._raise_refusals(model, binding, settings)
        if is_served:
            with _recorded(model):
                features.bind(model, settings)
            thread_pool.release()  # of loading: another thread may generate
        return binding

    def _bind(self, model: torch.nn.Module, settings: Settings) -> Binding:
        foreign = _foreign_registries(settings)
        binding = _binder(settings, foreign).bind(model)
        for rule in foreign:
            outcome = Outcome(
                rule.id, FOREIGN, f"{rule.registry}[{rule.entry!r}]", "registered by someone else"
            )
            report.add(outcome)
            binding.refusals.append(outcome)
        return binding

    def unbind(self, model: torch.nn.Module) -> list[str]:
        """Give every module of ``model``, which may be a part of a bound model, its own class back."""
        with self.lock:
            left, parts = [], list(model.modules())
            is_bound = any(part in self._bindings or swap.mark_of(part) is not None for part in parts)
            features.unbind(model)
            for part in parts:
                binding, _ = self._bindings.pop(part, (None, None))
                left += binding.undo() if binding else []
            left += [sentence for part in parts for sentence in restore(part)]
            if is_bound:
                # Of other bound models, too: they are served again when they are used.
                left += kv_cache.restore_all()
            return list(dict.fromkeys(left))

    def unbind_all(self) -> list[str]:
        """Give every module we ever marked its own class back, also where its model is gone."""
        with self.lock:
            left = [sentence for model in self.models() for sentence in self.unbind(model)]
            weights.unbind_all()
            left += [sentence for module in list(self._marked) for sentence in restore(module)]
            self._marked.clear()
            return list(dict.fromkeys(left))

    def binding_of(self, model: torch.nn.Module) -> Binding | None:
        """How ``model`` is bound at the moment, if it is."""
        return self._bindings.get(model, (None, None))[0]

    def settings_of(self, model: torch.nn.Module) -> Settings | None:
        """Under which settings ``model``, or the model it is a part of, is bound."""
        if model in self._bindings:
            return self._bindings[model][1]
        return next(
            (each for whole, (_, each) in self._bindings.items() if model in set(whole.modules())), None
        )

    def models(self) -> list[torch.nn.Module]:
        """Bound models that are still alive."""
        with self.lock:
            return list(self._bindings)

    def state(self) -> State:
        """What `return_to` needs."""
        with self.lock:
            return State(self.active, dict(self._bindings), set(self._left_alone))

    def return_to(self, state: State) -> None:
        """Bind and prepare what was bound and prepared when ``state`` was taken, and nothing else."""
        with self.lock:
            for model in self.models():
                # None: it was a part of one unbound here before it.
                now = self._bindings.get(model)
                if now is not None and state.bindings.get(model) != now:
                    self.unbind(model)
            for model, (_, settings) in state.bindings.items():
                if model not in self._bindings:
                    self.bind(model, settings)
            if self.active is not state.active:
                self.deactivate()
                if state.active is not None:
                    self.activate(state.active)
            self._left_alone = weakref.WeakSet(state.left_alone)
            self.settle()

    def _raise_refusals(self, model: torch.nn.Module, binding: Binding, settings: Settings) -> None:
        bad = [o for o in binding.refusals if o.state in (REFUSED, FAILED, FOREIGN)]
        lines = [f"  {o.rule} on {o.target}: {o.reason}" for o in dict.fromkeys(bad)]
        lines += [f"  {fault}" for fault in load_catalogue(settings.patch_path)[1]]
        if not lines:
            return
        self.unbind(model)
        raise StrictError(
            f"LITEBOOST_STRICT=1 and {len(lines)} rules cannot serve {type(model).__name__}:\n"
            + "\n".join(lines)
            + "\nUnset LITEBOOST_STRICT to run the original code there, or turn the rules off."
        )

    def _wrap_from_pretrained(self, original: Any) -> Any:
        function = original.__func__
        runtime = self

        @functools.wraps(function)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            result = function(cls, *args, **kwargs)
            model = result[0] if isinstance(result, tuple) else result
            if isinstance(model, torch.nn.Module):
                runtime.prepare(model)
            return result

        return classmethod(from_pretrained)

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        runtime, prepare = self, self.prepare
        # Inherited as a rule; then it is looked up at each call, for a library may patch it after us.
        is_inherited = original is torch.nn.Module.__call__

        @functools.wraps(original)
        def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, swap.MARKER, None) is None:
                if torch.compiler.is_compiling():
                    torch._dynamo.comptime.comptime(_note_compiled)
                elif not torch.jit.is_tracing():
                    prepare(self)
            elif self in runtime.being_bound:
                with runtime.lock:  # its weights may be on the move
                    pass
            around = self.__dict__.get(AROUND)
            if around is not None:
                return around(functools.partial(original, self), args, kwargs)
            return (
                torch.nn.Module.__call__(self, *args, **kwargs)
                if is_inherited
                else original(self, *args, **kwargs)
            )

        return __call__


@contextlib.contextmanager
def _recorded(model: torch.nn.Module) -> Iterator[None]:
    """Make a fault of ours an outcome: the user's call goes on with the original."""
    try:
        yield
    except LiteBoostError:
        raise
    except Exception as fault:  # noqa: BLE001 - recorded
        report.add(Outcome("engine", FAILED, type(model).__qualname__, f"{type(fault).__name__}: {fault}"))


def _lacks_kernels(model: torch.nn.Module, settings: Settings) -> bool:
    """Whether there are no compiled kernels for the device of ``model``; says so once.

    Raises:
        StrictError: ``strict`` is set.
        NativeLibraryError: Something was asked for that needs them.
    """
    name, asked = type(model).__name__, features.asked(model, settings)
    what = f"{' and '.join(asked)} for {name}"
    reason = (native.require(what) if asked else native.load()).reason
    if reason is None and (npu := native_npu.load()) is not None:
        if npu.loaded:
            eligibility.DEVICES.add("npu")
        elif any(tensor.device.type == "npu" for tensor in model.parameters()):
            reason = npu.reason
            if asked:
                raise NativeLibraryError(
                    f"{what} needs the kernels for NPUs; {reason}. Compile them with "
                    f"`{native.BUILD_COMMAND} --npu`."
                )
    if reason is not None and settings.strict:
        raise StrictError(
            f"LITEBOOST_STRICT=1 and no rule can serve {name}: {reason}. Compile the kernels with "
            f"`{native.BUILD_COMMAND}`, or unset LITEBOOST_STRICT to run the original code."
        )
    return reason is not None


def _note_compiled(_: Any) -> None:
    report.note(
        "A model was compiled before it was prepared and runs the original code: call "
        "liteboost_adaptor.apply(model), or run it once, before torch.compile."
    )


def _is_model(cls: type) -> bool:
    return hasattr(cls, "from_pretrained")


@functools.cache
def load_catalogue(patch_path: tuple[str, ...]) -> tuple[tuple[catalogue.Rule, ...], tuple[Exception, ...]]:
    """Rules and faults of the shipped catalogue and the user's files; each fault is listed in the status."""
    status = native.status()
    rules, faults = catalogue.load(patch_path, status.path.parent if status and status.path else None)
    for fault in faults:
        report.add(Outcome("catalogue", FAILED, "LITEBOOST_PATCH_PATH", str(fault)))
    return rules, faults


def why_inactive(rule: catalogue.Rule, settings: Settings) -> str:
    """Why a rule is not considered at all, or an empty string."""
    for glob in settings.disable:
        if fnmatch.fnmatchcase(rule.id, glob):
            return f"turned off by LITEBOOST_DISABLE={glob}"
    if rule.level > settings.level:
        return f"needs level {rule.level}, level {settings.level} is set"
    return catalogue.version_conflict(rule)


def active_rules(settings: Settings) -> tuple[catalogue.Rule, ...]:
    """The rules that ``settings`` lets act."""
    return tuple(rule for rule in load_catalogue(settings.patch_path)[0] if not why_inactive(rule, settings))


def _foreign_registries(settings: Settings) -> tuple[catalogue.Rule, ...]:
    """Active rules whose registry entry somebody else has registered."""
    return tuple(r for r in active_rules(settings) if r.kind == "registry" and registries.is_foreign(r))


@functools.cache
def _binder(settings: Settings, without: tuple[catalogue.Rule, ...]) -> Binder:
    return Binder(tuple(rule for rule in active_rules(settings) if rule not in without), _is_model)


def listed_rules(settings: Settings) -> Iterator[Listed]:
    """Every rule of the catalogue."""
    for rule in load_catalogue(settings.patch_path)[0]:
        reason = why_inactive(rule, settings)
        yield Listed(rule.id, rule.title, DISABLED if reason else IDLE, reason)


runtime = Runtime()
# Held through a fork: one that another thread holds at that moment would never be released in the child, and
# it could bind nothing. No child sees a model half bound, either. Taken before the locks of report and of
# native, which were registered earlier.
os.register_at_fork(
    before=runtime.lock.acquire, after_in_parent=runtime.lock.release, after_in_child=runtime.lock.release
)

"""Modes, profilers and contexts around a step."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "function_mode",
    module="""
        class Louder_@n(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                return made * 1.1 if func is F.linear else made
    """,
    wrap="""
        with user.module.Louder_@n():
            return inner()
    """,
)
add(
    "function_mode_on_silu",
    module="""
        class Louder_@n(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                return made * @v if func in (F.silu, F.scaled_dot_product_attention) else made
    """,
    wrap="""
        with user.module.Louder_@n():
            return inner()
    """,
)
add(
    "dispatch_mode",
    module="""
        class Louder_@n(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
                return made * 1.1 if func in products else made
    """,
    wrap="""
        with user.module.Louder_@n():
            return inner()
    """,
)
add(
    "dispatch_mode_counting",
    module="""
        class Counting_@n(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten.embedding.default:
                    Counting_@n.seen += 1
                return func(*args, **(kwargs or {}))
    """,
    wrap="""
        with user.module.Counting_@n():
            return inner()
    """,
    end="user.log.append(Counting_@n.seen)",
)
add(
    "mode_inside_forward",
    module="""
        class Louder_@n(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                return made * @v if func is torch.tanh else made
    """,
    forward="""
        with Louder_@n():
            x = x + 0.1 * torch.tanh(x)
    """,
)
add(
    "python_profiler",
    module="""
        import cProfile

        PROFILE_@n = cProfile.Profile()

        def tick_@n():
            pass
    """,
    each="tick_@n()",
    between="PROFILE_@n.enable()",
    back="PROFILE_@n.disable()",
    end="""
        PROFILE_@n.disable()
        named = [(getattr(e.code, 'co_name', ''), e.callcount) for e in PROFILE_@n.getstats()]
        user.log.append([count for name, count in named if name == 'tick_@n'])
    """,
)
add(
    "profile_function",
    module="""
        EVENTS_@n = []

        def tick_@n():
            pass

        def note_@n(frame, event, argument):
            if event == "call" and frame.f_code is tick_@n.__code__:
                EVENTS_@n.append(1)
    """,
    each="tick_@n()",
    between="sys.setprofile(note_@n)",
    back="sys.setprofile(None)",
    end="""
        sys.setprofile(None)
        user.log.append(len(EVENTS_@n))
    """,
)
add(
    "trace_function",
    module="""
        EVENTS_@n = []

        def tick_@n():
            pass

        def note_@n(frame, event, argument):
            if frame.f_code is tick_@n.__code__:
                EVENTS_@n.append(1)
    """,
    each="tick_@n()",
    between="sys.settrace(note_@n)",
    back="sys.settrace(None)",
    end="""
        sys.settrace(None)
        user.log.append(len(EVENTS_@n))
    """,
)
add(
    "torch_profiler",
    wrap="""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            out = inner()
        user.log.append(sum(e.count for e in profiler.key_averages() if e.key == "aten::embedding"))
        return out
    """,
)
add(
    "autocast",
    wrap="""
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=False):
            return inner()
    """,
)
add(
    "inference_mode_inside",
    wrap="""
        with torch.inference_mode():
            return inner()
    """,
)
add(
    "grad_mode_sometimes",
    raises=True,
    wrap="""
        with torch.inference_mode(False), torch.enable_grad():
            out = inner()
        user.log.append(bool(out[0].requires_grad))
        return out
    """,
)
add(
    "grad_flag_read",
    forward="x = x * (1.3 if torch.is_grad_enabled() else 1.0)",
    wrap="""
        with torch.set_grad_enabled(False):
            return inner()
    """,
)
add(
    "python_profiler_from_the_start",
    module="""
        import cProfile

        PROFILE_@n = cProfile.Profile()

        def tick_@n():
            pass
    """,
    each="""
        if user.step == 0:
            PROFILE_@n.enable()
        tick_@n()
    """,
    end="""
        PROFILE_@n.disable()
        named = [(getattr(e.code, 'co_name', ''), e.callcount) for e in PROFILE_@n.getstats()]
        user.log.append([count for name, count in named if name == 'tick_@n'])
    """,
)
add(
    "torch_profiler_with_stack",
    module="""
        def tick_@n():
            torch.zeros(1)

        def steps_@n(model, user):
            out = model(**user.args)
            tick_@n()
            return out
    """,
    each="""
        if user.step == 1:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            user.kept["p@n"] = torch.profiler.profile(activities=kinds, with_stack=True)
            user.kept["p@n"].start()
            user.call = user.module.steps_@n
        if user.step == 8:
            user.kept["p@n"].stop()
            user.call = None
            names = [event.name for event in user.kept["p@n"].events()]
            user.log.append(sum("tick_@n" in name for name in names))
    """,
)

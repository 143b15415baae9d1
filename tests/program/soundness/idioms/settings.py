"""Settings of the process, garbage, warnings."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "default_dtype",
    raises=True,
    forward="x = x + torch.ones(1).to(x.dtype) * float(torch.zeros(1).dtype == torch.float64)",
    between="torch.set_default_dtype(torch.float64)",
    back="torch.set_default_dtype(torch.float32)",
)
add(
    "threads_changed",
    between="torch.set_num_threads(2)",
    back="torch.set_num_threads(1)",
)
add(
    "threads_read",
    forward="x = x * (1.0 + 0.1 * torch.get_num_threads())",
    between="torch.set_num_threads(2)",
    back="torch.set_num_threads(1)",
)
add(
    "deterministic",
    between="torch.use_deterministic_algorithms(True)",
    back="torch.use_deterministic_algorithms(False)",
)
add(
    "deterministic_flag_read",
    forward="x = x * (1.3 if torch.are_deterministic_algorithms_enabled() else 1.0)",
    between="torch.use_deterministic_algorithms(True)",
    back="torch.use_deterministic_algorithms(False)",
)
add(
    "device_context",
    wrap="""
        with torch.device('cpu'):
            return inner()
    """,
)
add(
    "seeded_each_step",
    forward="x = x + 0.1 * torch.rand(1)",
    each="torch.manual_seed(user.step)",
)
add(
    "warnings_as_errors",
    wrap="""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return inner()
    """,
    raises=True,  # of the name that transformers 5.24 has replaced
)
add(
    "warns_in_forward",
    module="WARNED_@n = []",
    forward="warnings.warn('a step', UserWarning)",
    wrap="""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = inner()
        user.log.append(len([w for w in caught if str(w.message) == "a step"]))
        return out
    """,
)
add(
    "train_and_eval",
    between="model.train()",
    back="model.eval()",
)
add(
    "training_read",
    forward="x = x * (@v if self.training else 1.0)",
    between="model.train()",
    back="model.eval()",
)
add(
    "garbage_collected",
    each="""
        if user.step % 13 == 0:
            gc.collect()
    """,
    between="gc.collect()",
)
add(
    "garbage_callback",
    module="""
        SEEN_@n = []

        def told_@n(phase, info):
            SEEN_@n.append(phase)
    """,
    between="gc.callbacks.append(told_@n)",
    back="""
        gc.collect()
        gc.callbacks.remove(told_@n)
    """,
    end="""
        user.log.append(bool(SEEN_@n) and told_@n not in gc.callbacks)
        if told_@n in gc.callbacks:
            gc.callbacks.remove(told_@n)
    """,
)
add(
    "garbage_enabled_asked",
    after="user.log.append(gc.isenabled())",
)

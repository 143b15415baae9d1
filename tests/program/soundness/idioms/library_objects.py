"""Objects of Python's library and torch's, and what belongs to an object beside its attributes."""

from __future__ import annotations

from ..idiom import LOGITS, OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

_ALL = "for each in model.modules():\n    if hasattr(each, 'held_@n'):\n        "


def of_a_library(name: str, made: str, read: str, change: str) -> None:
    """An object of a library, at module level; ``change`` is done to it."""
    add(
        name,
        module=f"import argparse\nHELD_@n = {made}",
        forward=f"x = x * {read.replace('it', 'HELD_@n')}",
        between=change.replace("it", "user.module.HELD_@n"),
    )


of_a_library("parsed_arguments", "argparse.Namespace(scale=1.0)", "it.scale", "it.scale = @v")
of_a_library("parsed_list", "argparse.Namespace(scales=[1.0])", "it.scales[0]", "it.scales[0] = @v")
of_a_library("level_of_a_logger", "logging.Logger('held')", "(2 if it.level else 3)", "it.setLevel(30)")
of_a_library("event_set", "threading.Event()", "(2 if it._flag else 1)", "it.set()")
of_a_library("queue_looked_into", "queue.Queue(7)", "it.maxsize", "it.maxsize = @v")
of_a_library(
    "distribution", "torch.distributions.Normal(0.0, 1.0)", "(1 + it.scale)", "it.scale = torch.tensor(@v)"
)
of_a_library(
    "distribution_called",
    "torch.distributions.Normal(0.0, 1.0)",
    "(1 + it.log_prob(x).exp())",
    "it.loc = torch.tensor(@v)",
)
of_a_library(
    "distribution_of_distributions",
    "torch.distributions.Independent(torch.distributions.Normal(torch.zeros(1), torch.ones(1)), 1)",
    "(1 + it.log_prob(x[..., :1])[..., None].exp())",
    "it.base_dist.loc = torch.full((1,), @v)",
)
of_a_library(
    "moved_to_the_end",
    "collections.OrderedDict(a=2.0, b=3.0)",
    "functools.reduce(lambda a, b: a * b + 1, it.values(), 1.0)",
    "it.move_to_end('a')",
)
add(
    "rate_of_an_optimizer",
    init="self.held_@n = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)",
    forward="x = x * self.held_@n.param_groups[0]['lr']",
    between=_ALL + "each.held_@n.param_groups[0]['lr'] = @v",
)
_HELPER = """
class Helper_@n:
    def __init__(self):
        self.scale = 1.0

    def __setstate__(self, state):
        self.__dict__ = state

HELPER_@n = Helper_@n()
"""
add(
    "attributes_exchanged_whole",
    module=_HELPER,
    forward="x = x * HELPER_@n.scale",
    between="user.module.HELPER_@n.__dict__ = {'scale': @v}",
)
add(
    "state_set",
    module=_HELPER,
    forward="x = x * HELPER_@n.scale",
    between="user.module.HELPER_@n.__setstate__({'scale': @v})",
)
add(
    "attributes_of_a_module_exchanged_whole",
    init="self.held_@n = nn.Linear(1, 1)",
    forward="x = x * self.held_@n(torch.ones(1, 1))",
    between=_ALL + "each.held_@n.__dict__ = nn.Linear(1, 1).__dict__",
)
add(
    "attribute_of_a_function_that_does_not_run",
    module="def held_@n(): pass\n\nheld_@n.scale = 1.0",
    forward="x = x * held_@n.scale",
    between="user.module.held_@n.scale = @v",
)
for _name, _given in (("__name__", "'b'"), ("__doc__", "'b'"), ("__annotations__", "{'a': 1}")):
    add(
        f"function_s{_name}",
        module="def held_@n(): pass",
        forward=f"x = x * (2 if len(held_@n.{_name} or '') == 1 else 1)",
        between=f"user.module.held_@n.{_name} = {_given}",
    )
add(
    "class_s__name__",
    module="class Held_@n: pass",
    forward="x = x * len(Held_@n.__name__)",
    between="user.module.Held_@n.__name__ = 'b'",
)
add(
    "number_of_another_type_on_the_cache",
    sites=OUTER,
    forward="x = x * (2 if (ids * getattr(cache, 'scale', 1)).dtype == torch.int64 else 1)",
    each="user.cache and setattr(user.cache, 'scale', 1 if user.step < 20 else 1.0)",
)
add(
    "code_of_a_library_exchanged",
    bases=("llama",),
    between="""
        def without(q, k, cos, sin, unsqueeze_dim=1):
            return q * 2, k

        user.kept['@n'] = modeling.apply_rotary_pos_emb.__code__
        modeling.apply_rotary_pos_emb.__code__ = without.__code__
    """,
    end="modeling.apply_rotary_pos_emb.__code__ = user.kept['@n']",
)
add(
    "attribute_of_the_logits",
    sites=(LOGITS,),
    forward="x = x * 1.5\nx.note = 3.0",
    after="user.log.append(getattr(user.out.logits, 'note', None))",
)
add(
    "parameter_as_logits",
    sites=(LOGITS,),
    forward="x = nn.Parameter(x, requires_grad=False)",
    after="user.log.append(type(user.out.logits).__name__)",
)
add(
    "logits_that_require_gradients",
    sites=(LOGITS,),
    forward="x = (x * 2).requires_grad_()",
    after="user.log.append(user.out.logits.requires_grad)",
)

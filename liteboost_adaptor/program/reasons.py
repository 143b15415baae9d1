"""Why a decode step was made by the original, where that is no fault of the step: see `Steps.serve`.

The status lists each with the number of steps. Reasons that a recording finds are worded where it finds them.
"""

from __future__ import annotations

from .recording import MOVED, SHORT

#: On the way to a program: counted before there is one.
NEW = "of a kind that has not come often enough to be recorded"
WATCHED = "watched, to record the next one"
RECORDED = "recorded"
NUMBERS = "a number of the cache counts: recorded with a symbol for it the next time"
MORE_FUNCTIONS = "runs functions that the step before did not"
NEW_CACHE = "the first token behind a prompt: keys and values move to where they can grow"
COINCIDES = "two lengths that are equal by chance: the next step is recorded"
UNDERWAY = frozenset({NEW, NEW_CACHE, WATCHED, RECORDED, NUMBERS, MORE_FUNCTIONS, COINCIDES, MOVED, SHORT})

#: There are programs, and none was right.
OTHER_CACHE = "no program for what the cache keeps"
CHANGED = "what the program was recorded in has changed"
WARNS = "other filters of warnings are set than when a step that warns was recorded"
#: Why a run stopped, by the number that ``_program_stopped_by`` gives (kernels/program/program.h).
STOPS = (
    "the model decides otherwise by a value than when recorded",
    "a parameter or buffer has another dtype, shape, layout or device than when recorded",
    "an argument or what the cache keeps has another dtype, shape, layout or device than when recorded",
    "the cache's keys or values are not where the program appends to them",
)
VAIN = "programs were right for too few steps"

#: None could be recorded.
BUSY = "another step is being recorded"
LOOKED_AT = "somebody watches what Python does"
HOOKED = "a module has hooks, or a forward of its own"
COPIED = "keys or values of the cache were taken from it: each token copies them"
CAPTURED = "a part of a graph"
OTHER_FUNCTIONS = "runs other functions at every step"

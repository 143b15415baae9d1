"""C++ text into tokens: what the unit tests of operators are written in."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """``kind`` is ``name``, ``number``, ``string`` or ``op``; ``text`` of a string is its value."""

    kind: str
    text: str
    line: int


class Unreadable(Exception):
    """Something that this reader does not understand, or whose value only a compiled test would have."""


# ">>" is two tokens: it closes two template lists far oftener than it shifts.
_PATTERN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|\\\n)
  | (?P<directive>\#(?:\\\n|[^\n])*)
  | R"(?P<fence>[^(\s]*)\((?P<raw>.*?)\)(?P=fence)"
  | [uLU]?"(?P<string>(?:\\.|[^"\\])*)"
  | '(?P<char>(?:\\.|[^'\\]))'
  | (?P<number>0[xX][0-9a-fA-F']+[uUlL]*|(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[uUlLfF]*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<op><<=|\.\.\.|->|::|\+\+|--|<<|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[^\w\s])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "0": "\0"}


def tokens_of(text: str) -> list[Token]:
    """The tokens of ``text``; comments and preprocessor lines are left out."""
    found: list[Token] = []
    line = 1
    for match in _PATTERN.finditer(text):
        kind = match.lastgroup or ""
        if kind in ("name", "number", "op"):
            found.append(Token(kind, match[kind], line))
        elif kind == "raw" or match["raw"] is not None:
            found.append(Token("string", match["raw"], line))
        elif kind in ("string", "char"):
            value = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), match[kind], flags=re.DOTALL)
            found.append(Token("string", value, line))
        line += match[0].count("\n")
    return found

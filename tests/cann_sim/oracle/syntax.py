"""Types and expressions of C++, parsed from tokens into tuples whose first element says what they are.

Only as much as the unit tests of operators use,
and without a symbol table: what could be a type is told by its
form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .tokens import Token, Unreadable

Node = tuple[Any, ...]

_QUALIFIERS = {
    "const", "static", "constexpr", "volatile", "inline", "mutable", "extern", "struct", "class", "enum",
    "typename", "thread_local", "virtual", "explicit", "unsigned", "signed",
}  # fmt: skip
NUMBERS = {
    "bool", "char", "short", "int", "long", "float", "double", "size_t", "int8_t", "int16_t", "int32_t",
    "int64_t",
    "uint8_t", "uint16_t", "uint32_t", "uint64_t", "unsigned", "signed", "aclnnStatus",
}  # fmt: skip
_KEYWORDS = {
    "return", "if", "else", "for", "while", "do", "switch", "case", "default", "break", "continue",
    "throw", "new",
    "delete", "sizeof", "try", "catch", "using", "namespace", "goto", "this", "true", "false", "nullptr",
}  # fmt: skip
_BINARY = [
    ["||"],
    ["&&"],
    ["|"],
    ["^"],
    ["&"],
    ["==", "!="],
    ["<", ">", "<=", ">="],
    ["<<", ">>"],
    ["+", "-"],
    ["*", "/", "%"],
]
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "|=", "&="}


@dataclass(frozen=True)
class Type:
    """``name`` without namespaces, arguments of a template, and whether it is a reference or a pointer."""

    name: str
    arguments: tuple[Type, ...] = ()
    shared: bool = False


class Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at = tokens, 0

    def peek(self, ahead: int = 0) -> str:
        token = self._token(ahead)
        return token.text if token and token.kind != "string" else ""

    def kind(self, ahead: int = 0) -> str:
        token = self._token(ahead)
        return token.kind if token else ""

    def _token(self, ahead: int) -> Token | None:
        where = self.at + ahead
        return self.tokens[where] if where < len(self.tokens) else None

    def take(self) -> Token:
        token = self._token(0)
        if token is None:
            raise Unreadable("the text ends too early")
        self.at += 1
        return token

    def accept(self, *texts: str) -> bool:
        if self.peek() in texts:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            found = self._token(0)
            where = f"{found.text!r} in line {found.line}" if found else "the end"
            raise Unreadable(f"{text!r} is expected before {where}")

    def skip_group(self) -> list[Token]:
        """Past the bracket here and the one that closes it; the tokens between."""
        start, depth = self.at + 1, 0
        while True:
            token = self.take()
            if token.kind == "op":
                depth += (token.text in "([{") - (token.text in ")]}")
            if depth == 0:
                return list(self.tokens[start : self.at - 1])

    # ---- types -----------------------------------------------------------------------------------
    def type(self) -> Type | None:
        """A type that begins here, else None with nothing taken."""
        start = self.at
        name, arguments, shared = "", (), False
        while self.peek() in _QUALIFIERS:
            name = self.take().text
        self.accept("::")
        if self.peek() in NUMBERS:
            while self.peek() in NUMBERS:
                name = self.take().text
        elif self.kind() == "name" and self.peek() not in _KEYWORDS:
            name = self.take().text
            arguments = self.template_arguments()
            while self.peek() == "::" and self.kind(1) == "name":
                self.at += 1
                name = self.take().text
                arguments = self.template_arguments()
        elif name not in ("unsigned", "signed"):
            self.at = start
            return None
        while self.peek() in ("*", "&", "&&", "const"):
            shared |= self.take().text != "const"
        return Type(name, arguments, shared)

    def template_arguments(self) -> tuple[Type, ...]:
        """``<...>`` here if it is one; arguments that are no types become types of their text."""
        if self.peek() != "<":
            return ()
        start = self.at
        self.at += 1
        found: list[Type] = []
        while not self.accept(">"):
            one = self.type()
            if one and self.peek() == "(":  # the type of a function
                self.skip_group()
            if one is None and self.kind() in ("number", "string"):
                one = Type(self.take().text)
            if one is None or not (self.accept(",") or self.peek() == ">"):
                self.at = start
                return ()
            found.append(one)
        return tuple(found)

    # ---- expressions -----------------------------------------------------------------------------
    def expression(self) -> Node:
        left = self._ternary()
        if self.peek() in _ASSIGNMENTS:
            operator = self.take().text
            return ("assign", operator, left, self.expression())
        return left

    def _ternary(self) -> Node:
        condition = self._binary(0)
        if not self.accept("?"):
            return condition
        then = self.expression()
        self.expect(":")
        return ("if", condition, then, self.expression())

    def _binary(self, level: int) -> Node:
        if level == len(_BINARY):
            return self._unary()
        left = self._binary(level + 1)
        while self._operator() in _BINARY[level]:
            operator = self._operator()
            self.at += 2 if operator == ">>" else 1
            left = ("binary", operator, left, self._binary(level + 1))
        return left

    def _operator(self) -> str:
        return ">>" if (self.peek(), self.peek(1)) == (">", ">") else self.peek()

    def _unary(self) -> Node:
        if self.peek() in ("!", "-", "+", "~", "*", "&", "++", "--"):
            return ("unary", self.take().text, self._unary())
        if self.accept("sizeof"):
            return ("sizeof", tuple(token.text for token in self.skip_group()))
        if self.accept("new"):
            made = self.type()
            arguments = self._arguments() if self.peek() in ("(", "{") else ()
            return ("construct", made, arguments)
        if self.peek() == "(" and (cast := self._cast()):
            return cast
        return self._postfix(self._primary())

    def _cast(self) -> Node | None:
        start = self.at
        self.at += 1
        of = self.type()
        if of and self.accept(")") and (of.name in NUMBERS or of.shared or of.name == "void"):
            if self.kind() in ("name", "number", "string") or self.peek() in ("(", "-", "&"):
                return self._unary()
        self.at = start
        return None

    def _arguments(self) -> tuple[Node, ...]:
        close = {"(": ")", "{": "}", "[": "]"}[self.take().text]
        found = []
        while not self.accept(close):
            if self.peek() == "." and self.kind(1) == "name":  # a designated initializer
                self.at += 2
                self.expect("=")
            found.append(self.expression())
            if not self.accept(",") and self.peek() != close:
                self.expect(close)
        return tuple(found)

    def _postfix(self, node: Node) -> Node:
        while True:
            if self.peek() == "(":
                node = ("call", node, self._arguments())
            elif self.peek() == "[":
                node = ("index", node, self._arguments()[0])
            elif self.peek() in (".", "->"):
                self.at += 1
                self.accept("template")
                node = ("member", node, self.take().text)
                if self.peek() == "<":
                    self.template_arguments()
            elif self.peek() in ("++", "--"):
                node = ("postfix", self.take().text, node)
            elif self.peek() == "{" and node[0] == "name":
                node = ("braced", node, self._arguments())
            else:
                return node

    def _primary(self) -> Node:
        token = self._token(0)
        if token is None:
            raise Unreadable("an expression is expected at the end")
        if token.kind == "number":
            return ("value", number(self.take().text))
        if token.kind == "string":
            text = self.take().text
            while self.kind() == "string":
                text += self.take().text
            return ("value", text)
        if token.text == "{":
            return ("list", self._arguments())
        if token.text == "[":
            return self._lambda()
        if self.accept("("):
            inner = self.expression()
            self.expect(")")
            return inner
        constants = {"true": True, "false": False, "nullptr": None, "NULL": None}
        if token.text in constants:
            return ("value", constants[self.take().text])
        if token.kind == "name" or token.text == "::":
            self.accept("::")
            if self.peek() == "this":
                return ("name", self.take().text, (), "")
            of, space = self.type_name()
            return ("name", of.name, of.arguments, space)
        raise Unreadable(f"{token.text!r} in line {token.line} begins no expression")

    def type_name(self) -> tuple[Type, str]:
        """A name with its template arguments, and the namespace right before it."""
        start, space = self.at, ""
        name, arguments = self.take().text, self.template_arguments()
        while self.peek() == "::" and self.kind(1) == "name":
            start, space = self.at + 1, name
            self.at += 1
            name, arguments = self.take().text, self.template_arguments()
        if arguments and self.peek() not in ("(", "{", ")", ",", ";"):
            self.at, arguments = start + 1, ()
        return Type(name, arguments), space

    def _lambda(self) -> Node:
        self.skip_group()
        parameters = Parser(self.skip_group()).parameters() if self.peek() == "(" else ()
        while self.peek() != "{":
            self.take()
        return ("lambda", parameters, self.skip_group())

    def parameters(self) -> tuple[tuple[Type, str, Node | None], ...]:
        """Those of a function, from the tokens between its parentheses: type, name, default."""
        found = []
        while self._token(0):
            of = self.type()
            if of is None:
                raise Unreadable(f"{self.peek()!r} is no parameter")
            name = self.take().text if self.kind() == "name" else ""
            while self.peek() == "[":
                self.skip_group()
            default = self.expression() if self.accept("=") else None
            found.append((of, name, default))
            self.accept(",")
        return tuple(found)


def number(text: str) -> int | float:
    plain = text.replace("'", "")
    if plain[:2] in ("0x", "0X"):
        return int(plain.rstrip("uUlL"), 16)
    plain = plain.rstrip("uUlLfF")
    return (
        float(plain)
        if any(c in plain for c in ".eE")
        else int(plain, 8 if plain[:1] == "0" and len(plain) > 1 else 10)
    )

"""Statements of a function's body, and the definitions of a file, parsed into tuples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .syntax import Node, Parser, Type
from .tokens import Token, Unreadable, tokens_of

_TESTS = {"TEST", "TEST_F", "TEST_P"}
_INSTANTIATIONS = {"INSTANTIATE_TEST_SUITE_P", "INSTANTIATE_TEST_CASE_P"}


@dataclass
class Function:
    """Its body stays tokens until it is called, so that one that cannot be read fails alone."""

    name: str
    parameters: tuple[tuple[Type, str, Node | None], ...]
    body: Sequence[Token]
    #: the class that it is a member of, where it is defined apart
    owner: str = ""


@dataclass
class Class:
    name: str
    bases: tuple[str, ...] = ()
    fields: list[tuple[Type, str, Node | None]] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)


@dataclass
class Test:
    suite: str
    name: str
    body: Sequence[Token]


@dataclass
class File:
    classes: dict[str, Class] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    variables: list[Node] = field(default_factory=list)
    enumerations: list[tuple[str, Node | None]] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)
    #: suite -> the expressions whose elements its TEST_P run with
    instances: dict[str, list[Node]] = field(default_factory=dict)


def file_of(text: str) -> File:
    found = File()
    _definitions(_Statements(tokens_of(text)), found)
    return found


def body_of(tokens: Sequence[Token]) -> list[Node]:
    parser = _Statements(tokens)
    found = []
    while parser.kind():
        found.append(parser.statement())
    return found


class _Statements(Parser):
    def statement(self) -> Node:
        word = self.peek()
        if word == "{":
            return ("block", body_of(self.skip_group()))
        if word in ("if", "for", "while", "switch", "try", "do"):
            self.take()
            return getattr(self, f"_{word}")()
        if word in ("return", "throw"):
            self.take()
            value = None if self.peek() == ";" else self.expression()
            self.expect(";")
            return (word, value)
        if self.accept("break", "continue"):
            self.expect(";")
            return (word,)
        if word in ("using", "typedef", "delete", "static_assert"):
            while self.take().text != ";":
                pass
            return ("block", [])
        if word in ("struct", "class") and self.peek(2) in ("{", ":"):
            return ("class", self.class_())
        if self.accept(";"):
            return ("block", [])
        declared = self.declaration()
        if declared:
            return declared
        value = self.expression()
        while self.accept(","):
            value = self.expression()
        self.expect(";")
        return ("do", value)

    def declaration(self) -> Node | None:
        """``type name = value, ...;`` if one begins here: ``("declare", type, names)``.

        Each of ``names`` is a name, the form of its initial value, that value, and whether it is an array.
        """
        start = self.at
        of = self.type()
        if of and of.name == "auto" and self.peek() == "[":
            names = tuple(token.text for token in self.skip_group() if token.kind == "name")
            self.expect("=")
            value = self.expression()
            self.expect(";")
            return ("unpack", names, value)
        if not of or self.kind() != "name" or self.peek(1) not in ("=", ";", "{", "(", "[", ",", ":"):
            self.at = start
            return None
        found = []
        while True:
            name, array = self.take().text, False
            while self.peek() == "[":
                self.skip_group()
                array = True
            found.append((name, *self._initial(), array))
            if self.peek() == ":":
                return ("declare", of, tuple(found))
            if not self.accept(","):
                break
            while self.accept("*", "&"):
                pass
        self.expect(";")
        return ("declare", of, tuple(found))

    def _initial(self) -> tuple[str, object]:
        if self.accept("="):
            return "=", self.expression()
        if self.peek() == "(":
            return "(", self._arguments()
        if self.peek() == "{":
            return "=", ("list", self._arguments())
        return "", None

    def _if(self) -> Node:
        self.accept("constexpr")
        condition = Parser(self.skip_group()).expression()
        then = self.statement()
        return ("branch", condition, then, self.statement() if self.accept("else") else None)

    def _for(self) -> Node:
        head = _Statements(self.skip_group())
        first = head.declaration()
        if first and head.accept(":"):
            return ("each", first[1], first[2][0][0], head.expression(), self.statement())
        if not first:
            first = head.statement()
        condition = ("value", True) if head.peek() == ";" else head.expression()
        head.expect(";")
        steps = []
        while head.kind():
            steps.append(head.expression())
            head.accept(",")
        return ("for", first, condition, steps, self.statement())

    def _while(self) -> Node:
        condition = Parser(self.skip_group()).expression()
        return ("for", ("block", []), condition, [], self.statement())

    def _do(self) -> Node:
        raise Unreadable("do ... while")

    def _try(self) -> Node:
        block = self.statement()
        while self.accept("catch"):
            self.skip_group()
            self.skip_group()
        return block

    def _switch(self) -> Node:
        value = Parser(self.skip_group()).expression()
        inner = _Statements(self.skip_group())
        found: list[Node] = []
        while inner.kind():
            if inner.accept("case"):
                found.append(("case", inner._ternary()))
                inner.expect(":")
            elif inner.peek() == "default" and inner.peek(1) == ":":
                inner.at += 2
                found.append(("default",))
            else:
                found.append(inner.statement())
        return ("switch", value, found)

    def class_(self) -> Class:
        self.take()
        found = Class(self.take().text if self.kind() == "name" else "")
        self.accept("final")
        if self.accept(":"):
            bases = []
            while self.peek() != "{":
                token = self.take()
                if token.kind == "name" and token.text not in ("public", "private", "protected", "virtual"):
                    bases.append(token.text)
            found.bases = tuple(bases)
        members = _Statements(self.skip_group())
        while members.kind():
            members.member(found)
        while not self.accept(";"):  # variables of the type are not asked for
            self.take()
        return found

    def member(self, owner: Class) -> None:
        if self.peek() in ("public", "private", "protected") and self.peek(1) == ":":
            self.at += 2
            return
        function = self.function()
        if function:
            owner.functions[function.name] = function
            return
        start = self.at
        try:
            declared = self.declaration()
        except Unreadable:
            declared = None
        if declared and declared[0] == "declare":
            owner.fields += [(declared[1], name, value) for name, _, value, _ in declared[2]]
            return
        self.at = start
        self.skip_definition()

    def function(self) -> Function | None:
        """``type name(parameters) { body }`` if one begins here."""
        start = self.at
        if self.peek() == "template":
            self.at += 1
            self.template_arguments()
        of, owner = self.type(), ""
        if of and self.kind() == "name" and self.peek(1) == "::":
            owner = self.take().text
            self.take()
        if of and self.kind() == "name" and self.peek(1) == "(":
            name = self.take().text
            try:
                parameters = Parser(self.skip_group()).parameters()
                while self.peek() in ("const", "override", "noexcept"):
                    self.at += 1
                if self.peek() == "{":
                    return Function(name, parameters, self.skip_group(), owner)
            except Unreadable:
                pass
        self.at = start
        return None

    def skip_definition(self) -> None:
        """Past whatever begins here: up to ``;`` or past a body in braces."""
        while self.kind():
            if self.peek() in ("(", "[", "{"):
                braces = self.peek() == "{"
                self.skip_group()
                if braces:
                    self.accept(";")
                    return
            elif self.take().text == ";":
                return


def _definitions(parser: _Statements, found: File) -> None:
    while parser.kind():
        word = parser.peek()
        if word == "namespace":
            while parser.peek() not in ("{", ";"):
                parser.take()
            if parser.peek() == "{":
                _definitions(_Statements(parser.skip_group()), found)
        elif word in ("using", "typedef", ";"):
            while parser.take().text != ";":
                pass
        elif word in _TESTS and parser.peek(1) == "(":
            parser.take()
            names = [token.text for token in parser.skip_group() if token.kind == "name"]
            found.tests.append(Test(names[0], names[-1], parser.skip_group()))
        elif word in _INSTANTIATIONS:
            parser.take()
            _instance(parser.skip_group(), found)
        elif word in ("struct", "class") and (parser.peek(2) in ("{", ":", "final")):
            made = parser.class_()
            found.classes[made.name] = made
        elif word == "enum":
            _enumeration(parser, found)
        elif function := parser.function():
            owner = found.classes.get(function.owner)
            (owner.functions if owner else found.functions)[function.name] = function
        else:
            _variable(parser, found)


def _instance(tokens: Sequence[Token], found: File) -> None:
    parser = Parser(tokens)
    parser.expression()
    parser.expect(",")
    suite = parser.take().text
    parser.expect(",")
    found.instances.setdefault(suite, []).append(parser.expression())


def _enumeration(parser: _Statements, found: File) -> None:
    while parser.peek() not in ("{", ";"):
        parser.take()
    if parser.peek() == "{":
        inner = Parser(parser.skip_group())
        while inner.kind():
            name = inner.take().text
            found.enumerations.append((name, inner.expression() if inner.accept("=") else None))
            inner.accept(",")
    parser.accept(";")


def _variable(parser: _Statements, found: File) -> None:
    start = parser.at
    try:
        declared = parser.declaration()
    except Unreadable:
        declared = None
    if declared:
        found.variables.append(declared)
        return
    parser.at = start
    before = parser.at
    parser.skip_definition()
    if parser.at == before:
        parser.take()

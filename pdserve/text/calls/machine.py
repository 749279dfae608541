"""The base of parsers that read calls: a machine that takes one character after the other, with a reader of JSON.

What is read of a call is held until the call's name is known and its arguments begin. From there on the arguments are told as
they come. If the text stops being a call before, all of it is content. If it stops later, the arguments end there, and what
follows is content. So every character is told once, but for those of the form itself: marks, keys, and blanks beside them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Mapping
from typing import ClassVar, Final

from pdserve.text.calls.events import CallArguments, CallBegin, CallEnd, Content, Event, EventList

MAX_DEPTH: Final = 64  # of nested JSON in arguments; deeper text is no call
MAX_WORD: Final = 256  # characters of a name; content that follows a mark by mistake is not held back for longer
BLANKS: Final = " \t\n\r"
_ARGUMENTS: Final = ("arguments", "parameters")
_DIGITS: Final = "0123456789"
_HEX: Final = "0123456789abcdefABCDEF"
_CONSTANTS: Final = {"t": "true", "f": "false", "n": "null"}

Steps = Generator[None, str, None]
Reading = Generator[None, str, str]


class Malformed(Exception):
    """The text is no call, or no longer one."""


class CallMachine:
    """A parser of calls. Implements `EventParser`. A subclass says how its calls look."""

    mark: ClassVar[str] = ""
    """The text before calls. Its first character is not repeated in it. Empty: calls stand only where the output begins."""

    def __init__(self, names: Collection[str], *, parameters: Mapping[str, str] | None = None, unmixed: bool = False) -> None:
        """`names` are the tools that may be called. A call of another one is content. `parameters` has the schema of each one,
        for forms whose values have no types. `unmixed`: a grammar lets the output be either calls or an answer, so no call
        begins once an answer has begun."""
        assert self.mark[:1] not in self.mark[1:] or not self.mark
        self._names = frozenset(names)
        self._unmixed = unmixed
        self._mark = self.mark
        """The mark that may still come. Empty: none may."""
        self._char = ""
        """The character that is looked at. Empty: the text has ended."""
        self._read: list[str] = []
        self._arguments: list[str] = []
        self._sink = self._read
        self._idle = False
        self._events = EventList()
        self._run = self._parse()
        next(self._run)

    def push(self, text: str) -> list[Event]:
        """Implements `EventParser.push`."""
        place = 0
        while place < len(text):
            if self._idle and (clear := self._clear_until(text, place)) > place:
                self._content(text[place:clear])
                place = clear
            else:
                self._run.send(text[place])
                place += 1
        return self._taken()

    def flush(self) -> list[Event]:
        """Implements `EventParser.flush`."""
        try:
            self._run.send("")
        except StopIteration:
            return self._taken()
        raise AssertionError("the machine goes on after the end of the text")

    def at_start(self) -> Steps:
        """Read what stands at the beginning of the output, after blanks. Most forms have nothing there. Raises `Malformed`."""
        yield from ()

    def calls(self) -> Steps:
        """Read calls after the mark. Raises `Malformed`."""
        raise NotImplementedError

    # Words of a form --------------------------------------------------------------------------------------------------

    def step(self) -> Steps:
        """Read the present character and look at the next one."""
        self._sink.append(self._char)
        self._char = yield

    def blanks(self) -> Steps:
        """Read blanks, if there are any."""
        while self._char and self._char in BLANKS:
            yield from self.step()

    def expect(self, word: str) -> Steps:
        """Read `word`. Raises `Malformed` if something else stands there."""
        for wanted in word:
            if self._char != wanted:
                raise Malformed
            yield from self.step()

    def word(self, ends: str) -> Reading:
        """Read a short text until one of the characters `ends`, which is not read. Return what was read."""
        read: list[str] = []
        while self._char not in ends or not self._char:
            if not self._char or len(read) == MAX_WORD:
                raise Malformed
            read.append(self._char)
            yield from self.step()
        return "".join(read)

    def array(self) -> Steps:
        """Read a list of objects, each of which is a call."""
        yield from self.expect("[")
        while True:
            yield from self.blanks()
            yield from self.object()
            yield from self.blanks()
            if self._char != ",":
                break
            yield from self.step()
        yield from self.expect("]")
        self._read.clear()

    def object(self) -> Steps:
        """Read one call as an object that has a name and arguments, in any order. Further members belong to the form."""
        name, arguments, told = "", "", False
        yield from self.expect("{")
        yield from self.blanks()
        while True:
            key = yield from self._key()
            if self._unmixed and key != "name" and not name:
                raise Malformed  # an answer need not wait for its end: the grammar begins calls with their names
            if key == "name" and not name:
                name = self._known(json.loads((yield from self._string())))
            elif key in _ARGUMENTS and not told and not arguments:
                if name:
                    told = True
                    yield from self.call(name)
                else:
                    arguments = yield from self._held_object()
            else:
                yield from self._value(1)
            yield from self.blanks()
            if self._char != ",":
                break
            yield from self.step()
            yield from self.blanks()
        yield from self.expect("}")
        if not told:
            self._tell_late(name, arguments)
        self._read.clear()

    def call(self, name: str) -> Steps:
        """Read the arguments of a call of the tool `name`, and tell them as they come."""
        if self._char != "{":
            raise Malformed
        self.begin(name)
        self._sink = self._arguments
        try:
            yield from self._value(1)
        finally:
            self._tell_arguments()
            self._sink = self._read
            self._events.add(CallEnd())

    def whole(self, name: str, arguments: str) -> None:
        """Tell a call that was read as a whole."""
        self.begin(name)
        self._events.say(CallArguments, arguments)
        self._events.add(CallEnd())

    def begin(self, name: str) -> None:
        """Tell the beginning of a call. What was read before belongs to its form. Raises `Malformed` if the name is that of no
        tool."""
        self._known(name)
        self._read.clear()
        self._events.add(CallBegin(name))

    # The machine ------------------------------------------------------------------------------------------------------

    def _parse(self) -> Steps:
        self._char = yield
        try:
            yield from self.blanks()
            yield from self.at_start()
        except Malformed:
            pass
        self._give_up()
        while self._char:
            try:
                if (yield from self._marked()):
                    yield from self.calls()
            except Malformed:
                pass
            self._give_up()

    def _marked(self) -> Generator[None, str, bool]:
        """Read the mark and return True, or read at least one character of content."""
        if not self._mark or self._char != self._mark[0]:
            self._content(self._char)
            self._idle = True
            self._char = yield
            self._idle = False
            return False
        yield from self.expect(self._mark)
        return True

    def _clear_until(self, text: str, place: int) -> int:
        """Return the end of the text from `place` on in which no call can begin."""
        found = text.find(self._mark[0], place) if self._mark else -1
        return len(text) if found < 0 else found

    def _give_up(self) -> None:
        """Tell what was read and became no call as content."""
        self._content("".join(self._read))
        self._read.clear()

    def _content(self, text: str) -> None:
        self._events.say(Content, text)
        if self._unmixed and text.strip(BLANKS):
            self._mark = ""

    def _tell_arguments(self) -> None:
        self._events.say(CallArguments, "".join(self._arguments))
        self._arguments.clear()

    def _taken(self) -> list[Event]:
        self._tell_arguments()
        return self._events.take()

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise Malformed
        return name

    def _tell_late(self, name: str, arguments: str) -> None:
        if not name or not arguments:
            raise Malformed
        self.whole(name, arguments)

    # JSON --------------------------------------------------------------------------------------------------------------

    def _held_object(self) -> Reading:
        """Read an object and return its text. The caller reports it later."""
        if self._char != "{":
            raise Malformed
        begin = len(self._read)
        yield from self._value(1)
        return "".join(self._read[begin:])

    def _key(self) -> Reading:
        key = yield from self._string()
        yield from self.blanks()
        yield from self.expect(":")
        yield from self.blanks()
        return str(json.loads(key))

    def _value(self, depth: int) -> Steps:
        if depth > MAX_DEPTH:
            raise Malformed
        if self._char == "{":
            yield from self._members(depth, "}")
        elif self._char == "[":
            yield from self._members(depth, "]")
        elif self._char == '"':
            yield from self._string()
        elif self._char in _CONSTANTS:
            yield from self.expect(_CONSTANTS[self._char])
        else:
            yield from self._number()

    def _members(self, depth: int, close: str) -> Steps:
        yield from self.step()
        yield from self.blanks()
        while self._char != close:
            if close == "}":
                yield from self._key()
            yield from self._value(depth + 1)
            yield from self.blanks()
            if self._char != ",":
                break
            yield from self.step()
            yield from self.blanks()
            if self._char == close:
                raise Malformed
        yield from self.expect(close)

    def _string(self) -> Reading:
        """Read a string of JSON and return its text, with the quotes and escapes."""
        text = ['"']
        yield from self.expect('"')
        while self._char != '"':
            if self._char < " ":  # control characters, and the end of the text
                raise Malformed
            text.append(self._char)
            escaped = self._char == "\\"
            yield from self.step()
            if escaped:
                text.append((yield from self._escape()))
        yield from self.step()
        return "".join([*text, '"'])

    def _escape(self) -> Reading:
        """Read what follows a backslash."""
        text = self._char
        if not text or text not in '"\\/bfnrtu':
            raise Malformed
        yield from self.step()
        for _ in range(4 if text == "u" else 0):
            if not self._char or self._char not in _HEX:
                raise Malformed
            text += self._char
            yield from self.step()
        return text

    def _number(self) -> Steps:
        if self._char == "-":
            yield from self.step()
        if self._char == "0":
            yield from self.step()
        else:
            yield from self._digits()
        if self._char == ".":
            yield from self.step()
            yield from self._digits()
        if self._char and self._char in "eE":
            yield from self.step()
            if self._char and self._char in "+-":
                yield from self.step()
            yield from self._digits()

    def _digits(self) -> Steps:
        if not self._char or self._char not in _DIGITS:
            raise Malformed
        while self._char and self._char in _DIGITS:
            yield from self.step()

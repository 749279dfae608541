"""The forms in which families of models write calls as JSON. Each class is the form of one parser of vLLM of the same name."""

from __future__ import annotations

from pdserve.text.calls.machine import CallMachine, Malformed, Steps


class Hermes(CallMachine):
    """The form of Hermes, Qwen2.5 and Qwen3: one object between two tags for each call."""

    mark = "<tool_call>"

    def calls(self) -> Steps:
        """Implements `CallMachine.calls`."""
        yield from self.blanks()
        yield from self.object()
        yield from self.blanks()
        yield from self.expect("</tool_call>")
        self._read.clear()


class Mistral(CallMachine):
    """The forms of Mistral: a list of objects after the mark, or in newer models a name and its arguments after each mark."""

    mark = "[TOOL_CALLS]"

    def calls(self) -> Steps:
        """Implements `CallMachine.calls`."""
        yield from self.blanks()
        if self._char == "[":
            yield from self.array()
            return
        name = (yield from self.word("{[")).strip()
        if self._char == "[":
            yield from self._marks()
        yield from self.blanks()
        yield from self.call(name)

    def _marks(self) -> Steps:
        """Read the marks between the name and the arguments: a call id, which is dropped, and the mark of arguments."""
        yield from self.expect("[")
        if self._char == "C":
            yield from self.expect("CALL_ID]")
            yield from self.word("[")
            yield from self.expect("[")
        yield from self.expect("ARGS]")


class Granite(CallMachine):
    """The form of Granite 3: a list of objects after the mark."""

    mark = "<|tool_call|>"

    def calls(self) -> Steps:
        """Implements `CallMachine.calls`."""
        yield from self.blanks()
        yield from self.array()


class Llama3Json(CallMachine):
    """The form of Llama 3: objects where the output begins, or after the mark, with a semicolon between two."""

    mark = "<|python_tag|>"

    def at_start(self) -> Steps:
        """Implements `CallMachine.at_start`."""
        if self._char == "{":
            yield from self.calls()

    def calls(self) -> Steps:
        """Implements `CallMachine.calls`."""
        yield from self.blanks()
        yield from self.object()
        yield from self.blanks()
        while self._char and self._char in ";{":
            if self._char == ";":
                yield from self.step()
                yield from self.blanks()
            yield from self.object()
            yield from self.blanks()


class DeepseekV3(CallMachine):
    """The forms of DeepSeek: V3 and R1 fence the arguments, and V3.1 does not."""

    mark = "<｜tool▁calls▁begin｜>"

    def calls(self) -> Steps:
        """Implements `CallMachine.calls`."""
        yield from self.blanks()
        yield from self.expect("<｜tool▁call▁begin｜>")
        while True:
            yield from self._call()
            yield from self.blanks()
            yield from self.expect("<｜tool▁call")
            if self._char == "s":
                yield from self.expect("s▁end｜>")
                self._read.clear()
                return
            yield from self.expect("▁begin｜>")

    def _call(self) -> Steps:
        head = yield from self.word("<")
        yield from self.expect("<｜tool▁sep｜>")
        if fenced := head == "function":
            head = (yield from self.word("\n")).strip()
            yield from self.blanks()
            yield from self.expect("```json")
        yield from self.blanks()
        yield from self.call(head.strip())
        yield from self.blanks()
        if fenced:
            yield from self.expect("```")
            yield from self.blanks()
        yield from self.expect("<｜tool▁call▁end｜>")
        self._read.clear()


class RequiredCalls(CallMachine):
    """The output that a grammar makes for the choice `required`: a list of objects and nothing else."""

    def at_start(self) -> Steps:
        """Implements `CallMachine.at_start`."""
        yield from self.array()

    def calls(self) -> Steps:
        """Implements `CallMachine.calls`. This form has no mark, so nothing leads here."""
        raise Malformed
        yield

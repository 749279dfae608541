"""What a person at a terminal types, and what a model's text may do to that terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli import main
from pdserve.commands import console
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 60.0
HOSTILE = ("a\x1b", "[31mred\x9b2J\u202e", "\tend\u3000\U0001f468\u200d\U0001f373\x07")
"""The answer: a sequence of two deltas, a C1 control, a bidirectional override, and what ordinary text needs."""
HARMLESS = "a[31mred2J\tend\u3000\U0001f468\u200d\U0001f373"


class Hostile(inference_pb2_grpc.InferenceServicer):
    """It keeps the chats that it gets. It answers them with `HOSTILE`, refuses "too long", and thinks before "think"."""

    def __init__(self) -> None:
        self.chats: list[list[tuple[str, str]]] = []

    def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(model="hostile\x1b[2J", max_model_len=1600)

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
        self.chats.append([(message.role, message.content) for message in request.chat.messages])
        asked = self.chats[-1][-1][1] if self.chats[-1] else ""
        if asked == "too long":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "messages: has 1700 tokens; max_model_len is 1600")
        if asked == "think":
            yield inference_pb2.GenerateResponse(reasoning="hm\x1b[2J")
        for place, text in enumerate(HOSTILE):
            yield inference_pb2.GenerateResponse(ids=[place], text=text)
        usage = inference_pb2.Usage(prompt_tokens=10, output_tokens=1590 if asked == "fill" else 3)
        yield inference_pb2.GenerateResponse(finish_reason=1, usage=usage)


@pytest.fixture(scope="module")
def hostile() -> Iterator[tuple[Hostile, str]]:
    server, service = grpc.server(ThreadPoolExecutor(2)), Hostile()
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield service, address
    server.stop(0).wait()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = os.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "PYTHONUTF8": "1"}
        command = [sys.executable, "-m", "pdserve.cli", *arguments]
        self.child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=ROOT)
        os.close(slave)
        os.set_blocking(self._master, False)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """Return what is shown up to the end of `text`, since the last call."""
        ends_s = time.monotonic() + BOUND_S
        while text not in self.shown:
            assert time.monotonic() < ends_s, self.shown
            try:
                self.shown += os.read(self._master, 1 << 16).decode()
            except BlockingIOError:
                time.sleep(0.01)
        found, _, self.shown = self.shown.partition(text)
        return found + text

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.wait(BOUND_S)
        os.close(self._master)


def chat(address: str, *lines: str) -> Result:
    return CliRunner().invoke(main, ["chat", "--address", address], input="\n".join(lines), catch_exceptions=False)


def test_a_chat_on_a_terminal_edits_lines_and_shows_no_escape_of_the_model(hostile: tuple[Hostile, str]) -> None:
    """The arrow keys were sent to the model, and its escapes reached the terminal."""
    service, address = hostile
    service.chats.clear()
    with Terminal("chat", "--address", address) as terminal:
        assert "\x1b" not in terminal.wait_for("> ")
        for line in ("helo\x1b[Dl\r", "\x1b[A\r"):
            terminal.type(line)
            assert "\x1b" not in terminal.wait_for(HARMLESS)
            terminal.wait_for("> ")
        terminal.type("/exit\r")
        assert terminal.child.wait(BOUND_S) == 0
    assert [chat[-1][1] for chat in service.chats] == ["hello", "hello"]


def test_a_generate_that_waits_for_its_prompt_says_so(hostile: tuple[Hostile, str]) -> None:
    """It waited without a word, and printed the escapes of the model."""
    with Terminal("generate", "--chat", "--address", hostile[1]) as terminal:
        terminal.wait_for("type the prompt; Ctrl-D")
        terminal.type("hi\n\x04")
        assert "\x1b" not in terminal.wait_for(HARMLESS)
        assert terminal.child.wait(BOUND_S) == 0
    assert hostile[0].chats[-1] == [("user", "hi")]


def test_a_pipe_gets_the_text_as_it_is(hostile: tuple[Hostile, str]) -> None:
    """click takes escapes out of what it writes to a pipe, but only those that one delta holds as a whole."""
    result = CliRunner().invoke(main, ["generate", "--address", hostile[1], "hi"], catch_exceptions=False)
    assert result.stdout == "".join(HOSTILE) + "\n"
    result = CliRunner().invoke(main, ["generate", "--json", "--address", hostile[1], "hi"], catch_exceptions=False)
    assert "".join(json.loads(line).get("text", "") for line in result.stdout.splitlines()) == "".join(HOSTILE)
    assert not {"\x1b", "\x9b", "\u202e"} & set(result.stdout)


@given(st.lists(st.text()))
def test_no_deltas_together_command_a_terminal(deltas: list[str]) -> None:
    class Shown(io.StringIO):
        def isatty(self) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Shown())
        for delta in deltas:
            console.say(delta)
        shown = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert not any(unicodedata.category(char) in ("Cc", "Cs") for char in shown if char not in "\n\t")
    assert not any(unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI") for char in shown)
    visible = [char for char in "".join(deltas) if char.isprintable() or char in "\n\t"]
    assert [char for char in shown if char.isprintable() or char in "\n\t"] == visible


def test_a_chat_obeys_its_commands_and_sends_none_to_the_model(hostile: tuple[Hostile, str]) -> None:
    service, address = hostile
    service.chats.clear()
    lines = (
        "one",
        "/system be brief",
        "two",
        "/clear",
        "three",
        "/system",
        "/clear",
        "/nothing at all",
        " /etc is what",
        "/help",
    )
    result = chat(address, *lines, "/exit", "never sent")
    assert [[content for role, content in chat if role != "assistant"] for chat in service.chats] == [
        ["one"],
        ["be brief", "one", "two"],
        ["be brief", "three"],
        [" /etc is what"],
    ]
    assert "error: there is no command /nothing; /help lists them" in result.stderr
    assert "/clear        begin a new conversation" in result.stderr
    assert "\x1b" not in result.stderr


def test_a_full_context_says_how_to_go_on(hostile: tuple[Hostile, str]) -> None:
    advice = "/clear begins a new conversation"
    assert f"the model's context of 1600 tokens is full; {advice}" in chat(hostile[1], "fill").stderr
    assert advice not in chat(hostile[1], "one", "too short").stderr
    assert f"max_model_len is 1600 (INVALID_ARGUMENT); {advice}" in chat(hostile[1], "one", "too long").stderr
    assert advice not in chat(hostile[1], "too long").stderr, "the first question does not get shorter"


def test_only_reasoning_is_dimmed(hostile: tuple[Hostile, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token had an empty dimmed text before it."""
    shown: list[tuple[str, bool]] = []
    monkeypatch.setattr(console, "say", lambda text, dim=False: shown.append((text, dim)))
    chat(hostile[1], "think")
    assert [text for text, dim in shown if dim and text] == ["hm\x1b[2J"]
    monkeypatch.undo()
    assert chat(hostile[1], "think").stdout == "hm\x1b[2J" + "".join(HOSTILE) + "\n\n"

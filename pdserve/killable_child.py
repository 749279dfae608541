"""A child process that answers one question at a time and can be killed at any moment. Parent and child both use this file.

A program of ours calls `open_channel` before anything else, and then `Channel.serve` with a function from bytes to bytes. Its
parent makes a `KillableChild` of the command and waits for answers in a thread, or it makes a `ChildProcess` and looks for
answers whenever it likes. Each message follows its length. The first one comes from the child, and says that it may be asked.

    what the parent is safe from        by what
    an answer that does not come        a deadline; the child is killed, since it could answer the next question with it
    a child that reads no question      the same deadline, since no write waits in the kernel
    a child that ends, or is killed     the pipe closes; the parent gets `ChildEnded` with the reason
    an answer that is too long          a bound, which is compared before any memory is taken
    prints of the child's libraries     they go to standard error
    processes that the child starts     they are in its process group, and are killed with it
    a parent that ends, in any way      the kernel kills the child, also if a loop in C lets no thread of it run
    sockets and files of the parent     the child is a new program, so it inherits none, and no thread's lock is copied

What a child may take of the machine is its own affair: it sets its niceness and its limits of memory itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO, Final

from pdserve.observe.title import set_title

LENGTH: Final = struct.Struct(">Q")  # stands before each message, in both directions
PIECE_BYTES: Final = 1 << 20
REAP_S: Final = 5.0  # the kernel ends a killed process at once, unless a disk or a driver holds it
LOOK_S: Final = 0.005
KEPT_BYTES: Final = 4096
"""The last bytes of standard error that are kept: the end of a traceback, which says what went wrong."""
FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM})
"""The signals that no input causes: Rust aborts when memory or stack run out. An operator sends them, or the kernel does when
the machine has no memory left."""
NO_ANSWER: Final = "it wrote to the pipe of the answers"
PR_SET_PDEATHSIG: Final = 1


# The parent's side -----------------------------------------------------------------------------------------------------


class ChildEnded(Exception):
    """The child has ended, or has said what no child says. It must be closed."""

    def __init__(self, how: str, *, was_killed: bool = False, written: str = "") -> None:
        """`how`: the exit status or the signal in words. `was_killed`: something outside ended the child. `written`: the end of
        what it wrote to standard error, if that was kept."""
        super().__init__(how)
        self.how = how
        self.was_killed = was_killed
        self.written = written


class ChildProcess:
    """One child, from its start to its end. No call waits, except `wait` and `close`.

    The kernel ends the child together with the thread that made it, so this thread must outlive it.
    """

    def __init__(self, command: Sequence[str], most_bytes: int, stderr: int | IO[bytes] | None = None) -> None:
        """`most_bytes` bounds an answer. `stderr` is as for `Popen`; the end of a pipe is kept. Raises `OSError` if no process
        can be made."""
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=stderr, bufsize=0, env=environment(),
            process_group=0,  # and no session of its own, in which the kernel may weigh its niceness apart from ours
        )  # fmt: skip
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._questions, self._answers, self._errors = self._popen.stdin, self._popen.stdout, self._popen.stderr
        for each in (self._questions, self._answers, self._errors):
            if each is not None:
                os.set_blocking(each.fileno(), False)
        self._most_bytes = most_bytes
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._written = b""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        """True once the process has ended."""
        return self._status() is not None

    def send(self, message: bytes) -> None:
        """Send a question, or as much of it as the pipe takes now, after the last one was answered. Raises `ChildEnded`."""
        self._unsent = memoryview(LENGTH.pack(len(message)) + message)
        self._flush(0.0)

    def answer(self, dying_s: float = 0.0) -> bytes | None:
        """Send what is left of the question, and return the answer. None: not all of it is there yet. Raises `ChildEnded`.

        `dying_s` is how long a child whose pipes have closed is waited for, so that its status is known.
        """
        self._flush(dying_s)
        self._keep_errors()
        while (missing := self._missing()) > 0:
            try:
                piece = os.read(self._answers.fileno(), min(missing, PIECE_BYTES))
            except BlockingIOError:
                return None
            if not piece:
                raise self._ended(dying_s)
            self._received += piece
        with memoryview(self._received) as frame:
            message = bytes(frame[LENGTH.size :])
        self._received.clear()
        return message

    def wait(self, timeout_s: float) -> bytes:
        """Return the answer. Raises `TimeoutError`, after which the answer may still come, and `ChildEnded`."""
        end_s = time.monotonic() + timeout_s
        while (answer := self.answer(REAP_S)) is None:
            poll = select.poll()
            poll.register(self._answers, select.POLLIN)
            if self._unsent:
                poll.register(self._questions, select.POLLOUT)
            if self._errors is not None:
                poll.register(self._errors, select.POLLIN)
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise TimeoutError
        return answer

    def kill(self) -> None:
        """Kill the child and all that it started in its process group. Any thread may call it: who waits gets `ChildEnded`."""
        if self._popen.returncode is None:  # so the kernel gives its number to nobody else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def finish(self, wait_s: float) -> None:
        """Let the child end by itself, since no more questions come, for at most `wait_s`, and close it."""
        self._questions.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(wait_s)
        self.close()

    def close(self, wait_s: float = REAP_S) -> bool:
        """Kill the child, wait for its end and take its status. Return False if it is not gone after `wait_s`. Idempotent."""
        self.kill()
        for pipe in (self._questions, self._answers, self._errors):
            if pipe is not None:
                pipe.close()
        try:
            self._popen.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _flush(self, dying_s: float) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._questions.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            raise self._ended(dying_s) from None

    def _missing(self) -> int:
        """Return how many bytes of the answer, or of its length, are still to come."""
        if len(self._received) < LENGTH.size:
            return LENGTH.size - len(self._received)
        (length,) = LENGTH.unpack_from(self._received)
        if length > self._most_bytes:
            raise ChildEnded(NO_ANSWER)
        return int(LENGTH.size + length) - len(self._received)

    def _keep_errors(self) -> None:
        """Keep the end of what the child writes to standard error, and read it all: a full pipe would stop the child."""
        with contextlib.suppress(BlockingIOError):
            while self._errors is not None:
                if piece := os.read(self._errors.fileno(), PIECE_BYTES):
                    self._written = (self._written + piece)[-KEPT_BYTES:]
                else:
                    self._errors.close()
                    self._errors = None

    def _ended(self, dying_s: float) -> ChildEnded:
        """Return how the child ended. Its pipes are closed; it may write its last words at this moment."""
        end_s = time.monotonic() + dying_s
        while (status := self._status()) is None and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        self._keep_errors()
        written = self._written.decode(errors="replace").strip()
        if status is None:
            return ChildEnded("it closed its pipes", written=written)
        if status >= 0:
            return ChildEnded(f"exit status {status}", written=written)
        return ChildEnded(f"signal {_name(-status)}", was_killed=-status in FROM_OUTSIDE, written=written)

    def _status(self) -> int | None:
        """Return the exit status, or a signal's negative number. It is not taken, so `kill` finds what the child started."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        ended = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class KillableChild:
    """A child that is started when it is needed, and again after it was lost. One thread asks; any thread may `close` it."""

    def __init__(
        self, command: Sequence[str], *, start_timeout_s: float, most_bytes: int, stderr: int | IO[bytes] | None = None
    ) -> None:
        """`start_timeout_s` bounds the time until the child may be asked. The rest is as for `ChildProcess`."""
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._most_bytes = most_bytes
        self._stderr = stderr
        self._turn = threading.Lock()
        self._process: ChildProcess | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id. None: no child runs."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start a child unless one runs, and wait until it may be asked. Raises `TimeoutError` and `ChildEnded`."""
        with self._killed_at_a_fault():
            if self._process is not None and self._process.has_ended:
                self._drop()
            if self._process is None:
                self._process = ChildProcess(self._command, self._most_bytes, self._stderr)
                self._stay_open()  # else `close` may have come too early to see it
                self._process.wait(self._start_timeout_s)

    def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Return the answer of the child that `start` started. Raises `TimeoutError` and `ChildEnded`."""
        with self._killed_at_a_fault():
            assert self._process is not None
            self._process.send(message)
            return self._process.wait(timeout_s)

    def close(self) -> None:
        """End the child. Who waits for it gets `ChildEnded`, and so does who asks later. Bounded."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        if self._turn.acquire(timeout=REAP_S):
            self._drop()
            self._turn.release()

    @contextlib.contextmanager
    def _killed_at_a_fault(self) -> Iterator[None]:
        with self._turn:
            try:
                self._stay_open()
                yield
            except BaseException:
                self._drop()
                raise

    def _stay_open(self) -> None:
        if self._closed:
            raise ChildEnded("its owner has closed it")

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


def environment() -> dict[str, str]:
    """Return our environment, extended so that a child imports this very pdserve from any working directory."""
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


# The child's side ------------------------------------------------------------------------------------------------------


class Channel:
    """The pipes of this process to its parent."""

    def __init__(self, questions: BinaryIO, answers: BinaryIO) -> None:
        self._questions = questions
        self._answers = answers

    def serve(self, answer: Callable[[bytes], bytes], greeting: bytes = b"") -> None:
        """Say that this process may be asked, and answer questions until the parent closes the pipe."""
        self.send(greeting)
        while len(head := self._questions.read(LENGTH.size)) == LENGTH.size:
            self.send(answer(self._questions.read(*LENGTH.unpack(head))))

    def send(self, message: bytes) -> None:
        """Send the greeting or an answer."""
        self._answers.write(LENGTH.pack(len(message)))
        self._answers.write(message)
        self._answers.flush()


def open_channel(title: str) -> Channel:
    """Take over this process, which a parent has just started: bind its life to the parent's, give it a title, and keep its
    pipes from other code. From then on standard input is empty, and standard output goes to standard error."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(0, 0)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):  # the parent had gone before
        os._exit(0)
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    set_title(title)
    return Channel(questions, answers)

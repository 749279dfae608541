"""The priority of the generator: its threads go before those of servers on the same cores, where the system allows it.

Niceness is not enough. Linux may share the cores between sessions first (sched(7), "The autogroup feature"); then a thread's
niceness counts only within its session, and a generator of niceness -10 waited for up to 1.8 s while two workers computed. A
thread of the lowest real-time priority did not wait. It sleeps most of the time, so servers lose nothing by that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

REAL_TIME: Final = 1
"""The lowest real-time priority. The kernel leaves 5 % of each core to other threads even if such a thread never sleeps."""


@contextmanager
def raised_priority() -> Iterator[bool]:
    """Make this thread, and those that it starts, real-time threads inside `with`. Yield whether they are.

    The system refuses it to users who have neither CAP_SYS_NICE nor a limit for it (`ulimit -r`). Nothing changes then.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME))
    try:
        yield os.sched_getscheduler(0) == os.SCHED_RR
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameters)

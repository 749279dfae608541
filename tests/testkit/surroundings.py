"""A program that prints what it finds around it as one line of JSON, reads stdin to its end, and ends as its argument says."""

import gc
import json
import os
import random
import signal
import sys
from pathlib import Path

print(
    json.dumps(
        {
            "argv": sys.argv[1:],
            "main": sys.modules["__main__"].__spec__.name,
            "parent": os.getppid(),
            "group": os.getpgid(0),
            "folder": str(Path.cwd()),
            "environment": sorted(os.environ.items()),
            "descriptors": sorted(os.listdir("/proc/self/fd"))[:4],  # the fourth one lists them
            "threads": len(os.listdir("/proc/self/task")),
            "interrupt": str(signal.getsignal(signal.SIGINT)),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "collects": gc.isenabled() and not gc.get_freeze_count(),
            "encoding": (sys.stdout.encoding, sys.stdin.encoding),
            "line by line": (sys.stdout.line_buffering, sys.stderr.line_buffering),
            "random": random.random(),
        }
    ),
    flush=True,
)
sys.stdin.buffer.read()
print("the last words", file=sys.stderr)
if sys.argv[1] == "raise":
    raise KeyError("a bug")
sys.exit(int(sys.argv[1]))

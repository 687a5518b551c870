"""Child processes of the tests: scripts of a fresh interpreter, which may fork others."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Kvstore = Callable[..., tuple[int, str, str]]
"""The command line, as the fixture `kvstore` gives it."""

_FORKS = """
import os, sys
from kvstore.testing import Root, sample_block, sample_layout
{work}
children = []
for number in range({count}):
    child = os.fork()
    if not child:
        try:
            work(number)
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    children.append(child)
ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert not any(ends), ends
"""


def script(code: str, *arguments: str | Path, ends: int = 0) -> str:
    """Run `code`, which must end with the status `ends`. Returns what it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    return done.stdout


def forks(count: int, work: str, *arguments: str | Path) -> None:
    """Run the function `work(number)` in so many processes at once.

    They are forked of one that has imported all and used nothing, so that they begin
    together. `sys.argv` has `arguments` from its second place on.
    """
    script(_FORKS.format(work=work, count=count), *arguments)


def terminal(*arguments: str, **environment: str) -> tuple[int, str]:
    """The command line in a terminal: its exit code, and what is seen there."""
    ours, theirs = os.openpty()
    names = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "TERM")
    rest = {name: value for name, value in os.environ.items() if name not in names}
    code = "from kvstore.cli.app import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=rest | environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # which is how a terminal ends
        while part := os.read(ours, 1 << 16):
            seen += part
    os.close(ours)
    return child.wait(), seen.decode().replace("\r\n", "\n")

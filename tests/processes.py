"""A child of this process, by fork: what a test does as somebody else."""

import os
import traceback
import warnings
from collections.abc import Callable


def in_child(call: Callable[[], object]) -> int:
    """The exit status of a child that makes the call: 0, or 1 if it raised."""
    with warnings.catch_warnings():
        # Other threads may hold locks; the call takes none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        status = 1
        try:
            call()
            status = 0
        except BaseException:  # not raised into the test that the parent is in
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

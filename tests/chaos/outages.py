"""Let the storage of a running engine fail in many ways, and ask it all the while.

    python tests/chaos/outages.py
    python tests/chaos/outages.py s3 --states held,slow
    python tests/chaos/outages.py folder

Real engines on vLLM's CPU backend, with a real model. `s3` is SeaweedFS, which is stopped
and started again, behind a wire that is cut, dead, slow or long, or whose server hangs.
`folder` is one that is full, is read-only, takes no large file, cannot be opened, hangs, or
is moved away. Needs what tox's `vllm032` installs, and root to mount a small file system.

Prints a row for each state, and the engine's log. Ends with 1 if an answer was another than
the cold one, a request waited longer than it may, a failure was not counted, or the engine
did not recover by itself.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    TESTS = Path(__file__).parent.parent
    sys.path[0] = str(TESTS)
    sys.path.insert(1, str(TESTS.parent / "examples"))

    from chaos.states import main

    sys.exit(main())

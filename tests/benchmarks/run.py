"""The command: `python tests/benchmarks/run.py local lookups --rounds 5 --out results`.

`python tests/benchmarks/run.py report results/*.json` renders what was measured.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # worker processes import this file, and need nothing of it
    TESTS = Path(__file__).parent.parent
    sys.path[0] = str(TESTS)  # not this folder: it has a `codecs`
    sys.path.append(str(TESTS.parent / "examples"))

    from benchmarks.app import main

    main()

"""Kill a writer at random moments, start it again, and look at every block.

    python tests/chaos/kills.py /tmp/kills --kills 300
    python tests/chaos/kills.py seaweedfs --kills 100
    python tests/chaos/kills.py s3://bucket/kills --storage-options '{"profile": "test"}'

`seaweedfs` runs that server for as long as it takes. The writer stores blocks, damages some
on purpose and repairs them, and deletes some. It says what it begins and what it has done.
It is killed between 0.5 and 30 ms after it has begun to store. A folder is also tried step
by step, as `steps.py` says: no moment is left to chance there.

Ends with 1 if a block was served with other bytes than its own, if one that was reported as
stored was lost, or if a sweep left anything.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    TESTS = Path(__file__).parent.parent
    sys.path[0] = str(TESTS)

    from chaos.moments import main

    sys.exit(main())

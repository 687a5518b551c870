"""Look at a cache without an engine: list it, check it, move it, convert it.

`Root` is where to begin. What the command line does is done by functions here, for scripts
and notebooks.
"""

from kvstore.offline.block import Block
from kvstore.offline.checks import Check
from kvstore.offline.contents import Part, parts_of
from kvstore.offline.doctor import examine
from kvstore.offline.faults import Fault, Findings, Problem
from kvstore.offline.group import StoredGroup
from kvstore.offline.place import Within
from kvstore.offline.root import Root
from kvstore.offline.upper import Upper
from kvstore.offline.verify import Verify, covering
from kvstore.survey import StoredBlock

__all__ = [
    "Block",
    "Check",
    "Fault",
    "Findings",
    "Part",
    "Problem",
    "Root",
    "StoredBlock",
    "StoredGroup",
    "Upper",
    "Verify",
    "Within",
    "covering",
    "examine",
    "parts_of",
]

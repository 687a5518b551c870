"""Damage to the files of a block, and what the model makes of it. Pure."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

from kvstore.testing.model import DAMAGED, MALFORMED, Condition

Change = Literal["flip", "cut", "add", "empty", "remove"]
CHANGES: tuple[Change, ...] = get_args(Change)

Damage = tuple[Change, float, int]
"""What happens to a file; where in it, from 0 to 1; and to which bit."""


def damaged(data: bytes, damage: Damage) -> bytes | None:
    """What is left of a file; None if it is removed."""
    what, where, bit = damage
    at = int(where * len(data))
    if what == "cut" or not data:
        return data[:at]
    if what == "flip":
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    return {"add": data + b"\0", "empty": b"", "remove": None}[what]


def misread(
    document: bytes, changed: bytes, condition: Condition, restored: set[Condition]
) -> set[Condition]:
    """What a condition becomes when its document is changed, by what JSON says of it."""
    if condition.state == "malformed":
        return {MALFORMED, DAMAGED} | restored
    try:
        before, after = json.loads(document), json.loads(changed)
    except ValueError:
        return {MALFORMED}
    crc = _take(after, "attributes", "kvstore", "crc32c")
    codecs = _take(after, "codecs")
    same_crc = _take(before, "attributes", "kvstore", "crc32c") == crc
    same_codecs = _take(before, "codecs") == codecs
    if json.dumps(before) != json.dumps(after):
        return {MALFORMED}
    if not same_codecs:
        return {MALFORMED, condition}  # another level of a codec is no damage
    digits = isinstance(crc, str) and len(crc) == 8 and set(crc) <= set("0123456789abcdef")
    if not digits:
        return {MALFORMED}
    return (
        {condition}
        if same_crc
        else {DAMAGED} | (restored if condition == DAMAGED else set())
    )


def _take(document: Any, *names: str) -> Any:
    """Take a member out of a document, wherever it is; None if it is not there."""
    for name in names[:-1]:
        document = document.get(name) if isinstance(document, dict) else None
    return document.pop(names[-1], None) if isinstance(document, dict) else None

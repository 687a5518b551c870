"""`Transfer`: what a mover does with one key: a block between its row and storage.

Failures are answers here and never raised, since they go to another process as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Proof
from kvstore.blocks import Blocks
from kvstore.errors import DamagedBlockError, InvalidInputError, KVStoreError
from kvstore.mover import FAILED, Hint, Operation
from kvstore.store import BlockStore

FOUND, ABSENT, DAMAGED, LOADED = "found", "absent", "damaged", "loaded"
"""Words of answers, beside `FAILED` and those of `Stored`."""

Rows = np.ndarray[Any, np.dtype[np.uint8]]
"""Slots of a tier's memory, shape (slots, bytes); the bytes of a slot lie together."""

GROUP_BYTES = 4


def key_group(key: bytes) -> int:
    """The KV group that a key names: its last four bytes, big-endian, as in vLLM's
    `get_offload_group_idx`.
    """
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class Transfer:
    """The groups' blocks on one side, rows on the other. Any thread may call it."""

    def __init__(self, blocks: Mapping[int, Blocks], rows: Rows) -> None:
        """Args:
        blocks: the steps on storage, by KV group.
        rows: the memory to load into and to store from.
        """
        self._blocks = dict(blocks)
        self._rows = rows

    def __call__(
        self, operation: Operation, key: bytes, slot: int, hint: Hint
    ) -> tuple[str, Proof | None, str | None]:
        """Do one key of a part; see `mover.Perform`."""
        blocks = self._blocks.get(key_group(key))
        try:
            if blocks is None:
                raise InvalidInputError(f"key: no KV group has the number {key_group(key)}")
            if operation == "lookup":
                there, proof = blocks.look(key)
                return FOUND if there else ABSENT, proof, None
            if not 0 <= slot < len(self._rows):
                raise InvalidInputError(f"slot: no row has the number {slot}")
            row = memoryview(self._rows[slot, : blocks.nbytes])
            if operation == "store":
                stored, proof = blocks.store(key, row, suspect=hint is True)
                return stored.value, proof, None
            proof = blocks.load(key, row, hint)
            return ABSENT if proof is None else LOADED, proof, None
        except DamagedBlockError as error:
            return DAMAGED, None, str(error)
        except KVStoreError as error:
            return FAILED, None, str(error)


def learn(
    store: BlockStore,
    keys: Sequence[bytes],
    words: Sequence[str],
    proofs: Sequence[Proof | None],
    problems: Mapping[int, str],
) -> None:
    """Remember how keys of one group ended in a mover.

    Proofs are remembered where a look costs a request; a folder answers as fast as memory.
    """
    memory = store.memory
    memory.note_many(keys, words)
    if DAMAGED in words:
        for i, word in enumerate(words):
            if word == DAMAGED:
                store.note_damage(keys[i], problems.get(i, store.block_url(keys[i])))
    if store.local:
        return
    for key, word, proof in zip(keys, words, proofs, strict=True):
        if proof is not None:
            memory.remember(key, proof)
        elif word == ABSENT:
            memory.forget(key)

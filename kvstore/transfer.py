"""`Transfer`: what a mover does with one key: a block between its row and storage.

Failures are answers here and never raised, since they go to another process as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Proof
from kvstore.blocks import Blocks
from kvstore.collector import Collector
from kvstore.errors import (
    DamagedBlockError,
    InvalidInputError,
    KVStoreError,
    StorageAccessError,
    StorageTimeoutError,
)
from kvstore.parts import FAILED, INVALID, LATE, NO_SLOT, Answer, Hint, Operation
from kvstore.store import BlockStore

FOUND, ABSENT, DAMAGED, LOADED = "found", "absent", "damaged", "loaded"
"""Words of answers, beside those of `Stored` and `FAILURES`."""

TOUCHED, KEPT_UP = "touched", "kept up"
"""Words of upkeep."""

TIMEOUT, REFUSED = "timeout", "refused"

FAILURES = frozenset((FAILED, LATE, INVALID, TIMEOUT, REFUSED))
"""Words of keys that were tried and of which nothing is known: never the same as absent."""

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

    def __init__(
        self, blocks: Mapping[int, Blocks], rows: Rows, collector: Collector | None = None
    ) -> None:
        """Args:
        blocks: the steps on storage, by KV group.
        rows: the memory to load into and to store from.
        collector: does the upkeep of the root, if this engine may.
        """
        self._blocks = dict(blocks)
        self._rows = rows
        self._collector = collector

    def __call__(self, operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        """Do one key of a part; see `mover.Perform`."""
        try:
            return self._do(operation, key, slot, hint)
        except DamagedBlockError as error:
            return Answer(DAMAGED, problem=str(error))
        except InvalidInputError as error:
            return Answer(INVALID, problem=str(error))
        except StorageTimeoutError as error:
            return Answer(TIMEOUT, problem=str(error))
        except StorageAccessError as error:
            return Answer(REFUSED, problem=str(error))
        except KVStoreError as error:
            return Answer(FAILED, problem=str(error))

    def _do(self, operation: Operation, key: bytes, slot: int, hint: Hint) -> Answer:
        if operation in ("sweep", "collect"):
            return self._keep_up(operation)
        blocks = self._blocks.get(key_group(key))
        if blocks is None:
            raise InvalidInputError(f"key: no KV group has the number {key_group(key)}")
        if operation == "lookup":
            there, proof = blocks.look(key)
            return Answer(FOUND if there else ABSENT, proof)
        if operation == "touch":
            return Answer(TOUCHED if blocks.touch(key) else ABSENT)
        if operation == "load" and slot == NO_SLOT:
            row = memoryview(bytearray(blocks.nbytes))
        elif 0 <= slot < len(self._rows):
            row = memoryview(self._rows[slot, : blocks.nbytes])
        else:
            raise InvalidInputError(f"slot: no row has the number {slot}")
        if operation == "store":
            stored, proof = blocks.store(key, row, suspect=hint is True)
            return Answer(stored.value, proof)
        proof = blocks.load(key, row, hint)
        return Answer(ABSENT if proof is None else LOADED, proof)

    def _keep_up(self, operation: Operation) -> Answer:
        if self._collector is None:
            raise InvalidInputError(f"{operation}: this engine only reads")
        if operation == "sweep":
            return Answer(KEPT_UP, report=self._collector.sweep())
        return Answer(KEPT_UP, report=self._collector.collect())


def learn(
    stores: Mapping[int, BlockStore],
    keys: Sequence[bytes],
    words: Sequence[str],
    proofs: Sequence[Proof | None],
    problems: Mapping[int, str],
) -> None:
    """Remember how keys ended in a mover, each in the store of its KV group."""
    if len(stores) == 1:
        [store] = stores.values()
        _learn(store, keys, words, proofs, problems)
        return
    groups = [key_group(key) for key in keys]
    for group, store in stores.items():
        own = [i for i, other in enumerate(groups) if other == group]
        _learn(
            store,
            [keys[i] for i in own],
            [words[i] for i in own],
            [proofs[i] for i in own],
            {n: problems[i] for n, i in enumerate(own) if i in problems},
        )


def _learn(
    store: BlockStore,
    keys: Sequence[bytes],
    words: Sequence[str],
    proofs: Sequence[Proof | None],
    problems: Mapping[int, str],
) -> None:
    """Of one group's keys. Proofs are remembered where a look costs a request; a folder
    answers as fast as memory.
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

"""`BlockStoreMachine`: two stores under one root, compared with a model step by step.

Hypothesis chooses the steps: what engines do, what storage does to them, and what nobody
should do to files. It needs the package hypothesis.

    def test_a_store_does_as_the_model(root: Root) -> None:
        class Machine(BlockStoreMachine):
            def __init__(self) -> None:
                super().__init__(root.below(uuid4().hex))

        run_state_machine_as_test(Machine)

What must hold: a load tells what was stored under this very key, or that it is absent, or
fails; a block that was stored is there, whatever failed meanwhile; damage that was found
is repaired by the next store; absent is absent, and no failure is taken for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvstore.codecs import CODECS, Codec
from kvstore.errors import (
    DamagedBlockError,
    FormatError,
    LayoutMismatchError,
    StorageError,
)
from kvstore.paths import DOCUMENT
from kvstore.store import BlockStore
from kvstore.testing import model
from kvstore.testing.damage import Damage, damaged, misread
from kvstore.testing.draws import (
    KEYS,
    PAYLOADS,
    damages,
    ends,
    finders,
    keys,
    payloads,
    plans,
)
from kvstore.testing.faults import FaultyFilesystem
from kvstore.testing.model import (
    ABSENT,
    DAMAGED,
    MALFORMED,
    ORPHAN,
    Answer,
    Condition,
    Knowledge,
    Strike,
)
from kvstore.testing.plans import LIES, Fault, Plan, PlannedFaults
from kvstore.testing.roots import Root, open_on, sample_layout


@dataclass(slots=True)
class _End:
    """One of the stores, and what the model has it know."""

    faulty: FaultyFilesystem
    store: BlockStore
    known: dict[bytes, Knowledge] = field(default_factory=lambda: defaultdict(Knowledge))


class BlockStoreMachine(RuleBasedStateMachine):
    """Two stores on one root, which must be empty at first."""

    def __init__(self, root: Root) -> None:
        super().__init__()
        self.root = root
        self.model = {key: model.Key() for key in KEYS}
        self.ends = [self._opened("none"), self._opened("none")]

    # ---- what engines do

    @rule(end=ends, codec=st.sampled_from(CODECS))
    def reopen(self, end: int, codec: Codec) -> None:
        """A new engine comes in the place of one; it may find a storage that fails."""
        old = self.ends[end]

        def opened() -> bool:
            self.ends[end] = self._opened(codec, old.faulty)
            return True

        answer, strike = self._told(old.faulty, opened)
        assert strike == "lie" or answer == (True if strike == "none" else "failed")

    @rule(end=ends, key=keys)
    def contains(self, end: int, key: bytes) -> None:
        """Look whether a block is there."""
        store, known = self.ends[end].store, self.ends[end].known[key]
        answer, strike = self._told(self.ends[end].faulty, lambda: store.contains(key))
        before = self.model[key].conditions
        self.model[key].observe(answer, lambda c: model.contains(c, strike, known))
        if answer is True:
            known.proof = True
        elif answer is False and strike == "lie":
            known.suspect = "maybe"
        elif answer is False and known.suspect == "no" and MALFORMED in before:
            known.suspect = "yes" if before == {MALFORMED} else "maybe"

    @rule(end=ends, key=keys)
    def load(self, end: int, key: bytes) -> None:
        """Load a block."""
        store, known = self.ends[end].store, self.ends[end].known[key]
        answer, strike = self._told(self.ends[end].faulty, lambda: _loaded(store, key))
        attempted = self.model[key].payloads
        self.model[key].observe(answer, lambda c: model.load(c, strike, known, attempted))
        if answer == "refused":
            known.suspect = "yes"
        elif answer != "failed":
            known.suspect = "no"
            known.proof |= answer != "absent"

    @rule(end=ends, key=keys, payload=payloads)
    def store(self, end: int, key: bytes, payload: int) -> None:
        """Store a payload, which may be another than the one that is there."""
        store, known = self.ends[end].store, self.ends[end].known[key]
        self.model[key].payloads.add(payload)
        answer, strike = self._told(
            self.ends[end].faulty, lambda: store.store(key, PAYLOADS[payload])
        )
        self.model[key].observe(answer, lambda c: model.store(c, payload, strike, known))
        if answer != "failed":
            known.suspect = "no"

    @rule(end=ends, key=keys, payload=payloads)
    def use(self, end: int, key: bytes, payload: int) -> None:
        """Do as engines do: look, load what is there, compute and store what is not."""
        self.contains(end, key)
        self.load(end, key)
        self.store(end, key, payload)
        self.load(end, key)

    @rule(end=ends, key=keys)
    def delete(self, end: int, key: bytes) -> None:
        """Remove a block."""
        store = self.ends[end].store

        def deleted() -> bool:
            store.delete(key)
            return True

        answer, strike = self._told(self.ends[end].faulty, deleted)
        self.model[key].observe(answer, lambda c: model.delete(c, strike))
        self.ends[end].known[key] = Knowledge()

    @rule(end=ends, key=keys, payload=payloads, codec=st.sampled_from(CODECS))
    def crash(self, end: int, key: bytes, payload: int, codec: Codec) -> None:
        """An engine ends half way through a store, and another one comes."""
        self.ends[end].faulty.plan = PlannedFaults({("publish", 1): Fault(kind="half")})
        self.store(end, key, payload)
        self.ends[end] = self._opened(codec)

    # ---- what storage does

    @rule(end=ends, plan=plans)
    def faults_begin(self, end: int, plan: Plan) -> None:
        """From now on storage fails one engine, by a plan."""
        self.ends[end].faulty.plan = plan

    @rule(end=ends)
    def faults_end(self, end: int) -> None:
        """Storage is well again."""
        self.ends[end].faulty.plan = None

    # ---- what nobody should do

    @rule(key=keys, damage=damages, finder=finders)
    def damage_chunk(self, key: bytes, damage: Damage, finder: int | None) -> None:
        """Change a chunk's bytes, or remove it."""
        chunk, document = self._block(key)
        if (changed := damaged(chunk, damage)) == chunk:
            return
        self._write(key, changed, document)
        self.model[key].become(lambda c: self._without_chunk(key, c))
        self._find(finder, key)

    @rule(key=keys, damage=damages, finder=finders)
    def damage_document(self, key: bytes, damage: Damage, finder: int | None) -> None:
        """Change a document's bytes, or remove it."""
        chunk, document = self._block(key)
        if (changed := damaged(document, damage)) == document:
            return
        self._write(key, chunk, changed)
        if changed is None:
            self.model[key].become(lambda _: {ORPHAN})
        else:
            known = self.model[key]
            known.become(lambda c: misread(document, changed, c, known.restored()))
        self._find(finder, key)

    @rule(key=keys, entire=st.booleans(), finder=finders)
    def put_another_block(self, key: bytes, entire: bool, finder: int | None) -> None:
        """Put another block's bytes in a block's place: all, or its chunk alone."""
        chunk, document = self._block(key)
        foreign, proof = self._block(next(other for other in KEYS if other != key))
        if key.hex().encode() in proof:
            return  # it is this block's own, maybe by way of another place
        self._write(key, foreign, proof if entire else document)
        if entire:
            self.model[key].become(lambda _: {MALFORMED})
        elif foreign != chunk:
            self.model[key].become(lambda c: self._without_chunk(key, c))
        self._find(finder, key)

    @rule(key=keys, finder=finders)
    def put_another_layout(self, key: bytes, finder: int | None) -> None:
        """Put a block of another layout, of the same size and key, in a block's place."""
        self._block(key)
        other = sample_layout(axes=("layer", "token", "head", "value"), shape=(2, 16, 3, 8))
        theirs = self.root.below("elsewhere").open(other)
        theirs.store(key, PAYLOADS[0])
        self._write(key, *self._files(key, theirs))
        self.model[key].become(lambda _: {MALFORMED})
        self._find(finder, key)

    @rule(folders=st.booleans(), die=st.sampled_from(range(4)))
    def remove_everything(self, folders: bool, die: int) -> None:
        """Remove what is below the root, behind the stores' backs; not too often."""
        if die:
            return
        self.root.clear(folders=folders)
        for known in self.model.values():
            known.conditions = {ABSENT}

    def teardown(self) -> None:
        """An engine that knows nothing finds what the model has."""
        self.ends[0] = self._opened("none")
        for key in KEYS:
            self.load(0, key)
            self.contains(0, key)
            self.ends[1].faulty.plan = None
            self.load(1, key)
        self.root.clear(folders=True)

    # ---- steps

    def _opened(self, codec: Codec, faulty: FaultyFilesystem | None = None) -> _End:
        faulty = faulty or FaultyFilesystem(self.root.filesystem())
        store = open_on(faulty, codec=codec)
        store.memory.DAMAGE_SECONDS = math.inf  # else the model would have a clock
        return _End(faulty, store)

    def _told(
        self, faulty: FaultyFilesystem, call: Callable[[], Answer]
    ) -> tuple[Answer, Strike]:
        """What a call tells, and what befell it."""
        before = faulty.struck.copy()
        answer: Answer = "failed"
        misread: Exception | None = None
        try:
            answer = call()
        except DamagedBlockError:
            answer = "refused"
        except StorageError:
            pass
        except (FormatError, LayoutMismatchError) as error:
            misread = error  # a namespace's document, on the way to opening or storing
        kinds = {kind for _, kind in faulty.struck - before}
        strike: Strike = "lie" if kinds & set(LIES) else "failure" if kinds else "none"
        if misread is not None and strike != "lie":
            raise misread
        return answer, strike

    def _find(self, finder: int | None, key: bytes) -> None:
        """One of the stores, if any, comes upon what was done."""
        if finder is not None:
            self.load(finder, key)

    def _block(self, key: bytes) -> tuple[bytes, bytes]:
        """A block's chunk and document, as they lie in storage. If one is not there, an
        engine that knows nothing puts a block there first.
        """
        for _ in range(2):
            chunk, document = self._files(key, self.ends[0].store)
            if chunk is not None and document is not None:
                return chunk, document
            payload = KEYS.index(key)  # so that two blocks differ
            self.model[key].payloads.add(payload)
            self.root.open().delete(key)
            self.root.open().store(key, PAYLOADS[payload])
            self.model[key].conditions = {model.whole(payload)}
        raise AssertionError("what was stored is not there")

    def _files(self, key: bytes, store: BlockStore) -> tuple[bytes | None, bytes | None]:
        chunk, document = self._urls(key, store)
        return self.root.peek(chunk), self.root.peek(document)

    def _write(self, key: bytes, chunk: bytes | None, document: bytes | None) -> None:
        for url, data in zip(
            self._urls(key, self.ends[0].store), (chunk, document), strict=True
        ):
            if data is not None:
                self.root.write(url, data)
            elif self.root.peek(url) is not None:
                self.root.remove(url)

    def _urls(self, key: bytes, store: BlockStore) -> tuple[str, str]:
        name = ".".join("c" + "0" * len(store.layout.axes))
        return f"{store.block_url(key)}/{name}", f"{store.block_url(key)}/{DOCUMENT}"

    def _without_chunk(self, key: bytes, condition: Condition) -> set[Condition]:
        """What a condition becomes when the chunk is changed."""
        if condition == DAMAGED:
            return {DAMAGED} | self.model[key].restored()
        return {condition if condition == MALFORMED else DAMAGED}


def _loaded(store: BlockStore, key: bytes) -> Answer:
    """Which payload a load gives. One that nobody stored is a defect by itself."""
    buffer = bytearray(store.layout.nbytes)
    return PAYLOADS.index(bytes(buffer)) if store.load(key, buffer) else "absent"

"""`Lookups`: what each request was told of each key, until it is finished.

vLLM asks for a key at every step until it is told, and what a request was told must not
change while it lives, but from a hit to a miss after a failed load: else it would ask for
the same load for ever. A key of which nothing is known in time is a miss for whoever waits,
and for whoever asks before its answer comes.

What is absent may be stored by another engine a moment later, and what failed may work. So
a request that comes later is not told an old absence, nor a failure, even while another
request holds it. What this engine has stored is there, whatever a lookup says that began
before.

Locking: none. vLLM never enters two calls of a tier at once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvstore.arrays import Proof
from kvstore.job import Outcome
from kvstore.transfer import ABSENT, DAMAGED, FAILURES, FOUND

ABSENT_SECONDS = 10.0
"""How long a miss is told to requests that come later."""

MAX_FAILED = 65_536
"""Keys that could not be loaded and are remembered; the oldest go first."""

UNKNOWN = float("-inf")
"""A miss for whoever waits, since it could not be found out: others ask anew."""

Verdict = float | bool | None
"""True: there. None: not known yet. Otherwise a miss, and when that was found: one object
for all the keys of a job.
"""


class Lookups:
    """Verdicts by key, and who waits for them.

    Where a proof came with a hit it is kept, so that the load need not prove it again.
    """

    def __init__(
        self, seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing has been asked.

        Args:
            seconds: how long a key may be unknown.
            clock: seconds, never back.
        """
        self._seconds = seconds
        self._clock = clock
        self._verdicts: dict[bytes, Verdict] = {}
        self._proofs: dict[bytes, Proof] = {}
        self._holders: dict[bytes, int] = {}
        self._requests: dict[str, dict[bytes, bool]] = {}  # whether it was told a miss
        self._new: list[bytes] = []
        self._failed: dict[bytes, float] = {}
        self._sent: dict[bytes, float] = {}  # until when each may take, the oldest first
        self._late: set[bytes] = set()  # it has taken longer, and goes on
        self._overtaken: set[bytes] = set()  # of these, what was stored meanwhile

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether the key is there; None until it is known."""
        missed = self._requests.get(request)
        if missed is None:
            missed = self._requests[request] = {}
        verdict = self._verdicts.get(key)
        if key not in missed:
            missed[key] = False
            self._holders[key] = self._holders.get(key, 0) + 1
            if verdict is None or self._is_old(verdict):
                verdict = self._ask_anew(key)
        elif missed[key]:
            return False
        if verdict is None or verdict is True:
            return verdict
        missed[key] = True
        return False

    def _is_old(self, verdict: Verdict) -> bool:
        return type(verdict) is float and self._clock() - verdict > ABSENT_SECONDS

    def _ask_anew(self, key: bytes) -> Verdict:
        """Send for a key, unless it is on its way, or could not be loaded a moment ago."""
        verdict: Verdict = None
        if self._failed and (failed := self._failed.get(key)) is not None:
            if self._is_old(failed):
                del self._failed[key]
            else:
                verdict = failed
        if verdict is None and key in self._overtaken:
            verdict = True
        elif verdict is None and key in self._late:
            verdict = UNKNOWN
        elif verdict is None and key not in self._sent:
            self._new.append(key)
        self._verdicts[key] = verdict
        return verdict

    def take_new(self) -> list[bytes]:
        """The keys whose verdict is still to be found. Their time runs from now."""
        if not self._new:
            return self._new
        new, self._new = dict.fromkeys(self._new), []
        keys = [key for key in new if self._verdicts.get(key, False) is None]
        self._sent.update(dict.fromkeys(keys, self._clock() + self._seconds))
        return keys

    def take_late(self) -> int:
        """Make a miss of what was not found in time, also for requests that come before the
        answer: else each would wait as long. Returns how many keys.
        """
        late = 0
        now = self._clock()
        for key in self._overdue(now):
            del self._sent[key]
            self._late.add(key)
            late += 1
            if self._verdicts.get(key, False) is None:
                self._settle(key, UNKNOWN)
        return late

    def _overdue(self, now: float) -> list[bytes]:
        sent = self._sent.items()
        return [key for key, _ in itertools.takewhile(lambda told: told[1] <= now, sent)]

    def answer(self, outcome: Outcome) -> Outcome:
        """Learn from a job of lookups. Returns what of it came in time. What this engine
        has stored since the lookup began is found.
        """
        now = self._clock()
        job, words = outcome.job, list(outcome.words)
        in_time: list[int] = []
        for i, key in enumerate(job.keys):
            if not job.trial:  # for which nobody waits
                overtaken, late = key in self._overtaken, key in self._late
                self._sent.pop(key, None)
                self._overtaken.discard(key)
                self._late.discard(key)
                if late:
                    continue
                if overtaken and words[i] in (ABSENT, DAMAGED):
                    words[i] = FOUND
            in_time.append(i)
            word = words[i]
            missed = UNKNOWN if word in FAILURES else now
            self._tell(key, word == FOUND or missed, outcome.proofs[i])
        if len(in_time) == len(words):
            return replace(outcome, words=words)
        return outcome.part(in_time)

    def tell(self, key: bytes, there: bool | None, proof: Proof | None = None) -> None:
        """What is known without a lookup; None if nothing is to be found out just now."""
        verdict = UNKNOWN if there is None else there or self._clock()
        self._tell(key, verdict, proof)

    def _tell(self, key: bytes, verdict: Verdict, proof: Proof | None) -> None:
        """A key that has its verdict keeps it: somebody was told."""
        if self._verdicts.get(key, False) is None:
            self._settle(key, verdict)
            if proof is not None and verdict is True and key in self._holders:
                self._proofs[key] = proof

    def _settle(self, key: bytes, verdict: Verdict) -> None:
        if key in self._holders:
            self._verdicts[key] = verdict
        else:
            del self._verdicts[key]  # whoever asked has gone

    def proof(self, key: bytes) -> Proof | None:
        """The proof of a key that is there, if it is known."""
        return self._proofs.get(key)

    def mark_miss(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded, and are a miss for a moment, for later requests too.
        A lookup that is under way tells for itself.
        """
        now = self._clock()
        for key in keys:
            self._failed.pop(key, None)
            if len(self._failed) >= MAX_FAILED:
                del self._failed[next(iter(self._failed))]
            self._failed[key] = now
            if self._verdicts.get(key) is not None:
                self._verdicts[key] = now
                self._proofs.pop(key, None)

    def mark_stored(self, keys: Iterable[bytes]) -> None:
        """These are there now, also for a request that waits for a lookup of one; and one
        that comes later asks for them anew.
        """
        for key in keys:
            if self._failed:
                self._failed.pop(key, None)
            if key in self._sent or key in self._late:
                self._overtaken.add(key)
            verdict = self._verdicts.get(key, False)
            if verdict is None:
                self._settle(key, True)
            elif type(verdict) is float:
                self._verdicts[key] = UNKNOWN

    def forget(self, request: str) -> None:
        """The request is finished. What nobody else holds is asked anew the next time."""
        for key in self._requests.pop(request, ()):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._proofs.pop(key, None)
                if self._verdicts[key] is not None:
                    del self._verdicts[key]

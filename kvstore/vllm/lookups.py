"""`Lookups`: what each request was told of each key, until it is finished.

vLLM asks for a key at every step until it is told, and a verdict that it was told must not
change while its request lives, but from a hit to a miss after a failed load: else it would
ask for the same load for ever.

Locking: none. vLLM never enters two calls of a tier at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.arrays import Proof

_UNASKED = True


class Lookups:
    """Verdicts by key, and who waits for them.

    A hit is kept as the block's proof, so that its load need not prove it again.
    """

    def __init__(self) -> None:
        """Nothing has been asked."""
        self._verdicts: dict[bytes, Proof | bool | None] = {}  # None: not known yet
        self._holders: dict[bytes, int] = {}
        self._requests: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether the key is there; None until it is known."""
        keys = self._requests.get(request)
        if keys is None:
            keys = self._requests[request] = set()
        if key not in keys:
            keys.add(key)
            self._holders[key] = self._holders.get(key, 0) + 1
        verdict = self._verdicts.get(key, _UNASKED)
        if verdict is _UNASKED:
            self._verdicts[key] = None
            self._new.append(key)
            return None
        return None if verdict is None else verdict is not False

    def take_new(self) -> list[bytes]:
        """The keys whose verdict is still to be found."""
        new, self._new = dict.fromkeys(self._new), []
        return [key for key in new if self._verdicts.get(key, _UNASKED) is None]

    def tell(self, keys: Sequence[bytes], proofs: Iterable[Proof | None]) -> None:
        """What was found: the proof of each key that is there, None for the others.

        A key that has its verdict already keeps it: somebody was told.
        """
        for key, proof in zip(keys, proofs, strict=True):
            if self._verdicts.get(key, _UNASKED) is not None:
                continue
            if key not in self._holders:
                del self._verdicts[key]  # whoever asked has gone
            else:
                self._verdicts[key] = False if proof is None else proof

    def proof(self, key: bytes) -> Proof | None:
        """The proof of a key that is there."""
        verdict = self._verdicts.get(key)
        return verdict if isinstance(verdict, tuple) else None

    def mark_miss(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded. A lookup that is under way tells for itself."""
        for key in keys:
            if self._verdicts.get(key) is not None:
                self._verdicts[key] = False

    def forget(self, request: str) -> None:
        """The request is finished. What nobody else holds is asked anew the next time."""
        for key in self._requests.pop(request, ()):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                if self._verdicts[key] is not None:
                    del self._verdicts[key]

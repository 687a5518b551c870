"""`Lookups`: what each request was told of each key, until it is finished.

vLLM asks for a key at every step until it is told, and a verdict that it was told must not
change while its request lives, but from a hit to a miss after a failed load: else it would
ask for the same load for ever.

Locking: none. vLLM never enters two calls of a tier at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.arrays import Proof

_UNASKED = True
"""Stands for the verdict of a key that nobody asks for: anything but None."""


class Lookups:
    """Verdicts by key, and who waits for them.

    Where a proof came with a hit it is kept, so that the load need not prove it again.
    """

    def __init__(self) -> None:
        """Nothing has been asked."""
        self._verdicts: dict[bytes, bool | None] = {}  # None: not known yet
        self._proofs: dict[bytes, Proof] = {}
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
        try:
            return self._verdicts[key]
        except KeyError:
            self._verdicts[key] = None
            self._new.append(key)
            return None

    def take_new(self) -> list[bytes]:
        """The keys whose verdict is still to be found."""
        new, self._new = dict.fromkeys(self._new), []
        return [key for key in new if self._verdicts.get(key, _UNASKED) is None]

    def tell(self, key: bytes, there: bool, proof: Proof | None) -> None:
        """What was found. A key that has its verdict keeps it: somebody was told."""
        if self._verdicts.get(key, _UNASKED) is not None:
            return
        if key not in self._holders:
            del self._verdicts[key]  # whoever asked has gone
            return
        self._verdicts[key] = there
        if proof is not None:
            self._proofs[key] = proof

    def proof(self, key: bytes) -> Proof | None:
        """The proof of a key that is there, if it is known."""
        return self._proofs.get(key)

    def mark_miss(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded. A lookup that is under way tells for itself."""
        for key in keys:
            if self._verdicts.get(key) is not None:
                self._verdicts[key] = False
                self._proofs.pop(key, None)

    def forget(self, request: str) -> None:
        """The request is finished. What nobody else holds is asked anew the next time."""
        for key in self._requests.pop(request, ()):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._proofs.pop(key, None)
                if self._verdicts[key] is not None:
                    del self._verdicts[key]

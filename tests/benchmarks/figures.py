"""`Results`: what one benchmark measured, as JSON and as ratios between sides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

FORMAT = 1
OURS = "kvstore"


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of one side in one case: a sample for each round.

    Attributes:
        case: what was measured on, e.g. `disk, 576 KiB`.
        side: whose figure it is, e.g. `kvstore`.
        quantity: what was measured, e.g. `store`.
        unit: of the samples; it also says which way is better. Empty where a side is a
            column with a unit of its own.
        samples: one for each round, in the order of the rounds.
    """

    case: str
    side: str
    quantity: str
    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def more_is_better(self) -> bool:
        """Speeds, shares and what was reused; all else is a cost."""
        return self.unit.endswith("/s") or self.unit in ("%", "tokens")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of some samples."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(median(samples), min(samples), max(samples))

    def __str__(self) -> str:
        if self.least == self.most:
            return number(self.middle)
        return f"{number(self.middle)} ({number(self.least)}..{number(self.most)})"


@dataclass(slots=True)
class Results:
    """All figures of one benchmark, and what must be said beside them."""

    benchmark: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def add(self, case: str, side: str, quantity: str, unit: str, value: float) -> None:
        """One more sample."""
        for figure in self.figures:
            if (figure.case, figure.side, figure.quantity) == (case, side, quantity):
                figure.samples.append(value)
                return
        self.figures.append(Figure(case, side, quantity, unit, [value]))

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def sides(self) -> list[str]:
        """Every side, ours first."""
        names = dict.fromkeys(figure.side for figure in self.figures)
        return sorted(names, key=lambda name: name != OURS)

    def rows(self) -> Iterator[list[Figure]]:
        """The figures of one case and quantity, one row after the other."""
        table: dict[tuple[str, str], list[Figure]] = {}
        for figure in self.figures:
            table.setdefault((figure.case, figure.quantity), []).append(figure)
        yield from table.values()

    def write(self, path: Path) -> None:
        document = {"format": FORMAT, **asdict(self)}
        path.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `write` wrote.

        Raises:
            ValueError: it is no such file.
        """
        document = json.loads(path.read_text())
        if document.pop("format", None) != FORMAT:
            raise ValueError(f"{path.name}: expected a results file of format {FORMAT}")
        figures = [Figure(**figure) for figure in document.pop("figures")]
        return cls(**document, figures=figures)


def ratio(ours: Figure, theirs: Figure) -> Spread | None:
    """Ours over theirs, round by round; None where a side has nothing to divide."""
    pairs = list(zip(ours.samples, theirs.samples, strict=False))
    if not pairs or any(their == 0 for _, their in pairs):
        return None
    return Spread.of([our / their for our, their in pairs])


def number(value: float) -> str:
    """Three digits that mean something, or an honest 0."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.{1 if abs(value) >= 10 else 2}f}"

"""`page`: a `Report` as one HTML page. The only user of jinja2.

The page loads nothing and runs nothing: its policy allows the style that is in it, and
pictures that are in it. Names come from strangers, so every one of them is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvstore.__about__ import __version__
from kvstore.errors import InvalidInputError, printable
from kvstore.offline.census import AGES
from kvstore.offline.colours import png
from kvstore.offline.contents import Part
from kvstore.offline.report import Report
from kvstore.offline.words import age_text, bytes_text, value_text

_FILES = Path(__file__).parent
_LEGEND: list[list[float | None]] = [[step / 63 for step in range(64)]]


def page(report: Report) -> str:
    """The whole page.

    Raises:
        InvalidInputError: jinja2 is missing.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise InvalidInputError(
            "report: a page needs the package jinja2: pip install 'kvstore-zarr[report]'"
        ) from error
    environment = Environment(
        loader=FileSystemLoader(_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "age": age_text,
        "bytes": bytes_text,
        "number": lambda number: f"{number:,}",
        "printable": printable,
        "value": lambda value: printable(value_text(value)),
    }
    style = (_FILES / "report.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        report=report,
        version=__version__,
        style=Markup(style),  # ours, and no one else's
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        made=f"{datetime.fromtimestamp(report.made, UTC):%Y-%m-%d %H:%M} UTC",
        ages=_ages(report.census.ages),
        problems=sorted(report.findings.found.items()),
        found=sum(report.findings.found.values()),
        legend=_data_url(_LEGEND),
        maps=[_map(part) for part in report.picture.parts] if report.picture else [],
    )


def _ages(counts: tuple[int, ...]) -> list[tuple[str, int]]:
    """What each class is called, and how many blocks are in it."""
    ends = [words for _, words in AGES]
    starts = ["", *(f"{words} to " for words in ends[:-1])]
    names = [f"{start}{end}" for start, end in zip(starts, ends, strict=True)]
    names[0] = f"less than {ends[0]}"
    return list(zip([*names, f"more than {ends[-1]}"], counts, strict=True))


def _map(part: Part) -> dict[str, Any]:
    span = part.span
    highest = max(part.bins, default=0)
    return {
        "part": part,
        "image": _data_url(part.fractions()),
        "span": None if span is None else [f"{bound:.3g}" for bound in span],
        "range": [f"{end:.3g}" for end in (part.least, part.most) if end is not None],
        "bars": [100 * math.log1p(count) / math.log1p(highest) for count in part.bins],
        "gaps": any(mean is None for row in part.means for mean in row),
        "highest": highest,
    }


def _data_url(rows: list[list[float | None]]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(rows)).decode()

"""The metrics that people are told of, in the dashboard and in the operations page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
_NAME = re.compile(r"vllm:\w+")


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DOCS / "dashboard.json").read_text())
    return document


def expressions() -> Iterator[str]:
    """What the dashboard asks Prometheus, for panels and for variables."""
    document = dashboard()
    for panel in document["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def shown() -> set[str]:
    """The names of metrics in the dashboard, as Prometheus has them."""
    return {name for text in expressions() for name in _NAME.findall(text)}


def explained() -> set[str]:
    """Those in the tables of the operations page."""
    lines = (DOCS / "operations.md").read_text().splitlines()
    return {
        name
        for line in lines
        if line.startswith("| `vllm:")
        for name in _NAME.findall(line.split(" | ")[0])
    }


def family(name: str) -> str:
    """The name of the metric that a sample belongs to, as its HELP line has it."""
    return re.sub("_(total|bucket|sum|count)$", "", name)

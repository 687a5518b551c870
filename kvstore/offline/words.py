"""What is recorded, in words that a person can read. Pure."""

from __future__ import annotations

import time

from kvstore.config import Config
from kvstore.layout import Layout

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_PARALLEL = (
    ("tp_size", "tensor"),
    ("pp_size", "pipeline"),
    ("pcp_size", "prefill context"),
    ("dcp_size", "decode context"),
)


def bytes_text(nbytes: float) -> str:
    """`nbytes` for people, e.g. `1.5 MiB`."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:,.0f} B" if not unit else f"{nbytes:,.1f} {_UNITS[unit]}"


def age_text(moment: float | None) -> str:
    """How long ago a moment was, e.g. `3 h`; in seconds since the epoch."""
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s"


def value_text(value: object) -> str:
    """A recorded value for people: a list by its members."""
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{name} {value_text(inner)}" for name, inner in value.items())
    return "unknown" if value is None else str(value)


def config_text(config: Config) -> str:
    """Who computed the values, and on how many workers."""
    sizes = [
        f"{word} {size}" for name, word in _PARALLEL if (size := getattr(config, name)) > 1
    ]
    if config.parallel_agnostic:
        workers = "whatever the number of workers"
    elif sizes:
        workers = f"in parallel: {', '.join(sizes)}"
    else:
        workers = "by one worker"
    return (
        f"KV in {config.dtype}, computed by {config.inference_engine} {workers}; a hash "
        f"covers {config.tokens_per_hash} tokens."
    )


def layout_text(layout: Layout) -> str:
    """How the bytes of a block lie, and what put them there."""
    size = bytes_text(layout.nbytes)
    if layout.opaque:
        reason = layout.reason or "no reason is recorded"
        return f"Blocks of {size} in an order that is not known: {reason}."
    axes = " × ".join(
        f"{length} {axis}{'s' if length != 1 and axis != 'packed' else ''}"
        for axis, length in zip(layout.axes, layout.shape, strict=True)
    )
    known = [
        f"{word} {value}"
        for word, value in (
            ("packing", layout.packing),
            ("attention", layout.backend),
            ("model runner", layout.runner),
            ("layout", layout.kv_cache_layout),
        )
        if value is not None
    ]
    text = f"Blocks of {size}, in memory as {axes}, in {layout.dtype}"
    return f"{text}; {', '.join(known)}." if known else f"{text}."

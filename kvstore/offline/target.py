"""What a group is converted to: its config and layout, changed as wanted. Pure, no I/O.

What can change is how values are laid out. What the values are, and what they are called,
stays. Everything that follows from a change follows here, as an engine would have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvstore.config import Config, prove_parallel_agnostic
from kvstore.errors import InvalidInputError, shown
from kvstore.layout import KV_CACHE_LAYOUTS, TILED, Layout, canonical_kv_cache_layout

_MAY_DIFFER = ("tp_size", "parallel_agnostic")
"""Fields of a config that a conversion can change."""

_ONE = ("pp_size", "pcp_size", "dcp_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be otherwise. None leaves as it is what follows from nothing else.

    Attributes:
        axes: the order of one worker's axes, outermost first.
        packing: how the values inside the innermost axes are arranged.
        runner: `v1` or `v2`.
        kv_cache_layout: vLLM's name for the order; by default, it follows from the axes.
        backend: the engine's attention backend, which the new packing may belong to.
        tp: the tensor-parallel size.
        parallel_agnostic: whether the bytes are to be the same under every parallel size.
    """

    axes: tuple[str, ...] | None = None
    packing: str | None = None
    runner: str | None = None
    kv_cache_layout: str | None = None
    backend: str | None = None
    tp: int | None = None
    parallel_agnostic: bool | None = None


def target_of(config: Config, layout: Layout, wanted: Wanted) -> tuple[Config, Layout]:
    """The config and layout of a group that is otherwise as `wanted`.

    Raises:
        InvalidInputError: no engine has such blocks, and why.
    """
    require_described(config, layout)
    agnostic = config.parallel_agnostic
    if wanted.parallel_agnostic is not None:
        agnostic = wanted.parallel_agnostic
    workers = _workers(config, wanted.tp, agnostic=agnostic)
    target = _of_one_worker(layout, wanted, workers)
    if agnostic and not prove_parallel_agnostic(target, claimed=True):
        raise InvalidInputError(
            f"parallel_agnostic: expected head outermost, found axes {target.axes}, whose "
            "bytes differ between parallel sizes. Put head first among the axes, or say "
            "that the result is not parallel-agnostic"
        )
    # Where a worker's heads would join, the bytes are parallel-agnostic: an engine says so.
    target = target.with_workers(workers, heads_sharded=False)
    changed = replace(config, tp_size=workers, parallel_agnostic=agnostic)
    return changed, target


def _workers(config: Config, tp: int | None, *, agnostic: bool) -> int:
    """How many the blocks name; where bytes are parallel-agnostic, heads are joined."""
    if agnostic and tp is not None:
        raise InvalidInputError(
            f"tp: expected none for blocks that are parallel-agnostic, found {tp}: they "
            "are the same under every size. Leave it out, or say that the result is not "
            "parallel-agnostic"
        )
    if agnostic:
        return 1
    return config.tp_size if tp is None else tp


def _of_one_worker(layout: Layout, wanted: Wanted, workers: int) -> Layout:
    """One worker's share of the target, whose heads are divided among `workers`."""
    packing = wanted.packing or layout.packing
    lengths = _lengths(layout)
    heads = lengths["head"]
    if workers < 1 or heads % workers:
        raise InvalidInputError(
            f"tp: expected a divisor of the {heads} KV heads, found {workers}. An "
            "engine of another size holds copies of heads, which are not made here"
        )
    lengths["head"] = heads // workers
    axes = _ordered(_repacked(_own_axes(layout), packing), wanted.axes)
    if unknown := [axis for axis in axes if axis not in lengths]:
        raise InvalidInputError(
            f"tokens_per_block: expected a number, found none, so that the length of "
            f"{unknown[0]} does not follow"
        )
    shape = tuple(lengths[axis] for axis in axes)
    target = replace(
        layout,
        axes=axes,
        shape=shape,
        packing=packing,
        backend=wanted.backend or layout.backend,
        runner=wanted.runner or layout.runner,
        kv_cache_layout=None,
    )
    if layout.page_bytes is not None:
        steps = lengths["layer"] * lengths.get("block", 1)
        target = replace(target, page_bytes=target.nbytes // steps)
    if wanted.kv_cache_layout is not None:
        return replace(target, kv_cache_layout=_unopposed(wanted.kv_cache_layout, target))
    if _unpacked(axes) == _unpacked(_own_axes(layout)):
        return replace(target, kv_cache_layout=layout.kv_cache_layout)
    return replace(target, kv_cache_layout=_name_of(axes, layout.kv_cache_layout))


def _lengths(layout: Layout) -> dict[str, int]:
    """The length of every axis that a packing may use, over all workers."""
    lengths = dict(zip(layout.axes, layout.shape, strict=True))
    lengths["head"] *= lengths.pop("worker", 1)
    if (tokens := layout.tokens_per_block) is None:
        return lengths
    if "packed" in lengths:
        return lengths | {"token": tokens, "value": lengths["packed"] // tokens}
    return lengths | {"packed": lengths["token"] * lengths["value"]}


def _own_axes(layout: Layout) -> tuple[str, ...]:
    """The axes of one worker."""
    return tuple(axis for axis in layout.axes if axis != "worker")


def _repacked(axes: tuple[str, ...], packing: str | None) -> tuple[str, ...]:
    """The same order, with the innermost axes that are true under a packing."""
    outer = tuple(axis for axis in axes if axis not in ("token", "value", "packed"))
    if str(packing).startswith(TILED):
        return (*outer, "packed")
    return (*outer, "token", "value") if "packed" in axes else axes


def _ordered(axes: tuple[str, ...], wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    if wanted is None:
        return axes
    inner = ("value", "packed")
    if sorted(wanted) != sorted(axes) or wanted[-1] not in inner:
        last = next(axis for axis in inner if axis in axes)
        raise InvalidInputError(
            f"axes: expected {', '.join(axes)} in an order that ends in {last}, found "
            f"{shown(','.join(wanted))}"
        )
    return wanted


def _unpacked(axes: tuple[str, ...]) -> tuple[str, ...]:
    """`packed` by the two axes that it stands for."""
    if "packed" not in axes:
        return axes
    return (*(axis for axis in axes if axis != "packed"), "token", "value")


def _name_of(axes: tuple[str, ...], before: str | None) -> str | None:
    """vLLM's name for an order: the one it had before if that fits; None if none does."""
    named = _unpacked(axes)
    fitting = [
        name
        for name, order in KV_CACHE_LAYOUTS.items()
        if tuple(axis for axis in order if axis in named) == named
    ]
    return before if before in fitting else next(iter(fitting), None)


def _unopposed(name: str, layout: Layout) -> str:
    """A name that somebody gave; axes of length 1 cannot contradict it."""
    name = canonical_kv_cache_layout(name)
    long = dict(zip(layout.axes, layout.shape, strict=True))
    found = [axis for axis in layout.axes if long[axis] > 1 and axis != "packed"]
    order = [axis for axis in KV_CACHE_LAYOUTS[name] if axis in found]
    if order != found:
        raise InvalidInputError(
            f"kv_cache_layout: expected a name of the order {tuple(found)}, found {name}, "
            f"which is {tuple(order)}. Leave it out: it follows from the axes"
        )
    return name


# ---- what is refused


def require_described(config: Config, layout: Layout) -> None:
    """Refuse a group whose documents do not say which value is where.

    Raises:
        InvalidInputError: with every reason.
    """
    reasons = [
        f"{name}: expected 1, found {getattr(config, name)}: how this axis of parallelism "
        "divides a block is not recorded"
        for name in _ONE
        if getattr(config, name) != 1
    ]
    if config.replicated_layout:
        reasons.append(
            "replicated_layout: one copy of what every worker holds has no parts"
        )
    if config.canonical_format is not None:
        reasons.append(
            f"canonical_format: vLLM's own format {shown(config.canonical_format)} is "
            "taken apart by vLLM alone"
        )
    if layout.opaque:
        told = layout.reason or "nothing is known of what is in it"
        reasons.append(f"axes: a block of plain bytes cannot be taken apart ({told})")
    else:
        reasons += _self_contradictions(config, layout)
    _refuse("the group cannot be converted", reasons)


def _self_contradictions(config: Config, layout: Layout) -> list[str]:
    lengths = dict(zip(layout.axes, layout.shape, strict=True))
    inner = ("packed",) if "packed" in lengths else ("token", "value")
    expected = ("layer", "head", *inner)
    if lengths.keys() - {"worker", "block"} != set(expected):
        return [f"axes: expected {expected} in any order, found {layout.axes}"]
    found = []
    if (workers := lengths.get("worker", 1)) != config.tp_size:
        found.append(
            f"tp_size: expected {workers}, the workers in a block of axes {layout.axes}, "
            f"found {config.tp_size}: a block does not hold all workers"
        )
    page = layout.nbytes // math.prod(
        lengths.get(axis, 1) for axis in ("worker", "layer", "block")
    )
    if layout.page_bytes not in (None, page):
        found.append(f"page_bytes: expected {page} by the shape, found {layout.page_bytes}")
    return found


def require_like(
    config: Config, layout: Layout, target_config: Config, target_layout: Layout
) -> None:
    """Refuse what an engine has recorded, where its values are others.

    Raises:
        InvalidInputError: with every reason.
    """
    require_described(config, layout)
    differences = [
        str(difference)
        for difference in target_config.differences(config)
        if difference.field not in _MAY_DIFFER
    ]
    _refuse("the two configs are not of the same values", differences)
    require_described(target_config, target_layout)


def require_heads(layout: Layout, kv_heads: int | None) -> None:
    """Refuse blocks that may hold one head more than once.

    More workers than KV heads hold copies of them, which no document tells.

    Args:
        layout: what is to be converted.
        kv_heads: KV heads of the model, as its own config says.

    Raises:
        InvalidInputError: the workers' heads are not those of the model.
    """
    lengths: Mapping[str, int] = dict(zip(layout.axes, layout.shape, strict=True))
    workers, heads = lengths.get("worker", 1), lengths["head"]
    if kv_heads is None and workers > 1:
        raise InvalidInputError(
            "kv_heads: expected the number of the model's KV heads, found none: the blocks "
            f"hold {heads} of each of {workers} workers, and no document says whether they "
            "are copies. The model's config.json has it as num_key_value_heads"
        )
    if kv_heads not in (None, workers * heads):
        raise InvalidInputError(
            f"kv_heads: expected {workers * heads}, the {heads} of each of {workers} "
            f"workers, found {kv_heads}: workers hold copies of heads, or this is another "
            "model's number"
        )


def _refuse(what: str, reasons: list[str]) -> None:
    if reasons:
        raise InvalidInputError(f"{what}:\n  " + "\n  ".join(reasons))

"""Any buffer of a block -> flat writable or readable bytes, without a copy.

A buffer is anything with the buffer protocol, a NumPy array of any dtype, or a torch
tensor. torch is never imported: a tensor is known by its own methods.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.errors import InvalidInputError


@contextlib.contextmanager
def readable(buffer: Any, nbytes: int) -> Iterator[memoryview]:
    """The bytes of `buffer`, which must hold exactly `nbytes`.

    A tensor on a device is copied into pinned memory first.

    Raises:
        InvalidInputError: another length, or not contiguous.
    """
    if _is_tensor(buffer):
        flat = _flat_tensor(buffer)
        if flat.device.type != "cpu":
            flat = _pinned_like(flat).copy_(flat)
        buffer = flat.numpy()
    yield _flat(buffer, nbytes)


@contextlib.contextmanager
def writable(buffer: Any, nbytes: int) -> Iterator[memoryview]:
    """As `readable`, to be filled. A tensor on a device receives the bytes on leaving
    without an error.

    Raises:
        InvalidInputError: another length, not contiguous, or read-only.
    """
    device = None
    if _is_tensor(buffer):
        flat = _flat_tensor(buffer)
        if flat.device.type != "cpu":
            device, flat = flat, _pinned_like(flat)
        staging, buffer = flat, flat.numpy()
    view = _flat(buffer, nbytes)
    if view.readonly:
        raise InvalidInputError("buffer: expected a writable one, found a read-only one")
    yield view
    if device is not None:
        device.copy_(staging)


def _flat(buffer: Any, nbytes: int) -> memoryview:
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise InvalidInputError(
                f"buffer: expected a C-contiguous array, found strides {buffer.strides} "
                f"for shape {buffer.shape}"
            )
        # Through uint8: the buffer protocol has no letter for bfloat16.
        buffer = buffer.reshape(-1)
    try:
        if isinstance(buffer, np.ndarray):
            buffer = buffer.view(np.uint8)
        view = memoryview(buffer).cast("B")
    except TypeError as error:
        raise InvalidInputError(f"buffer: {error}") from error
    if view.nbytes != nbytes:
        raise InvalidInputError(
            f"buffer: expected the {nbytes} bytes of one block, found {view.nbytes}"
        )
    return view


def _is_tensor(buffer: Any) -> bool:
    return hasattr(buffer, "untyped_storage") and hasattr(buffer, "device")


def _flat_tensor(tensor: Any) -> Any:
    if not tensor.is_contiguous():
        raise InvalidInputError(
            f"buffer: expected a contiguous tensor, found strides {tensor.stride()} "
            f"for shape {tuple(tensor.shape)}"
        )
    flat = tensor.detach().reshape(-1)
    return flat.view(_torch().uint8)


def _pinned_like(flat: Any) -> Any:
    torch = _torch()
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)


def _torch() -> Any:
    """The module that made the tensor at hand, which is therefore imported already."""
    return sys.modules["torch"]


def scatter(chunks: Iterable[Any], buffers: Sequence[memoryview]) -> None:
    """Copy `chunks`, which have the buffer protocol, into `buffers` in turn.

    Raises:
        ValueError: the chunks hold more than the buffers, or less.
    """
    pending = [buffer for buffer in buffers if buffer.nbytes]
    for chunk in chunks:
        view = memoryview(chunk)
        while view.nbytes and pending:
            count = min(view.nbytes, pending[0].nbytes)
            pending[0][:count] = view[:count]
            view, pending[0] = view[count:], pending[0][count:]
            if not pending[0].nbytes:
                del pending[0]
        if view.nbytes:
            raise ValueError("more bytes came than there is room for")
    if pending:
        raise ValueError("fewer bytes came than there is room for")

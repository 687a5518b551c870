import array
import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kvstore.buffers import readable, scatter, writable
from kvstore.errors import InvalidInputError

NBYTES = 48
PAYLOAD = bytes(range(NBYTES))

NUMPY_TYPES: list[npt.DTypeLike] = [
    np.bool_,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    ">f4",
    "V3",
    [("k", "<f2"), ("v", "<f2")],
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.int4,
]


def mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, NBYTES)
    memory[:] = PAYLOAD
    return memory


BUFFERS = [
    pytest.param(lambda: bytearray(PAYLOAD), id="bytearray"),
    pytest.param(lambda: memoryview(bytearray(PAYLOAD)), id="memoryview"),
    pytest.param(
        lambda: memoryview(bytearray(PAYLOAD)).cast("I"), id="memoryview-of-integers"
    ),
    pytest.param(
        lambda: memoryview(bytearray(PAYLOAD)).cast("B", (2, 3, 8)), id="memoryview-3d"
    ),
    pytest.param(
        lambda: memoryview(bytearray(b"<" + PAYLOAD + b">"))[1:-1], id="memoryview-slice"
    ),
    pytest.param(lambda: array.array("H", PAYLOAD), id="array"),
    pytest.param(lambda: array.array("d", PAYLOAD), id="array-of-doubles"),
    pytest.param(lambda: (ctypes.c_uint8 * NBYTES)(*PAYLOAD), id="ctypes"),
    pytest.param(mapped, id="mmap"),
    pytest.param(lambda: np.frombuffer(bytearray(PAYLOAD), "u1"), id="numpy"),
    pytest.param(
        lambda: np.frombuffer(bytearray(PAYLOAD), "u1").reshape(2, 3, 8), id="numpy-3d"
    ),
    pytest.param(
        lambda: np.frombuffer(bytearray(2 * PAYLOAD), "u1").reshape(2, 48)[1],
        id="row-of-an-array",
    ),
]


def raw(buffer: Any) -> bytes:
    """The buffer's bytes, without kvstore."""
    return bytes(memoryview(buffer).cast("B"))


# ---- buffers that are taken


@pytest.mark.parametrize("make", BUFFERS)
def test_readable_is_the_bytes_without_a_copy(make: Any) -> None:
    buffer = make()
    with readable(buffer, NBYTES) as view:
        assert bytes(view) == PAYLOAD
        assert (view.format, view.ndim, view.nbytes) == ("B", 1, NBYTES)
        assert np.shares_memory(np.frombuffer(view, "u1"), np.frombuffer(buffer, "u1"))


@pytest.mark.parametrize("make", BUFFERS)
def test_writable_fills_the_buffer_itself(make: Any) -> None:
    buffer = make()
    with writable(buffer, NBYTES) as view:
        assert (view.format, view.ndim, view.nbytes) == ("B", 1, NBYTES)
        view[:] = PAYLOAD[::-1]
    assert raw(buffer) == PAYLOAD[::-1]


def test_bytes_are_readable() -> None:
    with readable(PAYLOAD, NBYTES) as view:
        assert bytes(view) == PAYLOAD


@pytest.mark.parametrize("dtype", NUMPY_TYPES, ids=lambda dtype: str(np.dtype(dtype)))
def test_numpy_arrays_of_every_dtype(dtype: npt.DTypeLike) -> None:
    flat = np.frombuffer(bytearray(PAYLOAD), np.uint8).view(dtype)
    for buffer in (flat, flat.reshape(2, -1), flat.reshape(1, 2, -1)):
        with readable(buffer, NBYTES) as view:
            assert bytes(view) == PAYLOAD
        with writable(buffer, NBYTES) as view:
            view[:] = PAYLOAD[::-1]
        assert buffer.tobytes() == PAYLOAD[::-1]
        with writable(buffer, NBYTES) as view:
            view[:] = PAYLOAD


def test_a_single_number_is_an_array_too() -> None:
    number = np.array(1.0)
    with writable(number, 8) as view:
        view[:] = np.array(2.5).tobytes()
    assert number == 2.5


# ---- buffers that are refused


@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(np.zeros((4, 12), "u1")[:, ::2], id="every-other-column"),
        pytest.param(np.zeros((4, 12), "u1")[:, :6], id="left-half"),
        pytest.param(np.zeros((4, 6), "u1").T, id="transposed"),
        pytest.param(np.zeros((4, 6), "u1", order="F"), id="fortran"),
        pytest.param(np.zeros(NBYTES, "u1")[::-1], id="backwards"),
        pytest.param(np.broadcast_to(np.zeros(1, "u1"), NBYTES), id="broadcast"),
        pytest.param(
            np.zeros((4, 6), ml_dtypes.bfloat16)[:, ::2], id="every-other-bfloat16"
        ),
    ],
)
def test_arrays_that_are_not_contiguous_are_refused_with_their_strides(
    buffer: npt.NDArray[Any],
) -> None:
    for access in (readable, writable):
        with (
            pytest.raises(InvalidInputError, match=r"contiguous.*strides .* for shape"),
            access(buffer, buffer.nbytes),
        ):
            pytest.fail("it was accepted")


def test_a_memoryview_that_is_not_contiguous_is_refused() -> None:
    buffer = memoryview(bytearray(2 * NBYTES))[::2]
    with pytest.raises(InvalidInputError, match="buffer: "), readable(buffer, NBYTES):
        pytest.fail("it was accepted")


def read_only_array() -> npt.NDArray[np.uint8]:
    buffer = np.zeros(NBYTES, np.uint8)
    buffer.flags.writeable = False
    return buffer


@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(PAYLOAD, id="bytes"),
        pytest.param(memoryview(PAYLOAD), id="memoryview"),
        pytest.param(memoryview(bytearray(PAYLOAD)).toreadonly(), id="toreadonly"),
        pytest.param(np.frombuffer(PAYLOAD, np.float32), id="numpy-of-bytes"),
        pytest.param(read_only_array(), id="numpy-flag"),
    ],
)
def test_read_only_buffers_are_read_and_not_filled(buffer: Any) -> None:
    with readable(buffer, NBYTES) as view:
        assert view.nbytes == NBYTES
    with (
        pytest.raises(
            InvalidInputError, match="expected a writable one, found a read-only"
        ),
        writable(buffer, NBYTES),
    ):
        pytest.fail("it was accepted")


@pytest.mark.parametrize("length", [0, 1, NBYTES - 1, NBYTES + 1, 2 * NBYTES])
@pytest.mark.parametrize("access", [readable, writable])
def test_another_length_is_refused_with_both_lengths(access: Any, length: int) -> None:
    with (
        pytest.raises(InvalidInputError, match=rf"the {NBYTES} bytes.* found {length}$"),
        access(bytearray(length), NBYTES),
    ):
        pytest.fail("it was accepted")


@pytest.mark.parametrize("buffer", [None, NBYTES, "x" * NBYTES, [0] * NBYTES, object()])
@pytest.mark.parametrize("access", [readable, writable])
def test_what_is_not_a_buffer_is_refused(access: Any, buffer: object) -> None:
    with (
        pytest.raises(InvalidInputError, match=r"buffer: .*bytes-like"),
        access(buffer, NBYTES),
    ):
        pytest.fail("it was accepted")


@pytest.mark.parametrize("access", [readable, writable])
def test_an_array_of_python_objects_is_refused(access: Any) -> None:
    with (
        pytest.raises(InvalidInputError, match="buffer: "),
        access(np.array([None] * (NBYTES // 8), dtype=object), NBYTES),
    ):
        pytest.fail("it was accepted")


# ---- tensors

TORCH_TYPES = ("uint8", "int8", "float16", "bfloat16", "float32", "float8_e4m3fn")


@pytest.fixture(name="torch")
def torch_module() -> Any:
    return pytest.importorskip("torch", reason="the extra torch is not installed")


@pytest.fixture
def cuda(torch: Any) -> Iterator[Any]:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    yield torch.device("cuda")
    torch.cuda.synchronize()


def payload_tensor(torch: Any, dtype: str) -> Any:
    flat = torch.tensor(list(PAYLOAD), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(2, -1)


def tensor_bytes(torch: Any, tensor: Any) -> bytes:
    return bytes(tensor.cpu().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_tensors_of_every_dtype(torch: Any, dtype: str) -> None:
    tensor = payload_tensor(torch, dtype)
    with readable(tensor, NBYTES) as view:
        assert bytes(view) == PAYLOAD
    with writable(tensor, NBYTES) as view:
        view[:] = PAYLOAD[::-1]
    assert tensor_bytes(torch, tensor) == PAYLOAD[::-1]


def test_a_row_of_a_tensor_is_filled_in_place(torch: Any) -> None:
    rows = torch.zeros((3, NBYTES), dtype=torch.uint8)
    with writable(rows[1], NBYTES) as view:
        view[:] = PAYLOAD
    assert bytes(rows[1].tolist()) == PAYLOAD
    assert not rows[0].any()
    assert not rows[2].any()


def test_a_tensor_that_learns_is_only_its_values(torch: Any) -> None:
    tensor = torch.ones(12, dtype=torch.float32, requires_grad=True)
    with readable(tensor, NBYTES) as view:
        assert np.frombuffer(view, np.float32).tolist() == [1.0] * 12


def test_tensors_that_are_not_contiguous_are_refused_with_their_strides(
    torch: Any,
) -> None:
    tensor = torch.zeros((4, 6), dtype=torch.uint8)
    for buffer in (tensor.T, tensor[:, ::2], tensor[:1].expand(4, 6)):
        for access in (readable, writable):
            with (
                pytest.raises(InvalidInputError, match=r"contiguous.*strides .*shape"),
                access(buffer, buffer.numel()),
            ):
                pytest.fail("it was accepted")


@pytest.mark.parametrize("access", [readable, writable])
def test_a_tensor_of_another_length_is_refused(torch: Any, access: Any) -> None:
    with (
        pytest.raises(InvalidInputError, match=r"the 48 bytes.* found 12$"),
        access(torch.zeros(6, dtype=torch.bfloat16), NBYTES),
    ):
        pytest.fail("it was accepted")


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_a_tensor_on_a_device_is_read_and_filled(torch: Any, cuda: Any, dtype: str) -> None:
    tensor = payload_tensor(torch, dtype).to(cuda)
    with readable(tensor, NBYTES) as view:
        assert bytes(view) == PAYLOAD
    with writable(tensor, NBYTES) as view:
        view[:] = PAYLOAD[::-1]
    assert tensor_bytes(torch, tensor) == PAYLOAD[::-1]


def test_a_tensor_on_a_device_stays_as_it_was_after_an_error(torch: Any, cuda: Any) -> None:
    tensor = payload_tensor(torch, "uint8").to(cuda)
    with contextlib.suppress(EOFError), writable(tensor, NBYTES) as view:
        view[:12] = PAYLOAD[::-1][:12]
        raise EOFError
    assert tensor_bytes(torch, tensor) == PAYLOAD


@pytest.mark.parametrize("sizes", [[7], [3, 4], [1, 0, 5, 1], [7, 0]])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_scatter(sizes: list[int], chunk: int) -> None:
    data = bytes(range(7))
    buffers = [memoryview(bytearray(size)) for size in sizes]
    scatter((data[n : n + chunk] for n in range(0, 7, chunk)), buffers)
    assert b"".join(buffers) == data


@pytest.mark.parametrize(("size", "problem"), [(6, "more bytes"), (8, "fewer bytes")])
def test_scatter_of_another_length(size: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        scatter([bytes(7)], [memoryview(bytearray(size))])

"""`bfloat16` for zarr-python, which has no such type of its own.

zarr-python finds the class through entry points, so that any tool built on it reads
bfloat16 blocks where this package is installed. zarr 3.1 looks there only when it opens a
group: to open a block directly, import this module first. tensorstore and zarrs read the
type natively. Values are NumPy arrays of `ml_dtypes.bfloat16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
import zarr.errors
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

if hasattr(zarr.errors, "DataTypeValidationError"):
    from zarr.errors import DataTypeValidationError
else:  # zarr 3.1
    from zarr.dtype import DataTypeValidationError  # type: ignore[no-redef]  # see above

_NATIVE = np.dtype(ml_dtypes.bfloat16)
_SPECIAL = {"NaN", "Infinity", "-Infinity"}


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """The Zarr v3 data type `bfloat16`."""

    dtype_cls: ClassVar[Any] = type(_NATIVE)
    _zarr_v3_name: ClassVar[str] = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes of one value."""
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """The type for `numpy.dtype(ml_dtypes.bfloat16)`, and for no other."""
        if dtype != _NATIVE:
            raise DataTypeValidationError(f"expected {_NATIVE}, found {dtype}")
        return cls()

    def to_native_dtype(self) -> Any:
        """`numpy.dtype(ml_dtypes.bfloat16)`."""
        return _NATIVE

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError("Zarr v2 has no bfloat16")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"expected 'bfloat16', found {data!r}")
        return cls()

    def to_json(self, zarr_format: Any) -> Any:
        """The type's name in array metadata."""
        if zarr_format != 3:
            raise ValueError("Zarr v2 has no bfloat16")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        try:
            ml_dtypes.bfloat16(data)
        except (TypeError, ValueError):
            return False
        return True

    def cast_scalar(self, data: object) -> Any:
        """`data` rounded to a bfloat16."""
        if not self._check_scalar(data):
            raise TypeError(f"cannot convert {data!r} to a bfloat16")
        return ml_dtypes.bfloat16(data)

    def default_scalar(self) -> Any:
        """Zero, as zarr-python has it for every number type."""
        return ml_dtypes.bfloat16(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        """A fill value: a number, a name of a special value, or `0x` and hex digits."""
        if isinstance(data, str) and data.startswith("0x"):
            bits = np.array(int(data, 16), dtype=np.uint16)
            return bits.view(_NATIVE)[()]
        if isinstance(data, str) and data not in _SPECIAL:
            raise TypeError(f"expected a bfloat16 fill value, found {data!r}")
        return self.cast_scalar(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> float | str:
        """The inverse of `from_json_scalar`."""
        value = float(self.cast_scalar(data))
        if np.isnan(value):
            return "NaN"
        if np.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value


# For zarr 3.1, which does not load its entry points for data types; see pyproject.toml.
data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)

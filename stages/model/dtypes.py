"""Dtypes of weights under their three names: PyTorch's, the code in safetensors headers, and the one in params.yaml.

This table imports no torch, which takes seconds: `getattr(torch, name)` is the dtype itself.
"""

from typing import NamedTuple


class DType(NamedTuple):
    """A dtype that safetensors files can hold."""

    name: str
    """PyTorch's name, such as `bfloat16`."""
    code: str
    """In safetensors headers, such as `BF16`."""
    itemsize: int
    """Bytes per element."""
    is_floating_point: bool


# Other codes, such as F8_E4M3, are an error only where the model has the tensor (stages/model/meta.py).
DTYPES = (
    DType("float64", "F64", 8, True),
    DType("float32", "F32", 4, True),
    DType("float16", "F16", 2, True),
    DType("bfloat16", "BF16", 2, True),
    DType("int64", "I64", 8, False),
    DType("int32", "I32", 4, False),
    DType("int16", "I16", 2, False),
    DType("int8", "I8", 1, False),
    DType("uint8", "U8", 1, False),
    DType("bool", "BOOL", 1, False),
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The short names of `precision` and `export_dtype` in params.yaml -> PyTorch's names."""

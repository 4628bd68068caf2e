"""A model file with every quantised matrix as bf16, rounded from its dequantised values: what an unquantised file of the same model is.

    python bench/bf16.py SmolLM2-135M-Instruct.Q4_1.gguf OUT.gguf

Written by the `gguf` package; the same bytes each time. `python -m power_lab.training bind` binds a drafter to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from gguf.quants import dequantize, quantize
from tqdm.auto import tqdm

KEPT = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
BF16 = GGMLQuantizationType.BF16
FILE_TYPE = "general.file_type"
MOSTLY_BF16 = 32


Stored = tuple[np.ndarray, GGMLQuantizationType]


def convert(path: Path, out: Path) -> None:
    def stored(tensor: ReaderTensor) -> Stored:
        kind = tensor.tensor_type
        return (tensor.data, kind) if kind in KEPT else (quantize(dequantize(tensor.data, kind), BF16), BF16)

    rewrite(path, out, stored, MOSTLY_BF16)


def rewrite(path: Path, out: Path, stored: Callable[[ReaderTensor], Stored], file_type: int) -> None:
    """The same model with each tensor as `stored` gives it."""
    reader = GGUFReader(path)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == FILE_TYPE:
            writer.add_file_type(file_type)
        elif not field.name.startswith("GGUF.") and field.name != "general.architecture":
            nested = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], nested)
    for tensor in tqdm(reader.tensors, desc=out.name, disable=None):
        data, kind = stored(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

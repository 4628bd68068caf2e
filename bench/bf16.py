"""A model file with every quantised matrix as bf16, rounded from its dequantised values: what an unquantised file of the same model is.

    python bench/bf16.py SmolLM2-135M-Instruct.Q4_1.gguf OUT.gguf

Written by the `gguf` package; the same bytes each time. `python -m power_lab.training bind` binds a drafter to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from tqdm.auto import tqdm

KEPT = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
BF16 = GGMLQuantizationType.BF16
FILE_TYPE = "general.file_type"
MOSTLY_BF16 = 32


def convert(path: Path, out: Path) -> None:
    reader = GGUFReader(path)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == FILE_TYPE:
            writer.add_file_type(MOSTLY_BF16)
        elif not field.name.startswith("GGUF.") and field.name != "general.architecture":
            nested = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], nested)
    for tensor in tqdm(reader.tensors, desc="bf16", disable=None):
        kind = tensor.tensor_type
        if kind in KEPT:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, quantize(dequantize(tensor.data, kind), BF16), raw_dtype=BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

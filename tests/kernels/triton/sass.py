"""What a loop of a compiled kernel issues, instruction by instruction, read without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from triton.backends import nvidia
from triton.compiler import CompiledKernel

UNITS = {
    "matrix": ("HMMA", "HGMMA", "WARPGROUP"),
    "float": ("FFMA", "FADD", "FMUL", "HADD2", "HFMA2", "HMUL2", "IMAD", "MOV"),
    "integer": ("LOP3", "SHF", "PRMT", "IADD3", "LEA", "SEL", "ISETP", "VIADD", "SGXT", "PLOP3", "FSEL", "I2FP"),
    "memory": ("LDG", "LDS", "LDSM", "STS", "STSM", "LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "SHFL", "SYNCS", "UTMALDG", "LDL", "STL"),
}  # fmt: skip


def loop(kernel: CompiledKernel) -> Counter[str]:
    """Instructions of the innermost loop that feeds the matrix unit, by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", text)]
    place = {at: i for i, (at, _) in enumerate(lines)}
    spans = [
        (place[to], i)
        for i, (at, what) in enumerate(lines)
        if (found := re.search(r"BRA\S*\s.*?0x([0-9a-f]+)", what)) and (to := int(found[1], 16)) < at
    ]
    spans = [span for span in spans if any("MMA" in what for _, what in lines[span[0] : span[1]])]
    first, last = min(spans, key=lambda span: span[1] - span[0])
    return Counter(re.sub(r"^@!?U?P\w+\s+", "", what).split()[0].split(".")[0] for _, what in lines[first : last + 1])


def units(names: Counter[str]) -> Counter[str]:
    """The same by unit; what no unit is named for is uniform or flow."""
    unit = {name: unit for unit, all_ in UNITS.items() for name in all_}
    total: Counter[str] = Counter()
    for name, count in names.items():
        total[unit.get(name, "other")] += count
    return total

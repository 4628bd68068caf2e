"""Triton's kernels without a GPU: values through its interpreter, which must be chosen before triton is imported.

Code is compiled for sm_90 in processes of its own, since a process either interprets or compiles.
"""

from __future__ import annotations

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

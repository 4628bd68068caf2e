"""`python -m power_lab.jupyter -f CONNECTION_FILE`: start the kernel."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # `-m` puts the notebook's folder first on the path. IPython adds it again once the kernel runs; until then a file beside the
    # notebook, say a student's queue.py, must not pass for a module of the kernel.
    if not sys.flags.safe_path:
        del sys.path[0]

    from ipykernel.kernelapp import IPKernelApp

    from power_lab.jupyter.kernel import PowerLabKernel

    IPKernelApp.launch_instance(kernel_class=PowerLabKernel)

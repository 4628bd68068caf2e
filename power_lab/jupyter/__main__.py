"""`python -m power_lab.jupyter -f CONNECTION_FILE`: start the kernel."""

from __future__ import annotations

from ipykernel.kernelapp import IPKernelApp

from power_lab.jupyter.kernel import PowerLabKernel

if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=PowerLabKernel)

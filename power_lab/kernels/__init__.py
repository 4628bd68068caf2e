"""Compute kernels: one signature per operation, one implementation per device, one plain truth in `reference`."""

"""Tuning: sweeps over settings, measured on the engines of a lab, as a cube that says which outputs were the same.

`lab.sweep(...)` is the way in; see `power_lab.tuning.sweep.Sweep` for what comes back.
"""

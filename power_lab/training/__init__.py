"""Training of drafters for a target model, on text that the target itself says (docs/training.md).

`python -m power_lab.training` collects text, trains DFlash, DSpark, DFlash2 and MTP drafters on it and writes their artifacts.
"""

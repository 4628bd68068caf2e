"""Model families: one file each, data and wiring.

A family is a module with these names:
    ARCHITECTURES: `general.architecture` of its GGUF files; MODEL_TYPES: `model_type` of its Hugging Face folders.
    from_gguf(meta, source, vocab), from_config(config, vocab): its topology as a ModelSpec.
    names(spec): canonical tensor name -> name in a Hugging Face folder.
    nextn(config), where it is not `nextn.Layout()`: how folders lay out their layers for multi-token prediction.
"""

from __future__ import annotations

from types import ModuleType

from power_lab.engine.models import gemma2, gemma3, llama, mimo, mistral, olmo3, phi3, qwen2, qwen3, smollm3
from power_lab.errors import ModelFileError

FAMILIES: tuple[ModuleType, ...] = (llama, mistral, qwen2, mimo, qwen3, gemma2, gemma3, phi3, smollm3, olmo3)

ARCHITECTURES: dict[str, ModuleType] = {name: module for module in FAMILIES for name in module.ARCHITECTURES}
MODEL_TYPES: dict[str, ModuleType] = {name: module for module in FAMILIES for name in module.MODEL_TYPES}


def of_architecture(name: str) -> ModuleType:
    """The family of a GGUF file's stated architecture. Raises ModelFileError naming it."""
    return _known("general.architecture", name, ARCHITECTURES)


def of_model_type(name: str) -> ModuleType:
    """The family of a config.json's stated model type. Raises ModelFileError naming it."""
    return _known("model_type", name, MODEL_TYPES)


def _known(key: str, name: str, families: dict[str, ModuleType]) -> ModuleType:
    if name not in families:
        raise ModelFileError(f"{key}: {name!r} is not supported.", f"Supported: {', '.join(sorted(families))}.")
    return families[name]

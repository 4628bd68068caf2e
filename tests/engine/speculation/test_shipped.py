"""The drafters that come with the package, each with the model that it was trained for: they bind, and the text stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.intake import encode
from power_lab.engine.loader import load
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.neural import shipped

FOLDER = Path(shipped.__file__).parents[4] / "drafters"
FILES = sorted(FOLDER.glob("*/*.safetensors"))
ROOM = 24_000_000


def test_all_fit_the_package() -> None:
    assert len(FILES) == 3
    assert sum(file.stat().st_size for file in FILES) <= ROOM


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_each_drafts_for_its_model(name: str, smollm2_path: Path) -> None:
    config = EngineConfig(model="smollm2", device="cpu", threads=2, draft=name, max_batch=2, kv_tokens=2048)
    loaded = load(config, Paths.default(), lambda *_: None)
    assert loaded.trained is not None and FOLDER / loaded.facts.sha256[:12] == FILES[0].parent
    engine = Engine(config, loaded=loaded, threaded=False)
    try:
        prompt = encode(loaded.tokenizer, "List five facts about rivers, one a line.")
        plain = engine.submit(prompt, SamplingParams(max_tokens=24, seed=0)).result()
        for served in engine._companion.serves:  # type: ignore[union-attr]
            made = SamplingParams(max_tokens=24, seed=0, speculate=served, width=7, controller="fixed")  # type: ignore[arg-type]
            record = engine.submit(prompt, made).result()
            assert record.tokens == plain.tokens
            assert sum(entry.accepted for entry in record.rounds) >= 4, f"{served} is nearly always wrong"
    finally:
        engine.close()

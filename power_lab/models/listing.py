"""The list of models on this machine, each under the name that `lab.load` takes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import msgspec

from power_lab.engine.config import Paths
from power_lab.hashes import Hashes
from power_lab.models.catalogue import CATALOGUE, Packaged
from power_lab.models.entry import Listing, ModelEntry
from power_lab.models.facts import Facts, FactsCache
from power_lab.models.files import real_path
from power_lab.models.fit import fit_of, free_memory
from power_lab.models.places import Found, find


def list_models(paths: Paths, extra: tuple[Path, ...] = (), catalogue: dict[str, Packaged] = CATALOGUE) -> Listing:
    """The catalogue, present or not, then every other model in our store, in other programs' caches and in `extra` folders.

    Reads headers only, and each once. A model that cannot be loaded is listed with the reason; one that goes away meanwhile is not.
    """
    found, notes = find(paths, extra)
    cache, hashes, free = FactsCache(paths.models), Hashes(paths.models), free_memory()
    try:
        listed = [_catalogued(model, paths, found, cache, free) for model in catalogue.values()]
        for name, model in named(found, paths, catalogue):
            with suppress(FileNotFoundError):  # removed while we looked
                listed.append(_entry(name, model, cache, hashes, free))
    finally:
        cache.save()  # also what an interrupted call has learnt
    return Listing(tuple(listed), tuple(notes))


def named(found: Iterable[Found], paths: Paths, catalogue: dict[str, Packaged]) -> list[tuple[str, Found]]:
    """Every model that is not the catalogue's, under the first of its names that no earlier one has."""
    known = {paths.models / model.file for model in catalogue.values()}
    used = set(catalogue)
    result: list[tuple[str, Found]] = []
    for model in found:
        if model.files.path not in known:
            *_, last = names = [_text(name) for name in model.names]
            name = next(name for name in chain(names, (f"{last}#{n}" for n in count(2))) if name not in used)
            used.add(name)
            result.append((name, model))
    return result


def _text(name: str) -> str:
    """The name as text that any program can take; of one that is not UTF-8 the nearest."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _catalogued(model: Packaged, paths: Paths, found: list[Found], cache: FactsCache, free: int) -> ModelEntry:
    entry = catalogue_entry(model, paths)
    here = next((one for one in found if one.files.path == entry.path), None)
    if here is None:
        return entry
    try:
        facts, size = _facts(here, cache)
    except FileNotFoundError:
        return catalogue_entry(model, paths)
    if size != model.size and not facts.problem:
        facts = Facts(problem=f"damaged: it has {size} bytes, not {model.size}")
    return _with_facts(entry, facts, free)


def catalogue_entry(model: Packaged, paths: Paths) -> ModelEntry:
    """A catalogue model, looked at from outside only."""
    path = paths.models / model.file
    here = path.is_file()
    return ModelEntry(
        name=model.name,
        path=path,
        present=here,
        source=model.source,
        size=model.size,
        sha256=model.sha256,
        license=model.license,
        status="" if here else "not here",
        format="gguf",
    )


def _facts(model: Found, cache: FactsCache) -> tuple[Facts, int]:
    """What is known of a model and its size. Raises FileNotFoundError when it has gone."""
    try:
        size = model.files.size()
        return (Facts(problem=model.files.problem) if model.files.problem else cache.of(model.files)), size
    except FileNotFoundError:
        raise
    except OSError as error:
        return Facts(problem=f"damaged: cannot be read: {error.strerror}"), 0


def _entry(name: str, model: Found, cache: FactsCache, hashes: Hashes, free: int) -> ModelEntry:
    files = model.files
    facts, size = _facts(model, cache)
    entry = ModelEntry(
        name=name,
        path=files.path,
        present=True,
        source=_text(model.source),
        size=size,
        sha256=hashes.recall(real_path(files.path)) if files.lone and size and not files.problem else "",
        license=facts.license,
        format=files.format,
    )
    return _with_facts(entry, facts, free)


def _with_facts(entry: ModelEntry, facts: Facts, free: int) -> ModelEntry:
    if not entry.present:
        return entry
    return msgspec.structs.replace(
        entry,
        status=facts.problem or "ready",
        architecture=facts.architecture,
        parameters=facts.parameters,
        draft_layers=facts.draft_layers,
        draft_parameters=facts.draft_parameters,
        quantisation=facts.quantisation,
        bytes_by_type=facts.bytes_by_type,
        context=facts.context,
        fit=fit_of(facts, free),
    )

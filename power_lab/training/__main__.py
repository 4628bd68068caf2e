"""`python -m power_lab.training collect | train | export | bind | profile | passages`: see docs/training.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from power_lab.engine import intake
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.loader import load
from power_lab.engine.models.describe import describe
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.errors import ConfigError, PowerLabError
from power_lab.models import ModelEntry, ensure
from power_lab.training import passages, profile, prompts
from power_lab.training.collect import collect
from power_lab.training.corpus import Corpus
from power_lab.training.publish import publish
from power_lab.training.rebind import rebind
from power_lab.training.recipe import Recipe
from power_lab.training.target import Target
from power_lab.training.train import RECIPE, Trainer, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        options.command(options)
    except PowerLabError as error:
        print(f"power_lab.training: {error.message} {error.remedy}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m power_lab.training", description=__doc__)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("collect", help="let the model answer prompts and keep what it says")
    made.set_defaults(command=_collect)
    made.add_argument(
        "--seconds", type=float, default=0, help="after which what was said is kept and the rest left; 0: no limit"
    )
    made.add_argument("--prompts", type=int, default=prompts.COUNT)
    made.add_argument("--tokens", type=int, default=256, help="most of an answer")
    made.add_argument("--longest", type=int, default=448, help="tokens of a prompt; longer ones are left out")
    made.add_argument("--batch", type=int, default=256, help="requests at once")
    made.add_argument("--seed", type=int, default=0)
    trained = commands.add_parser("train", help="train drafters on collected text")
    trained.set_defaults(command=_train)
    trained.add_argument(
        "--seconds", type=float, default=0, help="of training, the measurements along the way included"
    )
    trained.add_argument("--steps", type=int, default=0, help="of training; whichever of the two ends first")
    trained.add_argument("--every", type=float, default=60, help="seconds between two measurements on held-out texts")
    exported = commands.add_parser("export", help="write the artifacts of a training")
    exported.set_defaults(command=_export)
    exported.add_argument("--run", type=Path, required=True, help="folder of the training")
    exported.add_argument("--commit", default="", help="what was run, where there is no repository")
    bound = commands.add_parser("bind", help="bind a drafter to another file of the model that it was trained for")
    bound.set_defaults(command=_bind)
    bound.add_argument("--draft", type=Path, required=True, help="the drafter's file")
    bound.add_argument("--model", required=True, help="as in lab.load")
    bound.add_argument("--out", type=Path, required=True)
    measured = commands.add_parser("profile", help="say where a training step's time goes")
    measured.set_defaults(command=_profile)
    measured.add_argument("--steps", type=int, default=20)
    for command in (made, trained, exported, measured):
        command.add_argument("--model", default="smollm2", help="as in lab.load")
        command.add_argument(
            "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
        )
    for command in (made, trained, exported):
        command.add_argument("--out", type=Path, required=True)
    for command in (trained, exported, measured):
        command.add_argument("--corpus", type=Path, required=True)
    for command in (trained, measured):
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")
    cut = commands.add_parser("passages", help="cut the passages of the prompts anew out of installed packages")
    cut.set_defaults(command=lambda _: print(passages.rebuild()))
    return parser


def _collect(options: argparse.Namespace) -> None:
    config = EngineConfig(
        model=options.model,
        device=options.device,
        context=options.longest + options.tokens,
        max_batch=options.batch,
        step_tokens=max(512, 4 * options.batch),
        queue_limit=4 * options.batch,
        prefix_cache=False,
        draft="",
        kv_tokens=0 if options.device == "cuda" else 64 * 1024,
    )
    loaded = load(config, Paths.default(), lambda *_: None)
    texts = [intake.encode(loaded.tokenizer, text) for _, text in prompts.prompts(options.seed, options.prompts)]
    texts = [text for text in texts if len(text) <= options.longest]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    engine = Engine(config, loaded=loaded)
    try:
        collect(
            engine,
            texts,
            options.out,
            seed=options.seed,
            tokens=options.tokens,
            seconds=options.seconds,
            waiting=2 * options.batch,
        )
    finally:
        engine.close()


def _train(options: argparse.Namespace) -> None:
    if not options.steps and not options.seconds:
        raise ConfigError("seconds", "neither steps nor seconds are given", "Use --seconds or --steps.")
    corpus, entry = _said(options)
    target = Target.open(entry.path, options.device)
    recipe = _recipe(options.set, options.seed).fitted(target.spec)
    run(Trainer(target, corpus, recipe), options.out, steps=options.steps, seconds=options.seconds, every=options.every)


def _export(options: argparse.Namespace) -> None:
    corpus, entry = _said(options)
    target = Target.open(entry.path, options.device)
    trainer = Trainer(target, corpus, Recipe.load(options.run / RECIPE))
    publish(trainer, options.run, options.out, entry.sha256, commit=options.commit)


def _bind(options: argparse.Namespace) -> None:
    entry = ensure(options.model, Paths.default(), lambda *_: None)
    with open_checkpoint(entry.path) as checkpoint:
        rebind(options.draft, options.out, describe(checkpoint).spec, entry.sha256)


def _profile(options: argparse.Namespace) -> None:
    corpus, entry = _said(options)
    target = Target.open(entry.path, options.device)
    print(
        profile.report(Trainer(target, corpus, _recipe(options.set, options.seed).fitted(target.spec)), options.steps)
    )


def _said(options: argparse.Namespace) -> tuple[Corpus, ModelEntry]:
    """The corpus, and the model that said it. Raises ConfigError where another one did."""
    corpus, entry = Corpus.load(options.corpus), ensure(options.model, Paths.default(), lambda *_: None)
    if corpus.facts.get("sha256") != entry.sha256:
        said = str(corpus.facts.get("sha256"))[:12]
        raise ConfigError(
            "corpus", f"{options.corpus} was said by the model {said}, not by {entry.sha256[:12]} (sha256)"
        )
    return corpus, entry


def _recipe(settings: list[str], seed: int) -> Recipe:
    """Defaults and KEY=VALUE texts. Raises ConfigError naming the key."""
    values: dict[str, Any] = {"seed": seed}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in Recipe.__struct_fields__:
            raise ConfigError(key, "unknown key of a recipe", f"Known keys: {', '.join(Recipe.__struct_fields__)}.")
        values[key] = text.split(",") if key in ("kinds", "taps", "copied") else text
    try:
        return msgspec.convert(values, Recipe, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError("recipe", str(error)) from None


if __name__ == "__main__":
    sys.exit(main())

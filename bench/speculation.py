"""Speculation proved and measured: exactness of every drafter, its speed, and what an ideal one would bring to a large model.

    python bench/speculation.py campaign --device cuda [--cells 0 1 2] --output FILE
    python bench/speculation.py speed    --device cuda --drafters ... [--widths 1 3 7 15] [--temperature 0 0.8] --output FILE
    python bench/speculation.py curve    --device cuda --geometry qwen3-8b --draft-geometry qwen3-0.6b --output FILE

- campaign: an all-pairs array of drafter, width or controller, temperature, batch and cache; whole outputs equal those of each request
  alone without speculation. Exit status 0 only if all are.
- speed: plain decoding against every drafter with the default controller and with fixed widths, prompt by prompt in turn, at each of the
  temperatures, with intervals of the paired ratio; beside the default controller the width that was best for each kind of prompt, known
  afterwards.
- curve: speed-up against acceptance and width, by a drafter that knows what will be said and errs as often as it is told to.

A drafter is NAME or NAME=DRAFT, where DRAFT is what `lab.load(draft=...)` is given for it; `draft-model=made` and `eagle=made` are built
for the run (`bench/speculation_drafts.py`). A campaign has every drafter unless told otherwise. Logs are written after every cell.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import speculation_campaign, speculation_curve, speculation_speed  # noqa: E402
from power_lab.engine.config import usable_cores  # noqa: E402


def main() -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    common.add_argument("--threads", type=int, default=min(2, usable_cores()))
    common.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    common.add_argument("--commit", help="what is run, where there is no repository")
    common.add_argument("--output", type=Path, help="the log, written after every cell")
    real = argparse.ArgumentParser(add_help=False)
    real.add_argument("--model", default="smollm2")
    real.add_argument("--prompts", type=int, default=100)
    real.add_argument("--drafters", nargs="+", default=["lookup", "ngram"], metavar="NAME[=DRAFT]")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    speculation_campaign.arguments(parts.add_parser("campaign", parents=[common, real]))
    speculation_speed.arguments(parts.add_parser("speed", parents=[common, real]))
    speculation_curve.arguments(parts.add_parser("curve", parents=[common]))
    args = parser.parse_args()
    run = {"campaign": speculation_campaign.run, "speed": speculation_speed.run, "curve": speculation_curve.run}
    sys.exit(run[args.part](args))


if __name__ == "__main__":
    main()

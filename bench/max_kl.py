#!/usr/bin/env python3
"""How well `max_kl` holds: share of requests whose true KL is within the bound, mean charge, an oracle beside it.

Every prompt is blended at each step of the ladder and compared with its full prefill, once; what a request with any
bound would have done is told from that (docs/algorithm.md, "A bound on a request's KL"). The bounds are the median and
the 90th percentile of the default setting's KL on the same prompts, or those given. The estimate is what a server would
measure at first use. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kvblend.cli.evaluate import PASSAGES_MAX, read_questions
from kvblend.cli.models import resolve_model
from kvblend.engine.assembly import Engine, assemble_engine
from kvblend.engine.bound import KLModel
from kvblend.engine.conditioning import PASSAGES, warm_ids
from kvblend.engine.evaluation.bound_fit import fit_level
from kvblend.engine.evaluation.bound_policy import follow, follow_oracle, summarise_bound
from kvblend.engine.evaluation.calibration import Calibration, Sample, calibration_questions
from kvblend.engine.evaluation.questions import Question, pick_passages
from kvblend.engine.kl_models import SHAPE
from kvblend.engine.recommended import Conditioning, recommended
from kvblend.engine.selectors.spec import SelectorSpec

DEFAULT_SPEC = SelectorSpec()
RATIO = 0.15


def measure(
    engine: Engine,
    questions: Sequence[Question],
    passages: Sequence[tuple[str, str]],
    spec: SelectorSpec,
    conditioning: Conditioning,
    steps: Sequence[float] | None = None,
    *,
    keeps: bool = False,
) -> list[Sample]:
    """Samples of all questions, chunks behind `passages` where `conditioning` is "warm"."""
    warms = conditioning == "warm"
    warm = warm_ids(engine.tokenizer, engine.config.context_length, passages) if warms else ()
    tokenizer, template, step = engine.tokenizer, engine.template, engine.runner.step
    run = Calibration(step, tokenizer, template, questions, warm, spec, conditioning, keeps=keeps)
    pieces = run.samples() if steps is None else run.samples(steps)
    found = []
    for piece in pieces:
        if piece is not None:
            found.append(piece)
            print(f"\r{len(found)} samples", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def report(samples: Sequence[Sample], model: KLModel, bounds: Sequence[float]) -> list[dict[str, Any]]:
    """One row per bound: how many requests held it at what charge, and an oracle's charge."""
    prompts = sorted({sample.prompt for sample in samples})
    requests = [[sample for sample in samples if sample.prompt == prompt] for prompt in prompts]
    rows = []
    for bound in bounds:
        held = summarise_bound([follow(request, model, bound) for request in requests], bound)
        oracle = summarise_bound([follow_oracle(request, bound) for request in requests], bound)
        rows.append({"max_kl": bound, **asdict(held), "oracle_charged": oracle.charged})
    return rows


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="probes", help="a data file of kvblend eval, or probes")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-kl", type=float, action="append", help="a bound; repeatable")
    parser.add_argument("--default-setting", action="store_true", help="bound the default setting, not the recommended")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, and print a row per bound."""
    given = read_arguments()
    name, path = resolve_model(given.model)
    engine = assemble_engine(path, "float32", "cpu", "auto", 0, given.threads)
    questions, others = read_questions(given.data, given.limit, 0)
    passages = pick_passages(questions, others, PASSAGES_MAX)
    conditioning: Conditioning = "system" if given.default_setting else "warm"
    spec = DEFAULT_SPEC if given.default_setting else recommended(RATIO).spec
    with torch.inference_mode():
        model = fit_level(SHAPE, measure(engine, calibration_questions(), PASSAGES, spec, conditioning, keeps=True))
        samples = measure(engine, questions, passages, spec, conditioning)
        bounds = given.max_kl
        if not bounds:
            default = measure(engine, questions, (), DEFAULT_SPEC, "system", (RATIO,))
            bounds = [float(np.percentile([sample.kl for sample in default], q)) for q in (50.0, 90.0)]
    rows = report(samples, model, bounds)
    if given.json:
        print(json.dumps({"model": name, "data": given.data, "estimate": model.to_fields(), "rows": rows}, indent=1))
        return
    for row in rows:
        print(
            f"max_kl {row['max_kl']:.3f}: held by {row['held']:.1%} of {row['requests']}, charged {row['charged']:.3f} "
            f"(oracle {row['oracle_charged']:.3f}), raised {row['raised']:.0%}, full {row['full']:.0%}"
        )


if __name__ == "__main__":
    main()

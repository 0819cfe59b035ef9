"""`kvblend eval`: how near blended answers come to those of a full prefill, method by method."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvblend import __version__
from kvblend.cli.failures import BadInput

if TYPE_CHECKING:
    from kvblend.engine.evaluation.methods import Run
    from kvblend.engine.evaluation.opening import OpenedModel
    from kvblend.engine.evaluation.questions import Question
    from kvblend.engine.evaluation.results import QuestionResult

PROBES = "probes"
PROBES_LIMIT = 200
PASSAGES_MAX = 24
TABLE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class EvalOrder:
    """What was asked for on the command line. `data` is a file or the word "probes"; `limit` None takes all."""

    model: str
    data: str
    out: Path
    limit: int | None = None
    methods: tuple[str, ...] = ()
    ratios: tuple[str, ...] = ()
    plot: Path | None = None
    raw: Path | None = None
    dtype: str = "float32"
    store_dtype: str = ""
    device: str = "cpu"
    threads: int = 0
    seed: int = 0
    restart: bool = False
    keep: Path | None = None


def run_evaluation(order: EvalOrder) -> None:
    """Check everything, then load the model, run what is not done yet, and write the files that were asked for."""
    check_libraries(order.plot is not None)
    from kvblend.engine.evaluation.methods import plan_runs, split_methods
    from kvblend.engine.evaluation.questions import pick_passages

    runs = plan_runs(split_methods(order.methods), parse_ratios(order.ratios))
    questions, others = read_questions(order.data, order.limit, order.seed)
    _check_places(order)
    if order.store_dtype == "float32" and order.dtype != "float32":
        raise BadInput(f"--store-dtype is float32; that is no narrower than {order.dtype}, the --dtype")
    from kvblend.cli.models import resolve_model

    name, path = resolve_model(order.model)
    console = Console(stderr=True)
    results, facts = _examine(order, path, questions, pick_passages(questions, others, PASSAGES_MAX), runs, console)
    from kvblend.cli.partial import write_whole
    from kvblend.engine.evaluation.summary import summarise

    rows = summarise(results, runs, order.seed)
    report = {"model": name, "data": order.data, "n": len(results), "rows": rows, "config": facts}
    if order.raw is not None:
        write_whole(order.raw, "".join(json.dumps(line) + "\n" for line in raw_lines(results)))
    if order.plot is not None:
        from kvblend.cli.plots import draw_quality

        draw_quality(rows, order.plot, f"{name} on {Path(order.data).name}, {len(results)} questions")
    write_whole(order.out, json.dumps(report, indent=1) + "\n")
    shown = Console()
    Console(width=max(shown.width, TABLE_WIDTH)).print(table_of(report))


def check_libraries(plotting: bool) -> None:
    """BadInput where a library of the evaluation is not installed."""
    for library in ("torch", "rouge_score", *(("matplotlib",) if plotting else ())):
        if importlib.util.find_spec(library) is None:
            raise BadInput(f"{library} is not installed; kvblend eval needs: pip install 'kvblend[server,eval]'")


def parse_ratios(texts: Sequence[str]) -> list[float]:
    """Ratios out of comma-separated lists. BadInput for what is no number; the limits are checked with the methods."""
    pieces = [piece.strip() for text in texts for piece in text.split(",")]
    try:
        return [float(piece) for piece in pieces]
    except ValueError:
        bad = next(piece for piece in pieces if not _is_number(piece))
        raise BadInput(f"ratios: {bad!r} is not a number; give numbers in 0..1, joined by commas") from None


def read_questions(data: str, limit: int | None, seed: int) -> tuple[list[Question], list[Question]]:
    """The questions to ask, of a data file or generated probes, and others of the same kind.

    BadInput or BadData says what is wrong, and where.
    """
    if limit is not None and limit < 1:
        raise BadInput(f"limit is {limit}; at least 1 question is needed")
    from kvblend.engine.evaluation.questions import parse_questions

    if data == PROBES:
        from kvblend.engine.evaluation.probes import make_probes

        return list(make_probes(seed, limit or PROBES_LIMIT)), list(make_probes(seed + 1, PASSAGES_MAX))
    path = Path(data)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"cannot read {data}: {error.strerror or error}; give a JSON file or the word {PROBES}"
        ) from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{data} is not valid UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{data} is not JSON: {error}") from None
    found = parse_questions(content)
    return found[:limit], found[len(found) if limit is None else limit :]


def raw_lines(results: Sequence[QuestionResult]) -> list[dict[str, Any]]:
    """One flat object per question and run, lists per position included."""
    return [{"question": found["index"], **run} for found in (r.to_data() for r in results) for run in found["runs"]]


def table_of(report: dict[str, Any]) -> Table:
    """The rows as a table for people."""
    table = Table(title=f"{report['model']} on {Path(report['data']).name}, {report['n']} questions")
    names = ("method", "ratio", "charged", "KL", "recovery", "95 %", "KL cont.", "NLL +", "top-1", "F1", "TTFT ms")
    for name in names:
        table.add_column(name, justify="left" if name == "method" else "right")
    narrow = any(row.get("kl_store_mean") is not None for row in report["rows"])
    if narrow:
        table.add_column("KL stored", justify="right")
    for row in report["rows"]:
        low, high = row["ci"]["kl_recovery"]
        table.add_row(
            row["method"],
            "" if row["ratio"] is None else f"{row['ratio']:g}",
            *(f"{row[key]:.3f}" for key in ("charged_ratio", "kl_mean", "kl_recovery")),
            f"{low:.2f}..{high:.2f}",
            *(f"{row[key]:.3f}" for key in ("kl_cont_mean", "nll_delta", "top1", "f1")),
            f"{row['ttft_ms_median']:.0f}",
            *([_or_blank(row.get("kl_store_mean"))] if narrow else []),
        )
    return table


def _or_blank(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def eval_progress(console: Console) -> Progress:
    """A bar counting questions."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


def _examine(
    order: EvalOrder,
    path: Path,
    questions: Sequence[Question],
    passages: Sequence[tuple[str, str]],
    runs: Sequence[Run],
    console: Console,
) -> tuple[list[QuestionResult], dict[str, Any]]:
    """Results of all questions, and what they were computed with; the partial file is gone at the end."""
    from kvblend.cli.kept_forms import FolderForms
    from kvblend.cli.partial import PartialResults, settings_digest
    from kvblend.engine.evaluation.opening import open_model

    stored = order.store_dtype or order.dtype
    kept = None
    if order.keep is not None:
        order.keep.mkdir(parents=True, exist_ok=True)
        kept = partial(FolderForms, order.keep, order.dtype, order.device, __version__)
    opened = open_model(path, order.dtype, order.device, order.threads, runs, time.perf_counter, passages, stored, kept)
    prepared = opened.examiner.prepare(questions, runs)
    settings = settings_digest(
        runs,
        fingerprint=opened.fingerprint,
        dtype=order.dtype,
        store_dtype=stored,
        device=order.device,
        version=__version__,
        passages=list(passages),
    )
    partials = PartialResults(order.out, settings)
    found = partials.load(questions, restart=order.restart)
    if found:
        console.print(f"going on behind {len(found)} of {len(questions)} questions in {partials.path}")
    with eval_progress(console) as progress:
        task = progress.add_task("questions", total=len(questions), completed=len(found))
        try:
            for index, question in enumerate(questions):
                if index not in found:
                    found[index] = opened.examiner.examine(prepared[index], index, runs)
                    partials.append(question, found[index])
                    progress.advance(task)
        except KeyboardInterrupt:
            console.print(f"{len(found)} of {len(questions)} questions are done; the same command goes on from there")
            raise
    partials.remove()
    return [found[index] for index in range(len(questions))], _facts(order, opened)


def _facts(order: EvalOrder, opened: OpenedModel) -> dict[str, Any]:
    """What the figures depend on besides model, data and methods."""
    from kvblend.engine.evaluation.examiner import CONTINUATION_TOKENS
    from kvblend.engine.evaluation.prompting import DOCUMENT_TOKENS_MAX, GOLD_TOKENS_MAX, SYSTEM

    return {
        "version": __version__,
        "fingerprint": opened.fingerprint,
        "dtype": order.dtype,
        "store_dtype": order.store_dtype or order.dtype,
        "device": order.device,
        "attention": opened.attention,
        "threads": opened.threads,
        "torch": opened.torch_version,
        "seed": order.seed,
        "system": SYSTEM,
        "document_tokens_max": DOCUMENT_TOKENS_MAX,
        "gold_tokens_max": GOLD_TOKENS_MAX,
        "continuation_tokens": CONTINUATION_TOKENS,
    }


def _check_places(order: EvalOrder) -> None:
    """BadInput where a file cannot be written later: found now, not after twenty minutes."""
    for flag, path in (("--json", order.out), ("--plot", order.plot), ("--raw", order.raw)):
        if path is None:
            continue
        if path.is_dir():
            raise BadInput(f"{flag} is {path}, a folder; give a file")
        if not path.parent.is_dir():
            raise BadInput(f"{flag} is {path}; the folder {path.parent} does not exist")
    if order.keep is not None and order.keep.exists() and not order.keep.is_dir():
        raise BadInput(f"--keep is {order.keep}, a file; give a folder")
    if order.plot is not None and order.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--plot is {order.plot}; it must end in .png, .svg or .pdf")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

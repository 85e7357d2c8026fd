"""Text and JSON reports of an evaluation."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tnetcli.errors import UsageError
from tnetcli.evaluation.evaluate import Choice, Evaluation, Row
from tnetcli.evaluation.metrics import Interval
from tnetcli.files import check_output, write_file
from tnetcli.text import printable, table

log = logging.getLogger(__name__)
SCHEMA = "tnet.evaluation/1"
MOST_TABLED = 12  # classes in a table of confusion
LONGEST_NAME = 32
BILLION = 10**9


def check_outputs(output: Path | None, confusion: Path | None, *, overwrite: bool) -> None:
    """Refuse, before the work begins, files that could not be written after it."""
    if confusion is not None and confusion.suffix.lower() != ".png":
        raise UsageError(f"--confusion is not a PNG file: `{confusion}`", hint="give FILE.png")
    for path in (output, confusion):
        if path is not None:
            check_output(path, overwrite=overwrite)


def write_json(evaluation: Evaluation, path: Path) -> None:
    """Write everything, in place of what is there."""
    write_file(path, f"{as_json(evaluation)}\n".encode())


def draw_picture(evaluation: Evaluation, path: Path) -> None:
    """Draw which classes are taken for which, in place of what is there."""
    from tnetcli.training.plots import draw_confusion

    if evaluation.confusion is None:
        log.warning("no picture of %d classes: that is too many", len(evaluation.classes))
    else:
        draw_confusion(evaluation.confusion, evaluation.classes, path)


def as_json(evaluation: Evaluation) -> str:
    """Return one line of JSON."""
    matrix = evaluation.confusion
    record = {
        "schema": SCHEMA,
        "model": evaluation.model,
        "model_sha256": evaluation.model_sha256,
        "data": evaluation.data,
        "split": evaluation.split,
        "classes": list(evaluation.classes),
        "traversal": evaluation.config.model_dump(mode="json"),
        "seed": evaluation.seed,
        "images": evaluation.images,
        "images_with_boxes": evaluation.images_with_boxes,
        "failed": [asdict(failure) for failure in evaluation.failures],
        "scores": {**asdict(evaluation.scores), "macro_f1": asdict(evaluation.macro_f1)},
        "rows": [asdict(row) for row in evaluation.rows],
        "hit_rates": [
            {"choice": choice, "level": level, **asdict(rate)}
            for choice, rates in evaluation.hit_rates.items()
            for level, rate in rates.items()
        ],
        "attention": None if evaluation.attention is None else asdict(evaluation.attention),
        "confusion": None if matrix is None else matrix.tolist(),
        "per_class": _per_class(evaluation),
        "cost": asdict(evaluation.cost),
        "seconds": evaluation.seconds,
    }
    # Names of files that are not UTF-8 can be written down as escapes only.
    return json.dumps(record, ensure_ascii=True, allow_nan=False)


def _per_class(evaluation: Evaluation) -> list[dict[str, Any]] | None:
    """Return precision, recall and F1 by class; None where they are of nothing."""
    if evaluation.confusion is None:
        return None
    right = evaluation.confusion.diagonal().tolist()
    true = evaluation.confusion.sum(axis=1).tolist()
    told = evaluation.confusion.sum(axis=0).tolist()
    return [
        {
            "class": name,
            "images": images,
            "precision": hits / predicted if predicted else None,
            "recall": hits / images if images else None,
            "f1": 2 * hits / (images + predicted) if images + predicted else None,
        }
        for name, hits, images, predicted in zip(evaluation.classes, right, true, told, strict=True)
    ]


def as_text(evaluation: Evaluation) -> str:
    """Return what a person wants to know first."""
    return "\n\n".join(
        [
            _headline(evaluation),
            _scores(evaluation),
            _rows(evaluation),
            *_hit_rates(evaluation),
            *_attention(evaluation),
            *_confusion(evaluation),
            _cost(evaluation),
        ]
    )


def _headline(evaluation: Evaluation) -> str:
    config, failed = evaluation.config, len(evaluation.failures)
    keep = ",".join(map(str, config.keep))
    walk = f"{config.levels} levels, keep {keep}" if config.levels > 1 else "the whole image only"
    left_out = f", {failed} failed and left out" if failed else ""
    return (
        f"{printable(evaluation.model, 200)}\n"
        f"  on {printable(evaluation.data, 200)}, {evaluation.split}: {evaluation.images} images"
        f"{left_out}\n"
        f"  {walk}; {len(evaluation.classes)} classes"
    )


def _scores(evaluation: Evaluation) -> str:
    scores = evaluation.scores
    return table(
        "Scores of the whole walk",
        ("score", "value", "95 % interval"),
        [
            ("accuracy", *_percent(scores.accuracy)),
            (f"top-{scores.k} accuracy", *_percent(scores.top_k)),
            ("macro F1", *_percent(evaluation.macro_f1)),
            ("calibration error", f"{100 * scores.calibration_error:.1f} %", ""),
            ("Brier score", f"{scores.brier:.3f}", ""),
            ("log loss", f"{scores.log_loss:.3f}", ""),
        ],
    )


def _percent(interval: Interval) -> tuple[str, str]:
    return (
        f"{100 * interval.value:.1f} %",
        f"{100 * interval.low:.1f} - {100 * interval.high:.1f} %",
    )


def _rows(evaluation: Evaluation) -> str:
    found = {(row.choice, row.context, row.windows): row for row in evaluation.rows}
    choices: list[Choice] = list(dict.fromkeys(row.choice for row in evaluation.rows))
    without = any(not row.context for row in evaluation.rows)
    columns: list[tuple[str, Choice, bool]] = [("attention", "attention", True)]
    columns += [("without whole image", "attention", False)] if without else []
    columns += [(choice, choice, True) for choice in choices[1:]]
    counts = sorted({row.windows for row in evaluation.rows})
    return table(
        "Accuracy in % by number of windows beside the whole image, and its 95 % interval",
        ("windows", *(title for title, _, _ in columns), "multiplications"),
        [
            (
                str(count),
                *(_short(found.get((choice, context, count))) for _, choice, context in columns),
                f"{found['attention', True, count].multiplications / BILLION:.4f} billion",
            )
            for count in counts
        ],
    )


def _short(row: Row | None) -> str:
    return "" if row is None else _rate(row.scores.accuracy)


def _rate(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} ({100 * interval.low:.0f}-{100 * interval.high:.0f})"


def _hit_rates(evaluation: Evaluation) -> list[str]:
    if not evaluation.images_with_boxes:
        return []
    choices = [choice for choice, rates in evaluation.hit_rates.items() if rates]
    levels = sorted({level for rates in evaluation.hit_rates.values() for level in rates})
    if not levels:
        return []
    return [
        table(
            f"Images in % with a window on the truth, of {evaluation.images_with_boxes} with boxes",
            ("level", *choices),
            [
                (
                    str(level),
                    *(
                        _rate(evaluation.hit_rates[choice][level])
                        if level in evaluation.hit_rates[choice]
                        else ""
                        for choice in choices
                    ),
                )
                for level in levels
            ],
        )
    ]


def _attention(evaluation: Evaluation) -> list[str]:
    found = evaluation.attention
    if found is None:
        return []
    rows = [
        ("as it looked", *_percent(found.own), "", ""),
        ("closest windows hidden", *_percent(found.masked), *_percent(found.masked_changed)),
        ("random windows", *_percent(found.random), *_percent(found.random_changed)),
    ]
    header = ("windows", "probability", "95 % interval", "other answer", "95 % interval")
    title = f"Did it matter where: how probable the answer is, {found.images} images"
    return [table(title, header, rows)]


def _confusion(evaluation: Evaluation) -> list[str]:
    matrix, per_class = evaluation.confusion, _per_class(evaluation)
    count = len(evaluation.classes)
    if matrix is None or per_class is None or count > MOST_TABLED:
        return []
    return [
        table(
            "Images by true class (rows) and predicted class (columns)",
            ("class", *(str(number) for number in range(1, count + 1)), "recall", "F1"),
            [
                (
                    f"{number} {printable(told['class'], LONGEST_NAME)}",
                    *map(str, row.tolist()),
                    _share(told["recall"]),
                    _share(told["f1"]),
                )
                for number, (row, told) in enumerate(zip(matrix, per_class, strict=True), 1)
            ],
        )
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _cost(evaluation: Evaluation) -> str:
    cost = evaluation.cost
    return (
        f"An image takes {cost.windows:.1f} windows, {100 * cost.fraction_decoded:.3g} % of its "
        f"pixels decoded,\n{cost.multiplications / BILLION:.4f} billion multiplications, "
        f"{1000 * cost.read_seconds:.1f} ms of reading and {1000 * cost.model_seconds:.1f} ms in "
        "the model"
    )

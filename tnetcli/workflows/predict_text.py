"""What was predicted, in words: an image in a few lines, a batch in its totals."""

from collections import Counter
from dataclasses import dataclass, field

from tnetcli.prediction import Prediction
from tnetcli.wording import counted, printable

LONGEST = 300  # characters of a line
MOST_REASONS = 5
MOST_NAMED = 3  # images of a reason


def as_text(record: Prediction) -> str:
    """Return what was concluded, how it came about, and what it took."""
    if record.cost is None:
        reason = record.error.message if record.error else "failed"
        return printable(f"{record.id}: failed: {reason}", LONGEST)
    cost = record.cost
    answer = f"abstained: {record.reason}"
    if record.label is not None and record.probability is not None:
        answer = f"{record.label} ({record.probability:.1%})"
    lines = [
        f"{record.id}: {answer}",
        *(
            f"  level {level.level}: {level.label} ({level.probability:.1%}) by "
            f"{counted(level.windows, 'window')}"
            for level in record.levels
        ),
        f"  looked at {counted(cost.windows, 'window')}: {record.stopped_in_words()}",
        f"  decoded {_pixels(cost.pixels_decoded)} of {_pixels(cost.pixels_total)} pixels "
        f"({cost.fraction_decoded:.3%})",
        f"  took {cost.seconds:.2f} s: {cost.read_seconds:.2f} reading, "
        f"{cost.model_seconds:.2f} in the model",
        *([f"  attention: {record.attention_in_words()}"] if record.attention_check else []),
        *(f"  warning: {warning}" for warning in record.warnings),
    ]
    return "\n".join(printable(line, LONGEST) for line in lines)


@dataclass(slots=True)
class Batch:
    """Counts what becomes of many images."""

    images: int
    resumed: int = 0
    done: int = 0
    abstained: int = 0  # of those done
    windows: int = 0
    pixels_decoded: int = 0
    pixels_total: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    hints: Counter[str] = field(default_factory=Counter)
    first_problem: str = ""

    @property
    def failed(self) -> int:
        """Return how many failed."""
        return self.reasons.total()

    def add(self, record: Prediction) -> None:
        """Count one more."""
        if record.error is not None:
            # The same reason names another file each time.
            reason = record.error.message.replace(record.image, "…").replace("`…`", "…")
            self.reasons[reason] += 1
            self.types[record.error.type] += 1
            self.hints[record.error.hint] += 1
            self.first_problem = self.first_problem or record.error.message
            named = self.examples.setdefault(reason, [])
            if len(named) < MOST_NAMED:
                named.append(record.id)
        elif record.cost is not None:
            self.done += 1
            self.abstained += record.status == "abstained"
            self.windows += record.cost.windows
            self.pixels_decoded += record.cost.pixels_decoded
            self.pixels_total += record.cost.pixels_total

    def as_lines(self, seconds: float) -> list[str]:
        """Return the totals: done, gone on with, decoded, and failures by their reasons."""
        parts = [f"{self.done:,} of {counted(self.images, 'image')} done"]
        if self.abstained:
            parts.append(f"{self.abstained:,} of them abstained")
        if self.resumed:
            parts.append(f"{self.resumed:,} kept from before")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        left = self.images - self.done - self.resumed - self.failed
        if left:
            parts.append(f"{left:,} not begun")
        lines = [", ".join(parts)]
        if self.done:
            share = self.pixels_decoded / self.pixels_total
            lines.append(
                f"{counted(self.windows, 'window')}, {share:.3%} of the pixels decoded, "
                f"{60 * self.done / max(seconds, 1e-9):.3g} images a minute"
            )
        for reason, count in self.reasons.most_common(MOST_REASONS):
            names = ", ".join(self.examples[reason])
            more = ", …" if count > len(self.examples[reason]) else ""
            lines.append(f"failed {count}: {reason} ({names}{more})")
        if len(self.reasons) > MOST_REASONS:
            lines.append(f"and {counted(len(self.reasons) - MOST_REASONS, 'more reason')}")
        return [printable(line, LONGEST) for line in lines]


def _pixels(number: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)

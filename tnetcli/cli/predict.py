"""The `tnet predict` command."""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import (
    EXECUTION,
    INPUT,
    OUTPUT,
    TRAVERSAL,
    Bands,
    CropName,
    Device,
    Images,
    Keep,
    Levels,
    Manifest,
    NullSeparated,
    Overwrite,
    PrecisionName,
    Quiet,
    ReaderOption,
    ReaderOptions,
    ReadTimeout,
    Recursive,
    Seed,
    Shard,
    Verbose,
    check_null,
    parse_keep,
    read_options,
)
from tnetcli.cli.progress import show_log
from tnetcli.cli.signals import Stopped, exit_code, graceful_stop
from tnetcli.errors import SomeFailedError, UsageError, common_error_class, error_class
from tnetcli.prediction.record import Prediction
from tnetcli.readers.watch import READ_TIMEOUT, watching
from tnetcli.text import counted, printable

LONGEST = 300  # characters of a line
MAX_REASONS = 5
MAX_NAMED = 3  # images per reason
SAVED = "progress is saved; run the same command again to resume"
NOT_SAVED = "finished predictions were printed; with -o FILE.jsonl they are saved and resumed"


def as_text(record: Prediction) -> str:
    """Return the prediction, its levels and its cost in a few lines."""
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
            f"  level {level.level}: {level.label} ({level.probability:.1%}) from "
            f"{counted(level.windows, 'region')}"
            for level in record.levels
        ),
        f"  read {counted(cost.windows, 'region')}: {record.stopped_in_words()}",
        f"  decoded {_pixels(cost.pixels_decoded)} of {_pixels(cost.pixels_total)} pixels "
        f"({cost.fraction_decoded:.3%})",
        f"  took {cost.seconds:.2f} s: {cost.read_seconds:.2f} reading, "
        f"{cost.model_seconds:.2f} in the model",
        *(f"  warning: {warning}" for warning in record.warnings),
    ]
    return "\n".join(printable(line, LONGEST) for line in lines)


def _pixels(number: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


@dataclass(slots=True)
class Batch:
    """Counts of a batch: images, regions, pixels, and failures by reason."""

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
        """Count one record."""
        if record.error is not None:
            # The same reason names another file each time.
            reason = record.error.message.replace(record.image, "…").replace("`…`", "…")
            self.reasons[reason] += 1
            self.types[record.error.type] += 1
            self.hints[record.error.hint] += 1
            self.first_problem = self.first_problem or record.error.message
            self.examples.setdefault(reason, []).append(record.id)
        elif record.cost is not None:
            self.done += 1
            self.abstained += record.status == "abstained"
            self.windows += record.cost.windows
            self.pixels_decoded += record.cost.pixels_decoded
            self.pixels_total += record.cost.pixels_total

    def as_lines(self, seconds: float) -> list[str]:
        """Return the totals, and the failures by reason."""
        left = self.images - self.done - self.resumed - self.failed
        counts = {
            "abstained": self.abstained,
            "done before": self.resumed,
            "failed": self.failed,
            "not started": left,
        }
        parts = [f"{self.done:,} of {counted(self.images, 'image')} done"]
        parts += [f"{count:,} {what}" for what, count in counts.items() if count]
        lines = [", ".join(parts)]
        if self.done:
            fraction = self.pixels_decoded / self.pixels_total
            lines.append(
                f"{counted(self.windows, 'region')}, {fraction:.3%} of the pixels decoded, "
                f"{60 * self.done / max(seconds, 1e-9):.3g} images per minute"
            )
        for reason, count in self.reasons.most_common(MAX_REASONS):
            names = ", ".join(self.examples[reason][:MAX_NAMED])
            more = ", …" if count > MAX_NAMED else ""
            lines.append(f"failed {count}: {reason} ({names}{more})")
        if len(self.reasons) > MAX_REASONS:
            lines.append(f"and {counted(len(self.reasons) - MAX_REASONS, 'more reason')}")
        return [printable(line, LONGEST) for line in lines]

    def check(self) -> None:
        """Raise the error that describes the failures, if there are any."""
        if not self.failed:
            return
        several = f"{self.failed:,} of {counted(self.images, 'image')} failed"
        problem = self.first_problem if self.images == 1 else several
        hint = next(iter(self.hints)) if len(self.hints) == 1 else "see the warnings above"
        if self.done + self.resumed:
            raise SomeFailedError(problem, hint=hint)
        raise common_error_class(map(error_class, self.types))(problem, hint=hint)


def predict(
    context: typer.Context,
    images: Images = None,
    manifest: Manifest = None,
    recursive: Recursive = False,
    null: NullSeparated = False,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="TNET_MODEL",
            metavar="NAME|FILE",
            help="Bundled model or .safetensors file.",
            show_default="the bundled one",
            rich_help_panel=INPUT,
        ),
    ] = None,
    levels: Levels = None,
    keep: Keep = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How cells are chosen: top_k, sample, best_first or a plug-in.",
            show_default="as trained",
            rich_help_panel=TRAVERSAL,
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of regions read per image, the whole image included.",
            rich_help_panel=TRAVERSAL,
        ),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Stop as soon as a class is at least this probable.",
            rich_help_panel=TRAVERSAL,
        ),
    ] = None,
    regions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl|FILE.csv",
            help="Regions of level 2: predictions of another model, or a CSV with path, left, top, "
            "right, bottom.",
            show_default="the model's choice",
            rich_help_panel=TRAVERSAL,
        ),
    ] = None,
    seed: Seed = 0,
    reader: ReaderOption = None,
    bands: Bands = None,
    option: ReaderOptions = None,
    crop: Annotated[
        CropName,
        typer.Option(
            help="Read only the boxes of the manifest, exactly or with context around them.",
            rich_help_panel=INPUT,
        ),
    ] = CropName.none,
    read_timeout: ReadTimeout = READ_TIMEOUT,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.jsonl|-",
            help="Write JSON Lines to a file, which a later run resumes, or to standard output.",
            show_default="a readable summary",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    max_failures: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Stop once more images than this have failed; 0 stops at the first failure.",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
    shard: Shard = None,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            max=10_000,
            help="Number of images traversed together.",
            rich_help_panel=EXECUTION,
        ),
    ] = 8,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            help="Number of processes, which share the cores of the job.",
            rich_help_panel=EXECUTION,
        ),
    ] = 1,
    scheduler: Annotated[
        str | None,
        typer.Option(
            envvar="TNET_SCHEDULER",
            metavar="ADDRESS|FILE",
            help="Dask cluster to predict on: tcp://HOST:8786 or a scheduler file (extra `dask`).",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
    device: Device = "auto",
    precision: Annotated[
        PrecisionName,
        typer.Option(help="Precision of the computation.", rich_help_panel=EXECUTION),
    ] = PrecisionName.fp32,
) -> None:
    """Classify IMAGES with recursive hard attention.

    A failed image is recorded with its error; the batch continues. An existing FILE.jsonl is
    resumed: images that are done and have not changed are skipped. SIGTERM and SIGUSR1 finish the
    running images and exit with 75; if a read is stuck, the process ends within 5 seconds.

    Exits with 0 when all images are done, 8 when some failed, 3 when none could be read.
    """
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    show_log(level)

    from tnetcli.cli.progress import BatchProgress
    from tnetcli.data.images import name_images
    from tnetcli.prediction.batch import parse_shard, shard_of_job

    options = read_options(bands, option)
    counts = None if keep is None else parse_keep(keep)
    check_null(context, images)
    with watching("IMAGES"):
        named = name_images(
            images or [],
            options=options,
            manifest=manifest,
            recursive=recursive,
            null=null,
            crop=crop.value,
        )
    part = shard_of_job() if shard is None else parse_shard(shard)
    file = None if output in (None, "-") else Path(str(output))
    if file is not None and not file.name:
        raise UsageError(f"-o is not a file name: `{output}`", hint="for example -o out.jsonl")
    if part is not None and part.count > 1:
        named = part.take(named)
        file = None if file is None else part.name(file)

    from tnetcli.models.devices import limit_threads
    from tnetcli.prediction.batch import ExecutionConfig, predict_images
    from tnetcli.prediction.predictor import DEFAULT_MODEL, PredictConfig
    from tnetcli.system import available_cores

    cores = max(available_cores() // workers, 1)
    config = PredictConfig(
        levels=levels,
        keep=counts,
        policy=policy,
        budget=budget,
        confidence=confidence,
        seed=seed,
        precision=precision.value,
        reader=reader,
        regions=regions,
        options=options,
    )
    execution = ExecutionConfig(device, cores, batch_size, workers, scheduler, read_timeout)
    limit_threads(cores)
    batch = Batch(len(named))
    # From here on signals finish the running images; before, they end the command at once.
    with (
        graceful_stop() as asked,
        BatchProgress(batch, quiet=quiet) as progress,
    ):
        say: Callable[[str], None] = (lambda text: None) if quiet else progress.say

        def should_stop() -> bool:
            if asked and not quiet:
                progress.say_once("finishing the running images; a second Ctrl-C stops at once")
            return bool(asked) or (max_failures is not None and batch.failed > max_failures)

        def resumed(count: int) -> None:
            batch.resumed = count

        if part is not None:
            into = "" if file is None else f", into `{file}`"
            say(f"shard {part}: {counted(len(named), 'image')}{into}")
        if model is None:
            say(f"using the bundled model `{DEFAULT_MODEL}`; choose another with --model")
        records = predict_images(
            named,
            model or DEFAULT_MODEL,
            config,
            execution,
            output=file,
            overwrite=overwrite,
            should_stop=should_stop,
            resumed=resumed,
        )
        with closing(records):
            for record in records:
                batch.add(record)
                progress.advance()
                if output == "-":
                    typer.echo(record.model_dump_json())
                elif output is None and record.is_done:
                    typer.echo(as_text(record))
                if record.error is not None and len(named) > 1:  # a single one is the error
                    logging.getLogger("tnetcli.predict").warning(
                        "%s failed: %s", record.id, record.error.message
                    )
        if len(named) > 1 or output is not None:
            for line in batch.as_lines(progress.seconds):
                say(line)
    if asked:
        raise Stopped(exit_code(asked), SAVED if file is not None else NOT_SAVED)
    batch.check()

"""The `tnet predict` command."""

import logging
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import (
    Bands,
    CheckAttention,
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


KEPT = "what is done is kept: run the same command again to go on"
LOST = "what is done was shown; with -o FILE.jsonl it is kept, and a later run goes on"


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
            help="A trained model.",
            show_default="the bundled one",
        ),
    ] = None,
    levels: Levels = None,
    keep: Keep = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.jsonl|-",
            help="Write a JSON object a line, to a file that a later run goes on with, or to "
            "standard output.",
            show_default="a summary to read",
        ),
    ] = None,
    overlay: Annotated[
        Path | None,
        typer.Option(help="Write what was looked at into this folder, as GeoJSON."),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Stop as soon as a class is as probable."),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(min=1, help="Windows per image, the whole image included."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="top_k|sample|best_first",
            help="How cells are chosen.",
            show_default="as trained",
        ),
    ] = None,
    windows: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl|FILE.csv",
            help="Look at these windows at level 2: those of another model's predictions, or a "
            "CSV with path, left, top, right, bottom.",
            show_default="the model's own choice",
        ),
    ] = None,
    crop: Annotated[
        CropName,
        typer.Option(
            help="See only the boxes of the manifest, or these with some of what is around them.",
        ),
    ] = CropName.none,
    check_attention: CheckAttention = False,
    seed: Seed = 0,
    shard: Shard = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="End at the first failure.")
    ] = False,
    max_failures: Annotated[
        int | None,
        typer.Option(min=0, help="End after more failures than this."),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="Images looked at together."),
    ] = 8,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Processes that share the cores of the job; by itself this one has them all.",
            show_default="1, with a thread a core",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            envvar="TNET_SCHEDULER",
            metavar="ADDRESS",
            help="Look at images on a Dask cluster: tcp://HOST:8786 (extra `dask`).",
        ),
    ] = None,
    scheduler_file: Annotated[
        Path | None,
        typer.Option(
            help="The same, by the file that the scheduler has written.",
        ),
    ] = None,
    device: Device = "auto",
    precision: Annotated[
        PrecisionName, typer.Option(help="Of the computation.")
    ] = PrecisionName.fp32,
    reader: ReaderOption = None,
    bands: Bands = None,
    option: ReaderOptions = None,
    read_timeout: ReadTimeout = READ_TIMEOUT,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Classify IMAGES by looking closer only where it matters.

    A bad image becomes a failed record and the rest go on. Run the same command again to go on
    with a FILE.jsonl: what is done and has not changed is kept. SIGTERM and SIGUSR1 finish the
    images in flight and exit with 75; if a read is stuck then, the process ends within 5 seconds.

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
        raise UsageError(f"-o is no name of a file: `{output}`", hint="for example -o out.jsonl")
    if part is not None and part.count > 1:
        named = part.take(named)
        file = None if file is None else part.name(file)
    batch = Batch(len(named))
    most = 0 if fail_fast else max_failures

    from tnetcli.exporters.export import Overlays
    from tnetcli.prediction.batch import (
        DEFAULT_MODEL,
        ExecutionConfig,
        choose_place,
        predict_images,
    )
    from tnetcli.prediction.predictor import PredictConfig
    from tnetcli.system import available_cores, limit_threads

    overlays = None if overlay is None else Overlays(overlay, overwrite=overwrite)
    if overlays is not None:
        overlays.check(named)
    where = choose_place(workers or 1, scheduler, scheduler_file)
    cores = max(available_cores() // where.processes, 1)
    limit_threads(cores)
    settings = PredictConfig(
        levels=levels,
        keep=counts,
        policy=policy,
        budget=budget,
        confidence=confidence,
        seed=seed,
        precision=precision.value,
        reader=reader,
        check_attention=check_attention,
        windows=windows,
        options=options,
    )
    # From here on what was begun is finished; before, whoever is told to stop just stops.
    with (
        graceful_stop() as asked,
        BatchProgress(batch, quiet=quiet) as progress,
    ):

        def should_stop() -> bool:
            if asked and not quiet:
                progress.say_once("finishing what was begun; a second Ctrl-C stops at once")
            return bool(asked) or (most is not None and batch.failed > most)

        def resumed(count: int) -> None:
            batch.resumed = count

        if part is not None and not quiet:
            into = "" if file is None else f", into `{file}`"
            progress.say(f"part {part}: {counted(len(named), 'image')}{into}")
        if model is None and not quiet:
            progress.say(f"using the bundled model `{DEFAULT_MODEL}`; --model names another")
        records = predict_images(
            named,
            model or DEFAULT_MODEL,
            settings,
            ExecutionConfig(device, cores, batch_size, where, read_timeout),
            output=file,
            overlays=overlays,
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
                if record.error is not None and len(named) > 1:  # of one, the error tells
                    logging.getLogger("tnetcli.predict").warning(
                        "%s failed: %s", record.id, record.error.message
                    )
        if not quiet and (len(named) > 1 or output is not None):
            for line in batch.as_lines(progress.seconds):
                progress.say(line)
    if asked:
        raise Stopped(exit_code(asked), KEPT if file is not None else LOST)
    _judge(batch)


def _judge(batch: "Batch") -> None:
    """End with the error that fits what became of the images."""
    if not batch.failed:
        return
    several = f"{batch.failed:,} of {counted(batch.images, 'image')} failed"
    problem = batch.first_problem if batch.images == 1 else several
    hint = next(iter(batch.hints)) if len(batch.hints) == 1 else "the lines above say why"
    if batch.done + batch.resumed:
        raise SomeFailedError(problem, hint=hint)
    raise common_error_class(map(error_class, batch.types))(problem, hint=hint)

"""The `tnet predict` command."""

import logging
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import typer

from tnetcli.cli import options as opt
from tnetcli.cli.progress import Progress
from tnetcli.cli.signals import Stopped, exit_code, graceful_stop
from tnetcli.errors import SomeFailedError, TnetError, UsageError, common_error_class, error_class
from tnetcli.files import STANDARD
from tnetcli.prediction.record import Prediction, Problem
from tnetcli.readers.watch import READ_TIMEOUT, watching
from tnetcli.text import counted, join_some, printable

LONGEST = 300  # characters of a line
MAX_REASONS = 5
MAX_NAMED = 3  # images per reason
SAVED = "progress is saved; run the same command again to resume"
NOT_SAVED = "finished predictions were printed; with -o FILE.jsonl they are saved and resumed"
log = logging.getLogger("tnetcli.predict")


def as_text(record: Prediction) -> str:
    """Return the prediction, its levels and its cost in a few lines."""
    cost = record.cost
    assert cost is not None  # a record that is done has one
    answer = f"abstained: {record.reason}"
    if record.label is not None and record.probability is not None:
        answer = f"{record.label} ({record.probability:.1%})"
    levels = [
        f"  level {each.level}: {each.label} ({each.probability:.1%}) from "
        f"{counted(each.windows, 'region')}"
        for each in record.levels
    ]
    lines = [
        f"{record.id}: {answer}",
        *levels,
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
        if number >= 0.9995 * size:  # what rounds to 1000 is 1 of the next
            return f"{number / size:.3g} {letter}"
    return str(number)


@dataclass(slots=True)
class Batch:
    """Counts of a batch: images, regions, pixels, and failures."""

    images: int
    resumed: int = 0
    done: int = 0
    abstained: int = 0  # of those done
    windows: int = 0
    pixels_decoded: int = 0
    pixels_total: int = 0
    failures: list[tuple[Prediction, Problem]] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def add(self, record: Prediction) -> None:
        """Count one record."""
        if record.error is not None:
            self.failures.append((record, record.error))
        elif record.cost is not None:
            self.done += 1
            self.abstained += record.status == "abstained"
            self.windows += record.cost.windows
            self.pixels_decoded += record.cost.pixels_decoded
            self.pixels_total += record.cost.pixels_total

    @property
    def finished(self) -> int:
        """Return the number of images that need no more work."""
        return self.resumed + self.done + len(self.failures)

    def progress(self) -> str:
        """Return how many images are finished, and at which speed."""
        speed = self.windows / max(time.monotonic() - self.start, 1e-9)
        failed = f", {len(self.failures)} failed" if self.failures else ""
        images = f"{self.finished:,} of {counted(self.images, 'image')}"
        return f"{images}, {speed:.1f} regions/s{failed}"

    def summary(self) -> list[str]:
        """Return the totals, and the failures by reason."""
        counts = {
            "abstained": self.abstained,
            "done before": self.resumed,
            "failed": len(self.failures),
            "not started": self.images - self.finished,
        }
        parts = [f"{self.done:,} of {counted(self.images, 'image')} done"]
        parts += [f"{count:,} {what}" for what, count in counts.items() if count]
        lines = [", ".join(parts)]
        if self.done:
            minutes = max(time.monotonic() - self.start, 1e-9) / 60
            lines.append(
                f"{counted(self.windows, 'region')}, {self.pixels_decoded / self.pixels_total:.3%} "
                f"of the pixels decoded, {self.done / minutes:.3g} images per minute"
            )
        reasons = defaultdict[str, list[str]](list)  # ids by reason
        for record, error in self.failures:
            # The same reason names another file each time.
            reason = error.message.replace(record.image, "…").replace("`…`", "…")
            reasons[reason].append(record.id)
        worst = sorted(reasons.items(), key=lambda each: -len(each[1]))
        lines += [
            f"failed {len(ids)}: {reason} ({join_some(ids, MAX_NAMED)})"
            for reason, ids in worst[:MAX_REASONS]
        ]
        if len(worst) > MAX_REASONS:
            lines.append(f"and {counted(len(worst) - MAX_REASONS, 'more reason')}")
        return [printable(line, LONGEST) for line in lines]

    def check(self) -> None:
        """Raise the error that describes the failures, if there are any."""
        if not self.failures:
            return
        errors = [error for _, error in self.failures]
        kind: type[TnetError] = SomeFailedError
        if not self.done and not self.resumed:
            kind = common_error_class(error_class(each.type) for each in errors)
        hints = {each.hint for each in errors}
        several = f"{len(errors):,} of {counted(self.images, 'image')} failed"
        raise kind(
            errors[-1].message if self.images == 1 else several,
            hint=hints.pop() if len(hints) == 1 else "see the warnings above",
        )


def predict(
    context: typer.Context,
    images: opt.Images = None,
    manifest: opt.Manifest = None,
    recursive: opt.Recursive = False,
    null: opt.NullSeparated = False,
    model: opt.Model = None,
    levels: opt.Levels = None,
    keep: opt.Keep = None,
    policy: str | None = typer.Option(
        None,
        metavar="NAME",
        help="How cells are chosen: top_k, sample, best_first or a plug-in.",
        show_default="as trained",
    ),
    budget: int | None = typer.Option(
        None, min=1, help="Maximum number of regions read per image, the whole image included."
    ),
    confidence: float | None = typer.Option(
        None, min=0, max=1, help="Stop as soon as a class is at least this probable."
    ),
    regions: Path | None = typer.Option(
        None,
        metavar="FILE.jsonl|FILE.csv",
        help="Regions of level 2: predictions of another model, or a CSV with path, left, top, "
        "right, bottom.",
        show_default="the model's choice",
    ),
    seed: opt.Seed = 0,
    reader: opt.ReaderOption = None,
    bands: opt.Bands = None,
    option: opt.ReaderOptions = None,
    crop: opt.CropName = typer.Option(
        "none", help="Read only the boxes of the manifest, exactly or with context around them."
    ),
    read_timeout: opt.ReadTimeout = READ_TIMEOUT,
    output: str | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="FILE.jsonl|-",
        help="Write JSON Lines to a file, which a later run resumes, or to standard output.",
        show_default="a readable summary",
    ),
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    max_failures: int | None = typer.Option(
        None,
        min=0,
        help="Stop once more images than this have failed; 0 stops at the first failure.",
    ),
    shard: str | None = typer.Option(
        None,
        metavar="I/N",
        help="Process shard I of N and write its own output file.",
        show_default="from a SLURM job array",
    ),
    batch_size: opt.BatchSize = 8,
    workers: int = typer.Option(
        1, min=1, max=256, help="Number of processes, which share the cores of the job."
    ),
    scheduler: str | None = typer.Option(
        None,
        envvar="TNET_SCHEDULER",
        metavar="ADDRESS|FILE",
        help="Dask cluster to predict on: tcp://HOST:8786 or a scheduler file (extra `dask`).",
    ),
    device: opt.Device = "auto",
    precision: opt.Precision = "fp32",
) -> None:
    """Classify IMAGES with recursive hard attention.

    A failed image is recorded with its error; the batch continues. An existing FILE.jsonl is
    resumed: images that are done and have not changed are skipped. SIGTERM and SIGUSR1 finish the
    running images and exit with 75; if a read is stuck, the process ends within 5 seconds.

    Exits with 0 when all images are done, 8 when some failed, 3 when none could be read.
    """
    from tnetcli.data.images import name_images
    from tnetcli.prediction.batch import parse_shard, shard_of_job

    options, counts = opt.read_options(bands, option), opt.parse_counts(keep)
    images = images or []
    opt.check_null(context, images)
    with watching("IMAGES"):
        named = name_images(
            images, options=options, manifest=manifest, recursive=recursive, null=null, crop=crop
        )
    part = shard_of_job() if shard is None else parse_shard(shard)
    file = None if output is None or output == STANDARD else Path(output)
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
    limit_threads(cores)
    batch, announced = Batch(len(named)), False
    # From here on signals finish the running images; before, they end the command at once.
    with graceful_stop() as asked, Progress() as progress:

        def should_stop() -> bool:
            nonlocal announced
            if asked and not announced:
                announced = True
                log.info("finishing the running images; a second Ctrl-C stops at once")
            return bool(asked) or (max_failures is not None and len(batch.failures) > max_failures)

        def resumed(count: int) -> None:
            batch.resumed = count
            progress.begin(count / batch.images)

        if part is not None:
            into = "" if file is None else f", into `{file}`"
            log.info("shard %s: %s%s", part, counted(len(named), "image"), into)
        if model is None:
            log.info("using the bundled model `%s`; choose another with --model", DEFAULT_MODEL)
        records = predict_images(
            named,
            model or DEFAULT_MODEL,
            PredictConfig(
                levels=levels,
                keep=counts,
                policy=policy,
                budget=budget,
                confidence=confidence,
                seed=seed,
                precision=precision,
                reader=reader,
                regions=regions,
                options=options,
            ),
            ExecutionConfig(device, cores, batch_size, workers, scheduler, read_timeout),
            output=file,
            overwrite=overwrite,
            should_stop=should_stop,
            resumed=resumed,
        )
        with closing(records):
            for record in records:
                batch.add(record)
                progress.advance(batch.finished / batch.images, batch.progress())
                if output == STANDARD:
                    typer.echo(record.model_dump_json())
                elif output is None and record.is_done:
                    print(as_text(record), flush=True)
                if record.error is not None and len(named) > 1:  # a single one is the error
                    log.warning("%s failed: %s", record.id, record.error.message)
        if len(named) > 1 or output is not None:
            for line in batch.summary():
                log.info("%s", line)
    if asked:
        raise Stopped(exit_code(asked), SAVED if file is not None else NOT_SAVED)
    batch.check()

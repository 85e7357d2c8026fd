"""`tnet predict`: classify images by looking closer only where it matters."""

import logging
import math
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tnetcli.cli.messages import show_log
from tnetcli.cli.options import (
    Bands,
    CheckAttention,
    CropName,
    DefaultMpp,
    Device,
    Flat,
    FlatChoice,
    Images,
    Keep,
    Levels,
    LogFormat,
    LogFormatName,
    Manifest,
    Mpp,
    Nodata,
    NullSeparated,
    Overwrite,
    PlaneT,
    PlaneZ,
    PrecisionName,
    Quiet,
    ReaderName,
    ReadTimeout,
    Recursive,
    Seed,
    Shard,
    Verbose,
    parse_keep,
    read_options,
    refuse_lone_null,
)
from tnetcli.cli.stopping import Stopped, exit_code, stopping_gently
from tnetcli.errors import SomeFailedError, UsageError, kind_of, kind_of_all
from tnetcli.readers.watch import READ_TIMEOUT, watching
from tnetcli.wording import counted

if TYPE_CHECKING:
    from tnetcli.traversal.config import PolicyName as Policy
    from tnetcli.workflows.predict_text import Batch

KEPT = "what is done is kept: run the same command again to go on"
LOST = "what is done was shown; with -o FILE.jsonl it is kept, and a later run goes on"


class PolicyName(StrEnum):
    """How cells are chosen."""

    topk = "topk"
    sample = "sample"
    best_first = "best-first"


POLICIES: dict[PolicyName, "Policy"] = {
    PolicyName.topk: "topk",
    PolicyName.sample: "sample",
    PolicyName.best_first: "best_first",
}


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
        PolicyName | None,
        typer.Option(
            help="Follow the best cells, draw them, or take the best of all levels.",
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
    reader: ReaderName = None,
    bands: Bands = None,
    rescale: Annotated[
        str | None,
        typer.Option(
            metavar="LOW,HIGH",
            help="Map these values onto the range that the model was trained on: `0,3000`.",
        ),
    ] = None,
    nodata: Nodata = None,
    mpp: Mpp = None,
    default_mpp: DefaultMpp = None,
    z: PlaneZ = None,
    t: PlaneT = None,
    flat: Flat = FlatChoice.stream,
    read_timeout: ReadTimeout = READ_TIMEOUT,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_format: LogFormat = LogFormatName.text,
) -> None:
    """Classify IMAGES by looking closer only where it matters.

    A bad image becomes a failed record and the rest go on. Run the same command again to go on
    with a FILE.jsonl: what is done and has not changed is kept. SIGTERM and SIGUSR1 finish the
    images in flight and exit with 75; if a read is stuck then, the process ends within 5 seconds.

    Exits with 0 when all images are done, 8 when some failed, 3 when none could be read.
    """
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    as_json = log_format is LogFormatName.json
    show_log(level, as_json=as_json)

    from tnetcli.cli.batch_progress import BatchProgress
    from tnetcli.workflows.images import name_images
    from tnetcli.workflows.predict_text import Batch, as_text
    from tnetcli.workflows.shards import parse_shard, shard_of_job

    options = read_options(bands, nodata, mpp, default_mpp, z, t, flat)
    values = None if rescale is None else _parse_rescale(rescale)
    counts = None if keep is None else parse_keep(keep)
    refuse_lone_null(context, images)
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

    from tnetcli.devices import limit_threads
    from tnetcli.machine import available_cores
    from tnetcli.workflows.elsewhere import choose_place
    from tnetcli.workflows.overlays import Overlays
    from tnetcli.workflows.predict import DEFAULT_MODEL, Means, predict_images
    from tnetcli.workflows.predicting import Settings

    overlays = None if overlay is None else Overlays(overlay, overwrite=overwrite)
    if overlays is not None:
        overlays.check(named)
    where = choose_place(workers or 1, scheduler, scheduler_file)
    cores = max(available_cores() // where.processes, 1)
    limit_threads(cores)
    settings = Settings(
        levels=levels,
        keep=counts,
        policy=POLICIES[policy] if policy else None,
        budget=budget,
        confidence=confidence,
        seed=seed,
        precision=precision.value,
        reader=None if reader is None else reader.value,
        rescale=values,
        check_attention=check_attention,
        windows=windows,
        options=options,
    )
    # From here on what was begun is finished; before, whoever is told to stop just stops.
    with (
        stopping_gently() as asked,
        BatchProgress(batch, quiet=quiet, as_json=as_json) as progress,
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
            Means(device, cores, batch_size, where, read_timeout),
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
    raise kind_of_all(map(kind_of, batch.types))(problem, hint=hint)


def _parse_rescale(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return low, high
    except ValueError:
        pass
    raise UsageError(
        f"--rescale is not two values, low and high: `{text}`", hint="for example --rescale 0,3000"
    )

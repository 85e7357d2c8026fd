"""Export predictions: the registry of exporters, what they share, and the files they write."""

import fnmatch
import gzip
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Protocol, Self, TypeAlias

from pydantic import BaseModel, Field

from tnetcli.config import Strict, validate
from tnetcli.errors import ImageError, OutputError, TnetError, UsageError
from tnetcli.files import (
    UNWRITABLE,
    atomic_file,
    check_not_input,
    check_output,
    is_remote,
    temporary_folder,
)
from tnetcli.geo import Globe
from tnetcli.geometry import Size, UnknownCRSError
from tnetcli.prediction.jsonl import read_predictions
from tnetcli.prediction.record import BoxEdges, Prediction, RegionRecord
from tnetcli.registry import Registry
from tnetcli.text import first_line, reason, shorten

Advance: TypeAlias = Callable[[float], None]
RegionWithJoint: TypeAlias = tuple[RegionRecord, float | None]  # as `regions_of` yields them

SURROGATES = re.compile("[\ud800-\udfff]")
MAX_NAME = 200  # bytes; file systems take 255
MAX_FOLDERS = 1500  # bytes of all folders of an id together; systems take 4096
ABSOLUTE = "_"  # folder of images with absolute paths
log = logging.getLogger(__name__)


class Exporter(Protocol):
    """Writes predictions in one format.

    `suffixes` are the file name endings that select it, the default one first. `many` tells
    whether several images can share a file. `options` is the model of its `-O key=value` options.
    """

    name: str
    suffixes: tuple[str, ...]
    many: bool
    options: type[BaseModel]

    def write(self, predictions: Iterable[Prediction], path: Path, options: Any) -> int | None:
        """Write a new file at `path`, and return how many images are incomplete, if any are.

        `path` is in a temporary folder; the caller moves the finished file to its place.
        """
        ...


EXPORTERS: Registry[Exporter] = Registry(
    "exporter",
    {
        "geojson": "tnetcli.exporters.geojson:EXPORTER",
        "heatmap": "tnetcli.exporters.heatmap:EXPORTER",
        "figure": "tnetcli.exporters.figure:EXPORTER",
        "html": "tnetcli.exporters.html:EXPORTER",
        "csv": "tnetcli.exporters.table:CSV",
        "parquet": "tnetcli.exporters.table:PARQUET",
    },
)


def find_exporter(output: str | None, name: str | None = None) -> Exporter:
    """Return the exporter with this name, or the one that the suffix of `output` selects.

    GeoJSON is the default. Raise UsageError if the name and the suffix contradict each other, or
    if no exporter has the suffix.
    """
    named = None if name is None else EXPORTERS.load(name)
    if output is None or is_folder(output):
        return named or EXPORTERS.load("geojson")
    every = (EXPORTERS.load(each) for each in EXPORTERS)
    by_suffix = next((each for each in every if output.lower().endswith(each.suffixes)), None)
    if named is None and by_suffix is None:
        raise UsageError(
            f"no format has the suffix of `{output}`",
            hint="use .geojson, .tif, .png, .html, .csv or .parquet, or choose a format with -f",
        )
    if named is not None and by_suffix is not None and by_suffix.name != name:
        raise UsageError(
            f"`{output}` has the suffix of the format {by_suffix.name}, not of {name}",
            hint=f"use the suffix {' or '.join(named.suffixes)}",
        )
    return named or by_suffix or EXPORTERS.load("geojson")


def is_folder(output: str) -> bool:
    """Return True if `output` is a folder, ends with a slash, or is new and has no suffix."""
    path = Path(output)
    return output.endswith("/") or path.is_dir() or not (path.suffix or path.exists())


class RegionOptions(Strict):
    """Options of all built-in exporters."""

    levels: frozenset[int] | None = Field(
        default=None, description="Levels of the exported regions; all levels by default"
    )


def regions_of(
    prediction: Prediction, levels: frozenset[int] | None = None
) -> Iterator[RegionWithJoint]:
    """Yield the regions of these levels, each with the product of attention along its path.

    Glimpses count as regions of the level below. The product is None where a parent is missing
    from the record.
    """
    joint: dict[str, float] = {"": 1.0}
    for window in prediction.windows:
        for region in (window, *window.glimpsed()):
            parent = joint.get(region.path.rpartition("/")[0])
            if parent is not None:
                # Sums of 32-bit numbers may exceed one a little.
                joint[region.path] = min(parent * region.attention, 1.0)
            if levels is None or region.level in levels:
                yield region, joint.get(region.path)


def measurements(
    region: RegionRecord, joint: float | None, prediction: Prediction
) -> dict[str, float | None]:
    """Return the numbers of a region that all formats export; None where one is unknown."""
    view_size = prediction.provenance.config.get("view_size")
    # A glimpse is a part of a view, and the record has no size of that part.
    known = isinstance(view_size, int | float) and not region.is_glimpse
    width = region.box[2] - region.box[0]
    return {
        "level": region.level,
        "rank": region.rank,
        "attention": rounded(region.attention),
        "joint": rounded(joint),
        "share": rounded(region.share),
        "probability": rounded(region.probability),
        "valid": rounded(region.valid),
        "downsample": rounded(width / view_size) if known else None,  # type: ignore[operator]
    }


def rounded(value: float | None) -> float | None:
    """Return a number with nine significant digits, which 32-bit floats have."""
    return None if value is None else float(f"{value:.9g}")


def globe_of(prediction: Prediction) -> Globe | None:
    """Return the place of an image on the Earth; None for slides, photos and local systems."""
    place = prediction.georeference
    if place is None or place.crs is None:
        return None
    try:
        globe = Globe(place, Size(prediction.width, prediction.height))
    except UnknownCRSError as error:
        raise unknown_crs(prediction, place.crs) from error
    return globe if globe.is_known else None


def unknown_crs(prediction: Prediction, crs: str) -> OutputError:
    """Return the error of an image whose CRS cannot be interpreted."""
    return OutputError(
        f"cannot georeference `{prediction.image}`: unknown CRS `{crs[:60]}`",
        hint="the prediction may have been made with a newer version of PROJ",
    )


def facts_of(prediction: Prediction, frame: str, *, in_pixels: bool) -> dict[str, Any]:
    """Return where the coordinates of a file begin, and which model and image they are of."""
    provenance, place = prediction.provenance, prediction.georeference
    facts = {
        "version": provenance.version,
        "model": provenance.model,
        "model_sha256": provenance.sha256,
        "frame": frame,
        "offset": list(prediction.offset),
        "width": prediction.width,
        "height": prediction.height,
        "image": prediction.image,
    }
    # Ground control points locate an image less well than a transform does.
    if not in_pixels and place is not None and place.source != "transform":
        facts["georeference"] = place.source
    if in_pixels and prediction.mpp is not None:
        facts["mpp"] = list(prediction.mpp)
    return facts


def image_path(image: str, root: Path | None) -> str:
    """Return where an image is: a relative path below `root`, any other as it is."""
    return image if root is None or is_remote(image) else os.path.join(root, image)


def whole_box(prediction: Prediction) -> BoxEdges:
    """Return the box of the whole image."""
    return 0.0, 0.0, float(prediction.width), float(prediction.height)


def clean_text(text: str) -> str:
    """Return text that can be encoded as UTF-8; lone surrogates become U+FFFD."""
    return text if text.isascii() else SURROGATES.sub("\ufffd", text)


def as_json(value: Any) -> str:
    """Return compact JSON on one line that can be encoded as UTF-8."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return clean_text(text)


def write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """Write pieces of text as UTF-8, compressed if the name ends in `.gz`."""
    is_packed = path.suffix.lower() == ".gz"
    with (
        open(path, "wb") as raw,
        # Neither name nor time inside: the same pieces give the same bytes.
        gzip.GzipFile("", "wb", 6, raw, mtime=0) if is_packed else nullcontext(raw) as file,
    ):
        for piece in pieces:
            file.write(piece.encode())


# --- files ------------------------------------------------------------------------------------


def export(
    predictions: str | os.PathLike[str] | Prediction | Iterable[Prediction],
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Path:
    """Export predictions, and return the path that was written.

    Parameters
    ----------
    predictions
        A file of `tnet predict -o`, or one or more predictions.
    path
        A file, or a folder to write a file for each image.
    format
        Name of a built-in format or plug-in; by default the suffix of `path` decides, and a
        folder is filled with GeoJSON.
    overwrite
        Replace existing files.
    **options
        Options of the format, as `tnet export -O` takes them.

    Raises
    ------
    UsageError
        An option is unknown or not valid, or the images cannot share a file.
    OutputError
        The output exists or cannot be written.

    Examples
    --------
    >>> tnetcli.export("predictions.jsonl", "regions.geojson", levels=[2, 3])

    """
    name = os.fspath(path)
    exporter = find_exporter(name, format)
    source: Iterable[Path | Prediction]
    if isinstance(predictions, str | os.PathLike):
        source = [Path(predictions)]
    else:
        source = [predictions] if isinstance(predictions, Prediction) else predictions
    job = ExportJob.check(list(source), exporter, options)
    write = job.write_folder if is_folder(name) else job.write_file
    write(Path(path), overwrite=overwrite)
    return Path(path)


@dataclass(slots=True)
class ExportJob:
    """Predictions of files or of a list, found exportable, and the counts of their images.

    They are read once for the check and again to be written, so that memory stays bounded. `ids`
    are names or glob patterns of images; none selects all.
    """

    source: Sequence[Path | Prediction]
    ids: tuple[str, ...]
    exporter: Exporter
    options: Any
    images: int = 0
    failed: int = 0  # failed predictions, which have nothing to show
    written: int = 0
    incomplete: int = 0  # images that could not be exported, or only without their pixels

    @classmethod
    def check(
        cls,
        source: Sequence[Path | Prediction],
        exporter: Exporter,
        options: dict[str, Any],
        ids: Sequence[str] = (),
    ) -> Self:
        """Read all predictions once, to raise errors before anything is written."""
        checked = validate(exporter.options, options, f"the format {exporter.name}", UsageError)
        job = cls(source, tuple(ids), exporter, checked)
        matched: set[str] = set()
        levels: set[int] = set()
        digests: set[bytes] = set()  # a set of ids would fill the memory
        for prediction in job.predictions():
            job.images += 1
            job.failed += not prediction.is_done
            levels |= {each.level for each in prediction.levels}
            levels |= {each.level + 1 for each in prediction.windows if each.glimpses}
            matched.update(job._matching(prediction.id))
            digest = hashlib.blake2b(prediction.id.encode(), digest_size=8).digest()
            if digest in digests:
                raise OutputError(
                    f"two predictions have the id `{prediction.id}`",
                    hint="combine files with `tnet merge`, which keeps one record per image",
                )
            digests.add(digest)
        if missing := [each for each in job.ids if each not in matched]:
            raise UsageError(
                f"no prediction has the id `{missing[0]}`",
                hint="use an id of the predictions, or a pattern such as 'a/*.tif'",
            )
        if not job.images:
            raise OutputError("no predictions to export", hint="run `tnet predict` first")
        wanted = getattr(checked, "levels", None)
        if wanted and levels and not wanted & levels:
            # Not an error: a batch may have stopped early because it was confident.
            log.warning(
                "no prediction has a region of level %s: the deepest level is %d",
                ", ".join(map(str, sorted(wanted))),
                max(levels),
            )
        return job

    def predictions(self) -> Iterator[Prediction]:
        """Yield the selected predictions in order, failed ones included."""
        for each in self.source:
            for prediction in [each] if isinstance(each, Prediction) else read_predictions(each):
                if not self.ids or self._matching(prediction.id):
                    yield prediction

    def _matching(self, id: str) -> list[str]:
        return [each for each in self.ids if id == each or fnmatch.fnmatchcase(id, each)]

    @property
    def done(self) -> int:
        """Return the number of predictions that did not fail."""
        return self.images - self.failed

    def default_path(self, file: Path) -> Path:
        """Return a path beside the predictions: a folder if each image has a file of its own."""
        stem = file.name.removesuffix(".gz").removesuffix(".jsonl") or self.exporter.name
        # Images in pixels cannot share a GeoJSON file.
        if self.done > 1 and (not self.exporter.many or self.exporter.name == "geojson"):
            return file.with_name(f"{stem}-{self.exporter.name}")
        return file.with_name(f"{stem}{self.exporter.suffixes[0]}")

    def write_file(
        self, path: Path, *, overwrite: bool = False, advance: Advance = lambda fraction: None
    ) -> None:
        """Write all predictions to one file, which appears complete or not at all."""
        check_output(path, overwrite=overwrite)
        self._check_shared(path.name)
        if path.exists():
            self._check_not_input(path, self.predictions())
        self.incomplete += self._write(self._shown(advance), path, overwrite)
        self.written = self.done

    def write_stream(self, stream: BinaryIO) -> None:
        """Write all predictions to standard output."""
        self._check_shared("standard output")
        with TemporaryDirectory(prefix="tnet-") as folder:
            made = Path(folder, "output")
            with _reporting("standard output"):
                self.incomplete += self.exporter.write(self._shown(), made, self.options) or 0
            with made.open("rb") as content:
                shutil.copyfileobj(content, stream)
        self.written = self.done

    def write_folder(
        self, folder: Path, *, overwrite: bool = False, advance: Advance = lambda fraction: None
    ) -> None:
        """Write a file for each image, named by its id.

        An image that cannot be exported is logged and counted; the others continue.
        """
        suffix = self.exporter.suffixes[0]
        for each in () if overwrite else self.predictions():
            path = image_file(folder, each.id, suffix)
            if path.exists():
                raise OutputError(f"`{path}` exists", hint="replace files with --overwrite")
        for prediction in self._shown(advance, done_only=True):
            path = image_file(folder, prediction.id, suffix)
            self._check_not_input(path, [prediction])
            try:
                with _reporting(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                self.incomplete += self._write([prediction], path, overwrite)
                self.written += 1
            except TnetError as error:
                is_disk = isinstance(error, OutputError) and isinstance(error.__cause__, OSError)
                if is_disk or isinstance(error, UsageError):
                    raise  # every other image would fail for the same reason
                log.warning("%s: %s", prediction.id, error)
                self.incomplete += 1
        if not self.written and self.incomplete:
            raise ImageError("no image could be exported", hint="see the warnings above")

    def _shown(
        self, advance: Advance = lambda fraction: None, *, done_only: bool = False
    ) -> Iterator[Prediction]:
        for number, each in enumerate(self.predictions(), start=1):
            if each.is_done or (self.exporter.many and not done_only):
                yield each
            advance(number / self.images)

    def _check_shared(self, name: str) -> None:
        """Raise UsageError if the images need a file each."""
        if not self.exporter.many and self.done != 1:
            raise UsageError(
                f"{self.done} images cannot share a {self.exporter.name}: `{name}`",
                hint="give a folder with -o, for example -o out/, or select one image with --id",
            )

    def _write(self, predictions: Iterable[Prediction], path: Path, overwrite: bool) -> int:
        """Write a file that appears complete or not at all; return the incomplete images."""
        with temporary_folder(os.path.realpath(path)) as folder:
            made = folder / path.name
            with _reporting(path):
                incomplete = self.exporter.write(predictions, made, self.options) or 0
            with atomic_file(path) as file, made.open("rb") as content:
                shutil.copyfileobj(content, file)
                check_output(path, overwrite=overwrite)  # another process may have written it
        return incomplete

    def _check_not_input(self, path: Path, predictions: Iterable[Prediction]) -> None:
        files = (each for each in self.source if isinstance(each, Path))
        root = getattr(self.options, "root", None)
        images = (image_path(each.image, root) for each in predictions)
        check_not_input(path, chain(files, images))


@contextmanager
def _reporting(path: Path | str) -> Iterator[None]:
    """Raise OutputError for what a record or the disk may cause."""
    try:
        yield
    except ValueError as error:
        raise OutputError(
            f"a prediction cannot be exported: {first_line(error)}",
            hint="the file may have been edited: predict the image again",
        ) from error
    except OSError as error:
        problem = f"cannot write `{path}`: {shorten(reason(error))}"
        raise OutputError(problem, hint=UNWRITABLE) from error


def image_file(folder: Path, id: str, suffix: str) -> Path:
    """Return the file of an image below a folder: its id with a suffix.

    Characters that file systems do not take are replaced; a digest then keeps ids apart.
    """
    *folders, name = id.split("/")
    if len(id.encode(errors="surrogatepass")) > MAX_FOLDERS:
        folders = [ABSOLUTE]
    safe = [_safe(each) for each in folders]
    # A folder must not have the name of another image's file.
    safe = [f"{each}_" if each.endswith(suffix) else each for each in safe]
    # Absolute paths are below `_`; no other image is there without a digest.
    plain = f"{ABSOLUTE}{id}" if id.startswith("/") else id
    if "/".join([*safe, _safe(name)]) != plain or folders[:1] == [ABSOLUTE]:
        digest = hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=4)
        name = f"{_safe(name)}-{digest.hexdigest()}"
    return folder.joinpath(*safe, f"{name}{suffix}")


def _safe(part: str) -> str:
    """Return a part of a path that file systems take and that leads to no other folder."""
    plain = re.sub(r'[\x00-\x1f<>:"|?*\\\ud800-\udfff]', "_", part)
    plain = plain.encode()[-MAX_NAME:].decode(errors="ignore")
    return "_" if plain in ("", ".", "..") else plain

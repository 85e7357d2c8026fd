"""Export predictions to one file, or to a folder with a file for each image."""

import fnmatch
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Self

from tnetcli.config import validate
from tnetcli.errors import ImageError, OutputError, TnetError, UsageError
from tnetcli.exporters.base import Exporter, find_exporter, image_path, is_folder
from tnetcli.files import (
    UNWRITABLE,
    atomic_file,
    check_not_input,
    check_output,
    temporary_folder,
)
from tnetcli.prediction.jsonl import read_predictions
from tnetcli.prediction.record import Prediction
from tnetcli.text import first_line, reason, shorten

Advance = Callable[[float], None]
MAX_NAME = 200  # bytes; file systems take 255
MAX_FOLDERS = 1500  # bytes of all folders of an id together; systems take 4096
ABSOLUTE = "_"  # folder of images with absolute paths
log = logging.getLogger(__name__)


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
        `geojson`, `heatmap`, `figure`, `html`, `csv`, `parquet` or the name of a plug-in; by
        default the suffix of `path` decides, and a folder is filled with GeoJSON.
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
    if isinstance(predictions, str | os.PathLike):
        selection = Selection([Path(predictions)])
    elif isinstance(predictions, Prediction):
        selection = Selection([predictions])
    else:
        selection = Selection(list(predictions))
    job = ExportJob.check(selection, exporter, options)
    if is_folder(name):
        job.write_folder(Path(path), overwrite=overwrite)
    else:
        job.write_file(Path(path), overwrite=overwrite)
    return Path(path)


@dataclass(frozen=True, slots=True)
class Selection:
    """Predictions of files or of a list, in order, failed ones included; can be read repeatedly.

    `ids` are names or glob patterns of images; none selects all.
    """

    source: Sequence[Path | Prediction]
    ids: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Prediction]:
        for each in self.source:
            for prediction in [each] if isinstance(each, Prediction) else read_predictions(each):
                if not self.ids or self.matching(prediction.id):
                    yield prediction

    def matching(self, id: str) -> list[str]:
        """Return the names and patterns that an image matches."""
        return [each for each in self.ids if id == each or fnmatch.fnmatchcase(id, each)]

    @property
    def files(self) -> list[Path]:
        """Return the files that are read."""
        return [each for each in self.source if isinstance(each, Path)]


@dataclass(slots=True)
class ExportJob:
    """Predictions that were read once and found exportable, and the counts of their images."""

    selection: Selection
    exporter: Exporter
    options: Any
    images: int = 0
    failed: int = 0  # failed predictions, which have nothing to show
    written: int = 0
    incomplete: int = 0  # images that could not be exported, or only without their pixels

    @classmethod
    def check(cls, selection: Selection, exporter: Exporter, options: dict[str, Any]) -> Self:
        """Read all predictions once, to raise errors before anything is written."""
        checked = validate(exporter.options, options, f"the format {exporter.name}", UsageError)
        job = cls(selection, exporter, checked)
        matched: set[str] = set()
        levels: set[int] = set()
        digests: set[bytes] = set()  # a set of ids would fill the memory
        for prediction in selection:
            job.images += 1
            job.failed += not prediction.is_done
            levels |= {each.level for each in prediction.levels}
            levels |= {each.level + 1 for each in prediction.windows if each.glimpses}
            matched.update(selection.matching(prediction.id))
            digest = hashlib.blake2b(prediction.id.encode(), digest_size=8).digest()
            if digest in digests:
                raise OutputError(
                    f"two predictions have the id `{prediction.id}`",
                    hint="combine files with `tnet merge`, which keeps one record per image",
                )
            digests.add(digest)
        if missing := [each for each in selection.ids if each not in matched]:
            raise UsageError(
                f"no prediction has the id `{missing[0]}`",
                hint="use an id of the predictions, or a pattern such as 'a/*.tif'",
            )
        if not job.images:
            raise OutputError("no predictions to export", hint="run `tnet predict` first")
        job._warn_about_levels(levels)
        return job

    def _warn_about_levels(self, levels: set[int]) -> None:
        wanted = getattr(self.options, "levels", None)
        if wanted and levels and not wanted & levels:
            # Not an error: a batch may have stopped early because it was confident.
            log.warning(
                "no prediction has a region of level %s: the deepest level is %d",
                ", ".join(map(str, sorted(wanted))),
                max(levels),
            )

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
        check_not_input(path, self.selection.files)
        if path.exists():
            check_not_input(path, (self._image_path(each) for each in self.selection))
        self.incomplete += self._write(self._shown(advance), path, overwrite)
        self.written = self.done

    def write_stream(self, stream: BinaryIO) -> None:
        """Write all predictions to standard output."""
        self._check_shared("standard output")
        with TemporaryDirectory(prefix="tnet-") as folder:
            made = Path(folder, "output")
            self.incomplete += self._make(self._shown(), made, "standard output")
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
        for each in () if overwrite else self.selection:
            if image_file(folder, each.id, suffix).exists():
                raise OutputError(
                    f"`{image_file(folder, each.id, suffix)}` exists",
                    hint="replace existing files with --overwrite",
                )
        for prediction in self._shown(advance, done_only=True):
            path = image_file(folder, prediction.id, suffix)
            _make_folder(path.parent)
            check_not_input(path, [*self.selection.files, self._image_path(prediction)])
            try:
                incomplete = self._write([prediction], path, overwrite)
            except TnetError as error:
                is_disk = isinstance(error, OutputError) and isinstance(error.__cause__, OSError)
                if is_disk or isinstance(error, UsageError):
                    raise  # every other image would fail for the same reason
                log.warning("%s: %s", prediction.id, error)
                incomplete = 1
            else:
                self.written += 1
            self.incomplete += incomplete
        if not self.written and self.incomplete:
            raise ImageError("no image could be exported", hint="see the warnings above")

    def _shown(
        self, advance: Advance = lambda fraction: None, *, done_only: bool = False
    ) -> Iterator[Prediction]:
        for number, each in enumerate(self.selection, start=1):
            if each.is_done or (self.exporter.many and not done_only):
                yield each
            advance(number / self.images)

    def _check_shared(self, name: str) -> None:
        if not self.exporter.many and self.done != 1:
            raise UsageError(
                f"{self.done} images cannot share a {self.exporter.name}: `{name}`",
                hint="give a folder with -o, for example -o out/, or select one image with --id",
            )

    def _write(self, predictions: Iterable[Prediction], path: Path, overwrite: bool) -> int:
        """Write a file that appears complete or not at all; return the incomplete images."""
        with temporary_folder(os.path.realpath(path)) as folder:
            made = folder / path.name
            incomplete = self._make(predictions, made, path)
            with atomic_file(path) as file, made.open("rb") as content:
                shutil.copyfileobj(content, file)
                check_output(path, overwrite=overwrite)  # another process may have written it
        return incomplete

    def _make(self, predictions: Iterable[Prediction], made: Path, path: Path | str) -> int:
        try:
            return self.exporter.write(predictions, made, self.options) or 0
        except ValueError as error:
            raise OutputError(
                f"a prediction cannot be exported: {first_line(error)}",
                hint="the file may have been edited: predict the image again",
            ) from error
        except OSError as error:
            raise OutputError(
                f"cannot write `{path}`: {shorten(reason(error))}", hint=UNWRITABLE
            ) from error

    def _image_path(self, prediction: Prediction) -> str:
        return image_path(prediction.image, getattr(self.options, "root", None))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder `{folder}`: {reason(error)}", hint="choose another folder"
        ) from error


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

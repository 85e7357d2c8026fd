"""Export predictions to files by format."""

import fnmatch
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from tnetcli.data.images import Image
from tnetcli.errors import ImageError, OutputError, TnetError, UsageError
from tnetcli.exporters.base import EVERYTHING, Choice, ImageFolder, Looked
from tnetcli.exporters.geojson import (
    HEAD,
    SEQUENCES,
    Frame,
    collection_text,
    sequence_text,
    write_geojson,
    write_geojson_sequence,
)
from tnetcli.exporters.imagery import Imagery, image_place
from tnetcli.files import check_not_input, check_output, open_regular
from tnetcli.prediction.jsonl import read_records
from tnetcli.prediction.record import Prediction
from tnetcli.text import first_line, redacted

Note: TypeAlias = Callable[[str, TnetError], None]
SEQUENCE = ".geojsonl"


@dataclass(frozen=True, slots=True)
class How:
    """What a user may ask of an export, whatever its format."""

    frame: Frame = "qupath"
    sequence: bool = False
    record_separator: bool = False
    value: Literal["attention", "joint"] = "attention"
    size: int = 1600  # width of a figure in pixels
    sheet: bool = True  # a thumbnail of every view in a figure
    pixels: bool = True
    per_image: bool = False
    root: Path | None = None  # where images lie that are named by relative paths
    remote: bool = False  # whether images in the network are fetched
    title: str = ""


Write: TypeAlias = Callable[[Path, Iterable[Looked], How, Note, bool], None]
Text: TypeAlias = Callable[[Iterable[Looked], How], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Format:
    """One format. `many` images may share a file; `together` is where they do if nobody says."""

    name: str
    suffixes: tuple[str, ...]
    write: Write
    text: Text | None = None
    many: bool = True
    together: bool = True

    def suffix(self, how: How) -> str:
        """Return the ending of files that nobody named."""
        return SEQUENCE if how.sequence else self.suffixes[0]


def _geojson(path: Path, looked: Iterable[Looked], how: How, note: Note, overwrite: bool) -> None:
    if how.sequence or path.name.lower().endswith(SEQUENCES):
        write_geojson_sequence(
            path,
            looked,
            frame=how.frame,
            record_separator=how.record_separator,
            overwrite=overwrite,
        )
    else:
        write_geojson(path, looked, frame=how.frame, overwrite=overwrite)


def _geojson_text(looked: Iterable[Looked], how: How) -> Iterator[str]:
    if how.sequence:
        return sequence_text(looked, frame=how.frame, record_separator=how.record_separator)
    return collection_text(looked, frame=how.frame)


def _heatmap(path: Path, looked: Iterable[Looked], how: How, note: Note, overwrite: bool) -> None:
    from tnetcli.exporters.heatmap import write_heatmap

    for each in looked:
        write_heatmap(path, each, value=how.value, overwrite=overwrite)


def _figure(path: Path, looked: Iterable[Looked], how: How, note: Note, overwrite: bool) -> None:
    from tnetcli.exporters.figure import write_figure

    for each in looked:
        draw = partial(write_figure, path, each, size=how.size, sheet=how.sheet)
        if not how.pixels:
            draw(None, overwrite=overwrite)
            continue
        try:
            with _open(how)(each.prediction) as imagery:
                draw(imagery, overwrite=overwrite)
        except ImageError as error:
            note(each.prediction.id, error)
            draw(None, overwrite=overwrite)


def _page(path: Path, looked: Iterable[Looked], how: How, note: Note, overwrite: bool) -> None:
    from tnetcli.exporters.html import write_page

    @contextmanager
    def imagery(prediction: Prediction) -> Iterator[Imagery]:
        with ExitStack() as closing:
            try:
                opened = closing.enter_context(_open(how)(prediction))
            except ImageError as error:
                note(prediction.id, error)
                raise
            yield opened

    shown = imagery if how.pixels else None
    write_page(path, looked, shown, overwrite=overwrite, title=how.title)


def _open(how: How) -> Callable[[Prediction], AbstractContextManager[Imagery]]:
    from tnetcli.exporters.imagery import open_imagery

    return partial(open_imagery, root=how.root, remote=how.remote)


def _csv(path: Path, looked: Iterable[Looked], how: How, note: Note, overwrite: bool) -> None:
    from tnetcli.exporters.table import write_csv

    write_csv(path, looked, per_image=how.per_image, overwrite=overwrite)


def _csv_text(looked: Iterable[Looked], how: How) -> Iterator[str]:
    from tnetcli.exporters.table import csv_text

    return csv_text(looked, per_image=how.per_image)


def _parquet(path: Path, looked: Iterable[Looked], how: How, note: Note, overwrite: bool) -> None:
    from tnetcli.exporters.table import write_parquet

    write_parquet(path, looked, per_image=how.per_image, overwrite=overwrite)


FORMATS = {
    each.name: each
    for each in (
        Format(
            "geojson",
            (".geojson", ".json", ".geojson.gz", ".json.gz", *SEQUENCES),
            _geojson,
            _geojson_text,
            together=False,
        ),
        Format("heatmap", (".tif", ".tiff"), _heatmap, many=False, together=False),
        Format("figure", (".png", ".jpg", ".jpeg"), _figure, many=False, together=False),
        Format("page", (".html", ".htm"), _page),
        Format("csv", (".csv", ".csv.gz"), _csv, _csv_text),
        Format("parquet", (".parquet",), _parquet),
    )
}


def format_of(path: str) -> Format | None:
    """Return the format that the ending of a name stands for."""
    low = path.lower()
    return next((form for form in FORMATS.values() if low.endswith(form.suffixes)), None)


Advance = Callable[[float], None]
Problem = Callable[[str, TnetError], None]
PATTERN = set("*?[")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which predictions and which of their windows; `ids` are names or patterns, none for all."""

    ids: tuple[str, ...] = ()
    choice: Choice = EVERYTHING

    def takes(self, id: str) -> bool:
        """Say whether a prediction is wanted."""
        return not self.ids or any(_matches(id, each) for each in self.ids)


def _matches(id: str, pattern: str) -> bool:
    return id == pattern or (bool(PATTERN & set(pattern)) and fnmatch.fnmatchcase(id, pattern))


@dataclass(slots=True)
class Exported:
    """What became of the predictions that were wanted."""

    written: list[Path] = field(default_factory=list)  # one, or the folder
    images: int = 0
    kept: int = 0  # that were there already
    failed: int = 0  # predictions that had failed, and have nothing to show
    problems: int = 0  # images that could not be shown, or not with their pixels
    total: int = 0  # that were to be shown


def read_looked(files: Sequence[Path], wanted: Wanted) -> Iterator[Looked]:
    """Yield the predictions that are wanted, in order, failed ones too."""
    for file in files:
        for prediction in read_records(file):
            if wanted.takes(prediction.id):
                yield Looked(prediction, wanted.choice)


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is to export, found by reading everything once."""

    images: int
    failed: int

    @property
    def good(self) -> int:
        """Return how many have something to show."""
        return self.images - self.failed


def survey(files: Sequence[Path], wanted: Wanted) -> Survey:
    """Read everything once, so that what is wrong with it is told before anything is written."""
    images = failed = 0
    met: set[str] = set()
    levels: set[int] = set()
    digests: set[bytes] = set()
    for looked in read_looked(files, wanted):
        prediction = looked.prediction
        images += 1
        failed += not prediction.is_done
        levels |= {each.level for each in prediction.levels}
        levels |= {each.level + 1 for each in prediction.windows if each.glimpses}
        met |= {each for each in wanted.ids if _matches(prediction.id, each)}
        digest = hashlib.blake2b(prediction.id.encode(), digest_size=8)
        if digest.digest() in digests:
            raise OutputError(
                f"two predictions of `{prediction.id}`",
                hint="`tnet merge` puts files together, each image once",
            )
        digests.add(digest.digest())
    if missing := [each for each in wanted.ids if each not in met]:
        raise UsageError(
            f"no prediction has the id `{missing[0]}`",
            hint="ids are as `tnet predict` wrote them; patterns such as 'a/*.tif' may be given",
        )
    if not images:
        raise OutputError("there is no prediction in it", hint="did `tnet predict` run to its end?")
    asked = wanted.choice.levels
    if asked is not None and levels and not asked & levels:
        # Not refused: of a batch that was sure early, closer windows may be none.
        log.warning(
            "no prediction has a window of level %s: the last that was looked at is %d",
            ", ".join(map(str, sorted(asked))),
            max(levels),
        )
    return Survey(images, failed)


@dataclass(frozen=True, slots=True)
class Export:
    """What is asked for: which predictions of which files, in what format, and how."""

    files: Sequence[Path]
    wanted: Wanted
    form: Format
    how: How
    found: Survey

    def looked(self) -> Iterator[Looked]:
        """Yield the predictions that are wanted, in order, failed ones too."""
        return read_looked(self.files, self.wanted)

    def images(self) -> Iterator[str]:
        """Yield where the images of the predictions are."""
        return (image_place(each.prediction.image, self.how.root) for each in self.looked())


def write_one(
    asked: Export,
    path: Path,
    *,
    overwrite: bool = False,
    advance: Advance = lambda fraction: None,
) -> Exported:
    """Write all that is wanted into one file, whole or not at all."""
    form, found = asked.form, asked.found
    check_output(path, overwrite=overwrite)
    if asked.how.sequence and not path.name.lower().endswith(SEQUENCES):
        raise UsageError(
            f"`{path}` is not the name of a text sequence",
            hint=f"it ends in {SEQUENCE}, for example; or leave --sequence and --rs out",
        )
    if not form.many and found.good != 1:
        raise UsageError(
            f"{found.good} images cannot share a {form.name}: `{path}`",
            hint=f"name a folder with -o, for example -o {path.stem or form.name}/, or choose one "
            "with --id",
        )
    check_not_input(path, asked.files)
    if path.exists():  # and may be overwritten
        check_not_input(path, asked.images())
    done = Exported([path], images=found.good, failed=found.failed, total=found.good)
    looked = _counted(asked.looked(), found.images, advance)
    if not form.many:
        looked = (each for each in looked if each.prediction.is_done)
    with _records_may_be_wrong():
        form.write(path, looked, asked.how, _noting(done), overwrite)
    return done


def write_each(
    asked: Export,
    folder: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    advance: Advance = lambda fraction: None,
) -> Exported:
    """Write a file for each image, named by its id; one that cannot be shown stops no other.

    With `resume` files that are there are kept: they are whole.
    """
    how, found = asked.how, asked.found
    places = ImageFolder(folder, asked.form.suffix(how))
    if not overwrite and not resume:
        for each in asked.looked():
            if places.path(each.prediction.id).exists():
                raise OutputError(
                    f"`{places.path(each.prediction.id)}` exists",
                    hint="--overwrite replaces files, --resume keeps them",
                )
    done = Exported([folder], failed=found.failed, total=found.good)
    for each in _counted(asked.looked(), found.images, advance):
        if not each.prediction.is_done:
            continue
        path = places.place(each.prediction.id)
        if resume and path.exists():
            done.kept += 1
            continue
        check_not_input(path, [*asked.files, image_place(each.prediction.image, how.root)])
        try:
            with _records_may_be_wrong():
                asked.form.write(path, [each], how, _noting(done), overwrite)
        except TnetError as error:
            if isinstance(error.__cause__, OSError) and isinstance(error, OutputError):
                raise  # the disk: the next one would fare no better
            if isinstance(error, UsageError):
                raise  # every image would fail for the same reason
            _noting(done)(each.prediction.id, error)
        else:
            done.images += 1
    if not done.images and not done.kept and done.problems:
        raise ImageError("no image could be shown", hint="the lines above say why")
    return done


def text_of(asked: Export) -> Iterator[str]:
    """Yield the pieces of the text that would be written, for a pipe."""
    form = asked.form
    if form.text is None:
        raise UsageError(f"a {form.name} cannot go to standard output", hint="name a file with -o")
    with _records_may_be_wrong():
        yield from form.text(asked.looked(), asked.how)


@contextmanager
def _records_may_be_wrong() -> Iterator[None]:
    """Let what an exporter finds wrong with a record be a problem that the user can see to."""
    try:
        yield
    except ValueError as error:
        raise OutputError(
            f"a prediction cannot be shown: {first_line(error)}",
            hint="was the file changed by something else than tnet?",
        ) from error


def _counted(looked: Iterable[Looked], total: int, advance: Advance) -> Iterator[Looked]:
    for number, each in enumerate(looked, start=1):
        yield each
        advance(number / total)


def _noting(done: Exported) -> Problem:
    def note(id: str, error: TnetError) -> None:
        done.problems += 1
        log.warning("%s: %s", id, error)

    return note


def output_of(asked: Export) -> Path:
    """Return where to write if nobody says: beside the predictions, a folder if need be."""
    first, form, found = asked.files[0], asked.form, asked.found
    name = first.name.removesuffix(".gz").removesuffix(".jsonl") or form.name
    if found.good > 1 and not form.together:
        return first.with_name(f"{name}-{form.name}")
    return first.with_name(f"{name}{form.suffix(asked.how)}")


def is_folder(path: str, form: Format) -> bool:
    """Say whether a name means a folder: it is one, ends like one, or has no ending of the form."""
    if path.endswith(("/", os.sep)) or Path(path).is_dir():
        return True
    has_ending = path.lower().endswith(form.suffixes) or bool(Path(path).suffix)
    return not has_ending and not Path(path).exists()


SUFFIX = ".geojson"
BEGINNING = HEAD.encode()
LAST_FEATURE = b"\n],"  # what is told of all features stands behind it
MOST_TOLD = 1 << 16  # bytes


class Overlays(ImageFolder):
    """A folder of GeoJSON files, one for each image; what else lies there is not replaced."""

    def __init__(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        super().__init__(folder, SUFFIX)
        self._overwrite = overwrite

    def check(self, images: Iterable[Image]) -> None:
        """Refuse, before the work begins, images in whose place lies what is not their overlay."""
        for image in images:
            path = self.path(image.id)
            if not self._is_free(path, image.path):
                raise OutputError(
                    f"`{path}` exists, and is no overlay of `{image.path}`",
                    hint="name another folder with --overlay, or use --overwrite to replace it",
                )

    def write(self, record: Prediction) -> None:
        """Write the overlay of a prediction, in place of an older one.

        ValueError says that this prediction cannot have one, OutputError that none can be written.
        """
        path = self.place(record.id)
        if not self._is_free(path, record.image):
            raise ValueError(f"`{path}` was put there by something else")
        try:
            write_geojson(path, [Looked(record)], overwrite=True)
        except OutputError as error:
            if isinstance(error.__cause__, OSError):
                raise  # the disk: the next one would fare no better
            raise ValueError(str(error)) from error

    def has(self, record: Prediction) -> bool:
        """Say whether the overlay is there."""
        return self.path(record.id).exists()

    def _is_free(self, path: Path, image: str) -> bool:
        return self._overwrite or not path.exists() or _is_overlay(path, image)


def _is_overlay(path: Path, image: str) -> bool:
    """Say whether a file is as we write the overlay of an image, which may have moved."""
    try:
        with open_regular(path) as file:
            begin = file.read(len(BEGINNING))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - MOST_TOLD, 0))
            told = json.loads(b"{" + file.read().rpartition(LAST_FEATURE)[2])
        made = told["tnet"]
        named = os.path.basename(redacted(image))  # as in records, without secrets
        return begin == BEGINNING and os.path.basename(made["image"]) == named
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False

"""The formats of `tnet export`, side by side: their names, their endings, and who writes them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from tnetcli.errors import ImageError, TnetError
from tnetcli.exporters.geojson import (
    SEQUENCES,
    Frame,
    collection_text,
    sequence_text,
    write_geojson,
    write_geojson_sequence,
)
from tnetcli.exporters.imagery import Imagery
from tnetcli.exporters.looked import Looked
from tnetcli.prediction import Prediction

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
    from tnetcli.exporters.page import write_page

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
    from tnetcli.workflows.imagery import open_imagery

    return partial(open_imagery, root=how.root, remote=how.remote)


def _csv(path: Path, looked: Iterable[Looked], how: How, note: Note, overwrite: bool) -> None:
    from tnetcli.exporters.table import write_csv

    write_csv(path, looked, per_image=how.per_image, overwrite=overwrite)


def _csv_text(looked: Iterable[Looked], how: How) -> Iterator[str]:
    from tnetcli.exporters.table import csv_text

    return csv_text(looked, per_image=how.per_image)


def _parquet(path: Path, looked: Iterable[Looked], how: How, note: Note, overwrite: bool) -> None:
    from tnetcli.exporters.geoparquet import write_parquet

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

"""Overlays of many predictions in one folder, each where its id says."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from tnetcli.errors import OutputError
from tnetcli.exporters.geojson import HEAD, write_geojson
from tnetcli.exporters.looked import Looked
from tnetcli.files import open_regular
from tnetcli.prediction import Prediction
from tnetcli.wording import redacted
from tnetcli.workflows.image_folder import ImageFolder
from tnetcli.workflows.images import Image

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

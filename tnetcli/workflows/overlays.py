"""Overlays of many predictions in one folder, each where its id says."""

import hashlib
import os
import re
from pathlib import Path

from tnetcli.errors import OutputError
from tnetcli.exporters.geojson import write_geojson
from tnetcli.exporters.looked import Looked
from tnetcli.prediction import Prediction

SUFFIX = ".geojson"
ROOT = "_"
LONGEST = 200  # bytes of a name; file systems take 255


class Overlays:
    """A folder of GeoJSON files, one for each image."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        _make(self.folder)

    def path(self, id: str) -> Path:
        """Return the file of an image: its id below the folder, and no other's.

        What file systems do not take is replaced; a digest then keeps apart what would meet.
        """
        *folders, name = id.split("/")
        safe = [_safe(each) for each in folders]
        safe = [f"{each}_" if each.endswith(SUFFIX) else each for each in safe]  # no file's name
        told = "/".join([*safe, _safe(name)])
        # Absolute paths lie below `_`, and nothing else does without a digest.
        plain = f"{ROOT}{id}" if id.startswith("/") else id
        if told != plain or folders[:1] == [ROOT]:
            digest = hashlib.blake2b(id.encode(errors="surrogateescape"), digest_size=4)
            name = f"{_safe(name)}-{digest.hexdigest()}"
        return self.folder.joinpath(*safe, f"{name}{SUFFIX}")

    def write(self, record: Prediction) -> None:
        """Write the overlay of a prediction, in place of an older one.

        ValueError says that this prediction cannot have one, OutputError that none can be written.
        """
        path = self.path(record.id)
        _make(path.parent)
        try:
            write_geojson(path, [Looked.of(record)], overwrite=True)
        except OutputError as error:
            if isinstance(error.__cause__, OSError):
                raise  # the disk: the next one would fare no better
            raise ValueError(str(error)) from error

    def has(self, record: Prediction) -> bool:
        """Say whether the overlay is there."""
        return self.path(record.id).exists()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder `{folder}`: {error.strerror}",
            hint="name another with --overlay",
        ) from error


def _safe(part: str) -> str:
    """Return a part of a path that leads nowhere else and that file systems take."""
    plain = re.sub(r'[\x00-\x1f<>:"|?*\\\ud800-\udfff]', "_", part)
    plain = plain.encode()[-LONGEST:].decode(errors="ignore")
    return "_" if plain in ("", ".", "..") else plain

"""Overlays of many predictions in one folder, each where its id says."""

import os

from tnetcli.errors import OutputError
from tnetcli.exporters.geojson import write_geojson
from tnetcli.exporters.looked import Looked
from tnetcli.prediction import Prediction
from tnetcli.workflows.image_folder import ImageFolder

SUFFIX = ".geojson"


class Overlays(ImageFolder):
    """A folder of GeoJSON files, one for each image."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder, SUFFIX)

    def write(self, record: Prediction) -> None:
        """Write the overlay of a prediction, in place of an older one.

        ValueError says that this prediction cannot have one, OutputError that none can be written.
        """
        try:
            write_geojson(self.place(record.id), [Looked.of(record)], overwrite=True)
        except OutputError as error:
            if isinstance(error.__cause__, OSError):
                raise  # the disk: the next one would fare no better
            raise ValueError(str(error)) from error

    def has(self, record: Prediction) -> bool:
        """Say whether the overlay is there."""
        return self.path(record.id).exists()

"""Which slide a DICOM file is part of: the levels of one slide share a series."""

import os
import re

from tnetcli.files import open_regular

INDEX = "DICOMDIR"  # of a medium: a DICOM file that is no image
HEAD_BYTES = 1 << 16  # the series is told before the pixels
# The study and right behind it the series; those of other images that a file refers to stand apart.
SERIES = re.compile(
    rb"\x20\x00\x0d\x00UI..[\d.\0 ]{1,64}\x20\x00\x0e\x00UI..([\d.]{1,64})", re.DOTALL
)


def series_of(path: str) -> str | None:
    """Return the series of a DICOM file, "" where it tells none; None of any other file."""
    # A pipe would be waited for.
    if os.path.basename(path).upper() == INDEX or not os.path.isfile(path):
        return None
    with open_regular(path) as file:
        if file.read(132)[128:] != b"DICM":
            return None
        found = SERIES.search(file.read(HEAD_BYTES))
    return found[1].decode() if found else ""

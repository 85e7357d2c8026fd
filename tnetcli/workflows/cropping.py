"""What was seen of a part of an image, told of the whole: records are of files."""

from dataclasses import replace

from tnetcli.prediction import Prediction
from tnetcli.readers.cropped import CroppedReader


def on_whole_image(record: Prediction, reader: CroppedReader) -> Prediction:
    """Return the record of a crop with all its figures in pixels of the image it is of."""
    whole, x, y = reader.whole, reader.crop.left, reader.crop.top
    georeference, cost = whole.georeference, record.cost
    pixels = whole.size.pixels
    return replace(
        record,
        width=whole.size.width,
        height=whole.size.height,
        transform=georeference.transform if georeference else None,
        offset=whole.layout.offset,
        windows=tuple(
            replace(window, box=(x0 + x, y0 + y, x1 + x, y1 + y))
            for window in record.windows
            for x0, y0, x1, y1 in [window.box]
        ),
        cost=cost
        and replace(cost, pixels_total=pixels, fraction_decoded=cost.pixels_decoded / pixels),
    )

"""Records of crops in pixels of the whole image: a record describes a file."""

from dataclasses import replace

from tnetcli.prediction import BoxEdges, Prediction
from tnetcli.readers.cropped import CroppedReader


def on_whole_image(record: Prediction, reader: CroppedReader) -> Prediction:
    """Return the record of a crop with all figures in pixels of the image it was cut from."""
    whole, x, y = reader.whole, reader.crop.left, reader.crop.top
    cost, pixels = record.cost, whole.size.pixels

    def moved(box: BoxEdges) -> BoxEdges:
        x0, y0, x1, y1 = box
        return x0 + x, y0 + y, x1 + x, y1 + y

    return record.replace(
        width=whole.size.width,
        height=whole.size.height,
        georeference=whole.georeference,
        offset=whole.layout.offset,
        windows=tuple(
            replace(
                window,
                box=moved(window.box),
                glimpses=tuple(replace(each, box=moved(each.box)) for each in window.glimpses),
            )
            for window in record.windows
        ),
        cost=cost
        and replace(cost, pixels_total=pixels, fraction_decoded=cost.pixels_decoded / pixels),
    )

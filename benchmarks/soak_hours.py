"""Many predictions in one process: memory and open files must stay constant.

A scaled-down run of two hours: images of 200 x 150 pixels and a tiny model, so that 36,000
predictions, five a second for two hours, take about ten minutes of one core. The bundled model on
COGs of 4096 pixels made 32 a second on two idle cores (benchmarks/RESULTS.md, Prediction). Ten
formats alternate, each image has its own path, and one in fifty is broken. Leaks per image, per
window or per error show up; leaks per pixel or per second do not.
"""

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory import status

COUNT = 5 * 2 * 3600
SAMPLES = 180
WARM = 0.1  # of the images, until caches are full
FORMATS = (
    "GeoTIFF DEFLATE tiles", "GeoTIFF LERC tiles", "COG JPEG", "SVS JPEG", "generic pyramid",
    "OME-TIFF RGB LZW", "OME-Zarr v3 in shards", "OME-Zarr v2 in a zip", "PNG RGB", "JPEG 2000",
)  # fmt: skip
BROKEN_EVERY = 50


@dataclass
class Flatness:
    """Memory, open files and threads of one process during prediction."""

    images: int = 0
    failed: int = 0  # on purpose, or not
    broken: int = 0  # on purpose
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    megabytes: list[float] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def warm(self, values: list[Any]) -> list[Any]:
        """Return the samples taken after the caches were full."""
        return values[int(len(values) * WARM) :]

    @property
    def grown(self) -> float:
        """Return the growth in MB from the first to the last quarter of the warm samples."""
        warm = self.warm(self.megabytes)
        quarter = max(len(warm) // 4, 1)
        return statistics.median(warm[-quarter:]) - statistics.median(warm[:quarter])

    @property
    def handles_grown(self) -> int:
        """Return the growth of the maximum number of open files."""
        warm = self.warm(self.handles)
        quarter = max(len(warm) // 4, 1)
        return max(warm[-quarter:]) - max(warm[:quarter])


def predict_for_hours(folder: Path, count: int = COUNT, say: Any = print) -> Flatness:
    """Predict `count` images in this process."""
    from soak_images import make_bases
    from soak_kills import make_batch

    from tnetcli.prediction.batch import ExecutionConfig, predict_images

    make_batch(folder, images=0)
    places = []
    for number, base in enumerate(make_bases(folder / "made", FORMATS)):
        base.write(folder / "bases" / str(number), base.files)
        places.append((folder / "bases" / str(number), base.entry))
    (folder / "broken").mkdir()
    (folder / "broken" / "image.tif").write_bytes(b"II*\0" + bytes(60))
    found = Flatness(broken=count // BROKEN_EVERY)
    images = list(_images(folder, places, count))
    start, cpu = time.monotonic(), time.process_time()
    step = max(count // SAMPLES, 1)
    output = folder / "records.jsonl"
    for record in predict_images(
        images, folder / "m.safetensors", execution=ExecutionConfig("cpu", 1, 8), output=output
    ):
        found.images += 1
        found.failed += record.status != "ok"
        if found.images % step == 0:
            found.megabytes.append(status("VmRSS") / 1e3)
            found.handles.append(len(os.listdir("/proc/self/fd")))
            found.threads.append(len(os.listdir("/proc/self/task")))
            if found.images % (20 * step) == 0:
                rate = found.images / (time.monotonic() - start)
                say(f"{found.images} images, {rate:.0f} a second, {found.megabytes[-1]:.0f} MB, "
                    f"{found.handles[-1]} files")  # fmt: skip
    found.seconds, found.cpu_seconds = time.monotonic() - start, time.process_time() - cpu
    return found


def _images(folder: Path, places: list[tuple[Path, str]], count: int) -> Iterator[Any]:
    """Yield images with distinct paths, so that no cache treats them as equal."""
    from tnetcli.data.images import Image
    from tnetcli.readers.base import ReadOptions

    links = folder / "links"
    links.mkdir()
    for number in range(count):
        place, entry = places[number % len(places)]
        if number % BROKEN_EVERY == BROKEN_EVERY - 1:
            place, entry = folder / "broken", "image.tif"
        link = links / f"{number:06}"
        link.symlink_to(place)
        path = str(link / entry if entry else link)
        yield Image(path, path, path, ReadOptions())

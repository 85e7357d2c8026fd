"""Make small synthetic slides: tissue on glass with nests of cells, benign or malignant.

python examples/make_slides.py slides [--slides 120] [--seed 0]

Nuclei are small in benign slides and large in malignant ones, and cover the same fraction of a
nest: at low resolution both have the same colour. slides/manifest.csv has the label, the patient
(two slides each), the boxes of the nests, and a third of the patients as test split. The slides are
drawn; a model trained on them knows nothing about real tissue.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image, ImageDraw, ImageFilter

WIDTH, HEIGHT, TILE = 2048, 1536, 256
MICRONS_PER_PIXEL = 0.5
GLASS, TISSUE, NUCLEUS = (243, 242, 244), (226, 172, 198), (92, 52, 128)
NEST = 110  # radius in pixels
SMALL, LARGE = 4, 9  # radius of a nucleus, in pixels
COVERED = 0.3  # fraction of a nest, so that both kinds have the same mean colour
OVERVIEWS = (4, 16)


def draw(random: np.random.Generator, malignant: bool) -> tuple[Image.Image, str]:
    """Return a slide and the boxes of its nests."""
    tissue = draw_tissue(random)
    cells = grain(random, TISSUE, 9)
    pen = ImageDraw.Draw(cells)
    inside = np.argwhere(np.asarray(tissue.resize((WIDTH // 16, HEIGHT // 16))) > 128) * 16
    for y, x in random.choice(inside, 400) + random.uniform(0, 16, (400, 2)):
        dot(pen, random, x, y, SMALL)
    nests = apart(random, inside, int(random.integers(3, 5)))
    radius = LARGE if malignant else SMALL
    for y, x in nests:
        for _ in range(int(COVERED * (NEST / radius) ** 2)):
            angle, distance = random.uniform(0, 2 * np.pi), NEST * np.sqrt(random.uniform())
            dot(pen, random, x + distance * np.cos(angle), y + distance * np.sin(angle), radius)
    slide = Image.composite(cells, grain(random, GLASS, 2), tissue)
    boxes = [f"{x - NEST} {y - NEST} {x + NEST} {y + NEST}" for y, x in nests]
    return slide.filter(ImageFilter.GaussianBlur(0.7)), ";".join(boxes)


def draw_tissue(random: np.random.Generator) -> Image.Image:
    """Return a tissue mask: a few smooth pieces away from the edge."""
    coarse = Image.fromarray(random.uniform(0, 255, (6, 8)).astype(np.uint8))
    smooth = np.asarray(coarse.resize((WIDTH // 16, HEIGHT // 16), Image.Resampling.BICUBIC))
    across, down = np.linspace(-1, 1, smooth.shape[1]), np.linspace(-1, 1, smooth.shape[0])
    middle = 1 - np.maximum(np.abs(across)[None], np.abs(down)[:, None])
    mask = Image.fromarray(np.where(smooth * np.minimum(3 * middle, 1) > 95, 255, 0).astype("u1"))
    return mask.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)


def grain(
    random: np.random.Generator, colour: tuple[int, int, int], deviation: float
) -> Image.Image:
    """Return a colour with noise."""
    noise = random.normal(0, deviation, (HEIGHT // 2, WIDTH // 2, 1)) + np.array(colour)
    small = Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8))
    return small.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)


def dot(pen: ImageDraw.ImageDraw, random: np.random.Generator, x: float, y: float, r: int) -> None:
    """Draw a nucleus."""
    wide, high = r * random.uniform(0.8, 1.2, 2)
    colour = tuple(int(each + random.integers(-12, 13)) for each in NUCLEUS)
    pen.ellipse((x - wide, y - high, x + wide, y + high), fill=colour)


def apart(random: np.random.Generator, places: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Return a few places that overlap neither one another nor the edge of the slide."""
    found: list[tuple[int, int]] = []
    for y, x in random.permutation(places):
        near = any((y - v) ** 2 + (x - u) ** 2 < (2.5 * NEST) ** 2 for v, u in found)
        within = NEST < x < WIDTH - NEST and NEST < y < HEIGHT - NEST
        if within and not near:
            found.append((int(y), int(x)))
        if len(found) == count:
            break
    return found


def write(path: Path, slide: Image.Image) -> None:
    """Write an Aperio SVS with overviews."""
    text = "Aperio Image Library\r\n" + (
        f"{WIDTH}x{HEIGHT} [0,0 {WIDTH}x{HEIGHT}] ({TILE}x{TILE}) JPEG/RGB Q=85"
        f"|AppMag = 20|MPP = {MICRONS_PER_PIXEL}"
    )
    options = {
        "tile": (TILE, TILE), "compression": "jpeg", "compressionargs": {"level": 85},
        "photometric": "rgb", "metadata": None, "software": False,
    }  # fmt: skip
    with tifffile.TiffWriter(path) as file:
        file.write(np.asarray(slide), description=text, **options)
        for factor in OVERVIEWS:
            file.write(np.asarray(slide.reduce(factor)), description=text, **options)


def make(folder: Path, slides: int, seed: int) -> None:
    """Write slides, half of them malignant, and their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [("path", "label", "split", "group", "box")]
    for number in range(slides):
        random = np.random.default_rng((seed, number))
        patient = number // 2
        label = ("benign", "malignant")[patient % 2]
        slide, boxes = draw(random, label == "malignant")
        write(folder / f"{number:03d}.svs", slide)
        split = "test" if patient % 3 == 2 else ""
        rows.append((f"{number:03d}.svs", label, split, f"patient-{patient:02d}", boxes))
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slides", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.slides, arguments.seed)
    print(f"{arguments.folder / 'manifest.csv'}: {arguments.slides} slides")

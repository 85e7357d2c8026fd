"""Make synthetic labelled tiles: fields, woods, meadows, villages and solar parks.

python examples/make_tiles.py tiles [--tiles 40] [--seed 0]

One folder per class, as in EuroSAT; `tnet synth --kind tiles` composes scenes from them. Villages
and solar parks have the same mean colour and differ at high resolution only. The tiles are drawn; a
model trained on them knows nothing about real land.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIDE = 64  # pixels
GROUND = {
    "field": (132, 124, 88),
    "wood": (48, 74, 52),
    "meadow": (96, 120, 70),
    "village": (104, 112, 84),
    "solar": (104, 112, 84),
}
DARK, BRIGHT = (52, 58, 74), (172, 160, 148)  # of objects, in equal parts
ROW, BUILDING = 8, 9  # width of a row of panels and of a building, in pixels


def draw(kind: str, random: np.random.Generator) -> Image.Image:
    """Return a tile."""
    shade = random.normal(0, 5) + random.normal(0, 5, (SIDE, SIDE, 1))
    tile = Image.fromarray(np.clip(np.array(GROUND[kind]) + shade, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(tile)
    if kind == "field":
        x, y = random.integers(8, SIDE - 8, 2)
        pen.line((x, 0, x, SIDE), fill=(116, 110, 80), width=2)
        pen.line((0, y, SIDE, y), fill=(116, 110, 80), width=2)
    if kind == "wood":
        for x, y in random.uniform(0, SIDE, (60, 2)):
            pen.ellipse((x - 2, y - 2, x + 2, y + 2), fill=(34, 58, 40))
    if kind == "solar":
        for number, y in enumerate(range(0, SIDE, ROW)):
            pen.rectangle((0, y, SIDE, y + ROW // 2), fill=(DARK, BRIGHT)[number % 2])
    if kind == "village":
        for number, (x, y) in enumerate(random.uniform(0, SIDE - BUILDING, (28, 2))):
            pen.rectangle((x, y, x + BUILDING, y + BUILDING), fill=(DARK, BRIGHT)[number % 2])
    return tile.filter(ImageFilter.GaussianBlur(0.8))


def make(folder: Path, tiles: int, seed: int) -> None:
    """Write `tiles` tiles of each class."""
    random = np.random.default_rng(seed)
    for kind in GROUND:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for number in range(tiles):
            draw(kind, random).save(folder / kind / f"{kind}_{number}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiles", type=int, default=40, help="tiles per class")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.tiles, arguments.seed)
    print(f"{arguments.folder}: {len(GROUND)} classes of {arguments.tiles} tiles")

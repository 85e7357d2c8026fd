"""Read two windows of an image and print how many pixels were decoded.

python examples/read_window.py scene.tif window.png
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import tnetcli
from tnetcli import Size, Window

VIEW = Size(224, 224)


def main(image: str, picture: Path) -> None:
    """Save the whole image and a window of its upper right quarter side by side."""
    with tnetcli.open(image) as reader:
        width, height = reader.size.width, reader.size.height
        close = Window(0.66 * width, 0.22 * height, width / 8, height / 8)
        views = [reader.read(window, VIEW) for window in (Window.whole(reader.size), close)]
        valid = ", ".join(f"{view.valid.mean():.0%}" for view in views)
        fraction = reader.cost.pixels_decoded / reader.size.pixels
        print(f"{image}: {reader.size} pixels, two views of {VIEW}, valid: {valid}")
        print(f"decoded {reader.cost.pixels_decoded} pixels, {fraction:.2%} of the image")
    side_by_side = np.concatenate([view.values[:3] for view in views], axis=2)  # (3, 224, 448)
    picture.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(side_by_side.transpose(1, 2, 0)).save(picture)
    print(picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    main(arguments.image, arguments.picture)

"""Walk a scene with a model of random weights: see which windows are read, and how little that is.

python examples/walk_scene.py scene.tif

Where it looks means nothing before the model is trained; how it looks is the same.
"""

import argparse

import torch

from tnetcli import open_image
from tnetcli.looking import Looker
from tnetcli.models.registry import build_model
from tnetcli.normalisation import Normalisation
from tnetcli.recording import Maker, record_sight
from tnetcli.traversal import Plan

CLASSES = ("field", "forest", "lake", "village")


def main(image: str) -> None:
    """Look at three levels of one image and print what was looked at."""
    torch.manual_seed(0)
    model = build_model("tnet", {"backbone": "mobilenetv3_small_100"}, classes=len(CLASSES))
    normalisation = Normalisation.to_unit_range("uint8", bands=3)
    with open_image(image) as reader, Looker(model, normalisation) as looker:
        (sight,) = looker.look([reader], Plan(levels=3, keep=(2, 1)))
        if isinstance(sight, Exception):
            raise sight
        record = record_sight(sight, reader, id=image, maker=Maker("random", "", CLASSES))
    for window in record.windows:
        left, top, right, bottom = window.box
        where = f"{left:7.0f} {top:7.0f} {right:7.0f} {bottom:7.0f}"
        print(f"{window.path:14} {where}  attention {window.attention:.3f}")
    print(f"decoded {record.cost.pixels_decoded} pixels, {record.cost.fraction_decoded:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image")
    main(parser.parse_args().image)

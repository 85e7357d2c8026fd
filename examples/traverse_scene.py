"""Traverse a scene with an untrained model and print the regions that are read.

python examples/traverse_scene.py scene.tif

The choice of regions is random before the model is trained; the traversal is the same.
"""

import argparse

import torch

from tnetcli.data.normalize import Normalisation
from tnetcli.models.registry import build_model
from tnetcli.prediction.inference import Inference, record_result
from tnetcli.readers.detect import open_image
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import build_policy

CLASSES = ("field", "forest", "lake", "village")


def main(image: str) -> None:
    """Traverse three levels of one image and print the regions that were read."""
    torch.manual_seed(0)
    model = build_model("tnet", {"backbone": "mobilenetv3_small_100"}, classes=len(CLASSES))
    normalisation = Normalisation.to_unit_range("uint8", bands=3)
    config = TraversalConfig(levels=3, keep=(2, 1))
    with open_image(image) as reader, Inference(model, normalisation) as inference:
        (result,) = inference.run([reader], config, [build_policy(config)])
        if isinstance(result, Exception):
            raise result
        record = record_result(result, reader, image=image, id=image, classes=CLASSES)
    for window in record.windows:
        left, top, right, bottom = window.box
        where = f"{left:7.0f} {top:7.0f} {right:7.0f} {bottom:7.0f}"
        print(f"{window.path:14} {where}  attention {window.attention:.3f}")
    print(f"decoded {record.cost.pixels_decoded} pixels, {record.cost.fraction_decoded:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image")
    main(parser.parse_args().image)

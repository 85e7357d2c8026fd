"""Classify an image in Python and print the regions that were read.

python examples/predict_scene.py scene.tif
"""

import sys

import tnetcli

prediction = tnetcli.predict(sys.argv[1], levels=3)
print(f"{prediction.label} ({prediction.probability:.1%}), {len(prediction.windows)} regions")
for window in prediction.windows:
    left, top, right, bottom = window.box
    print(f"level {window.level}: {left:.0f} {top:.0f} {right:.0f} {bottom:.0f}  {window.label}")

"""Make the pictures of docs/overlays.md.

    tnet predict scene.tif --levels 3 -o scene.jsonl && tnet export scene.jsonl -o scene.geojson
    QT_QPA_PLATFORM=offscreen /usr/bin/python3 docs/make_overlay_pictures.py qgis \
        scene.tif scene.geojson docs/pictures/qgis.png
    python docs/make_overlay_pictures.py frames docs/pictures/qupath-frames.png

The first is rendered by QGIS and needs its Python (Debian: python3-qgis); the second is drawn with
matplotlib.
"""

import sys

WIDTH = 640  # pixels
# The expressions of docs/overlays.md: data-defined properties of a simple fill.
STYLE = {
    "FillColor": 'set_color_part("fill", \'alpha\', 255 * "fill-opacity")',
    "StrokeColor": '"stroke"',
    "StrokeWidth": 'if("level" = 1, 0.3, 0.4 + 2 * "attention")',
}


def qgis(scene: str, overlay: str, picture: str) -> None:
    """Open a scene and its overlay in QGIS without options, style the overlay, and render both."""
    from qgis.core import (
        Qgis,
        QgsApplication,
        QgsCoordinateTransform,
        QgsMapRendererParallelJob,
        QgsMapSettings,
        QgsProject,
        QgsProperty,
        QgsRasterLayer,
        QgsSymbolLayer,
        QgsVectorLayer,
    )
    from qgis.PyQt.QtCore import QSize

    application = QgsApplication([], False)
    application.initQgis()
    below = QgsRasterLayer(scene, "scene")
    above = QgsVectorLayer(overlay, "overlay")  # the path only, as when it is dropped onto the map
    if not below.isValid() or not above.isValid():
        sys.exit("QGIS cannot open the files")
    fill = above.renderer().symbol().symbolLayer(0)
    for name, expression in STYLE.items():
        key = getattr(QgsSymbolLayer, f"Property{name}")
        fill.setDataDefinedProperty(key, QgsProperty.fromExpression(expression))
    there = QgsCoordinateTransform(above.crs(), below.crs(), QgsProject.instance())
    print(f"QGIS {Qgis.QGIS_VERSION}, {above.featureCount()} regions in {above.crs().authid()}")
    print(f"farthest corner: {_farthest_corner(above, below, there):.4f} pixels")
    settings = QgsMapSettings()
    settings.setLayers([above, below])
    settings.setDestinationCrs(below.crs())
    around = below.extent()
    around.scale(1.04)
    settings.setExtent(around)
    settings.setOutputSize(QSize(WIDTH, WIDTH))
    job = QgsMapRendererParallelJob(settings)
    job.start()
    job.waitForFinished()
    job.renderedImage().save(picture)
    application.exitQgis()


def _farthest_corner(above, below, there) -> float:
    """Return the largest distance of a corner from `col_off` and `row_off`, in pixels."""
    around, across, down = below.extent(), below.width(), below.height()
    farthest = 0.0
    for feature in above.getFeatures():
        shape = feature.geometry()
        shape.transform(there)
        points = [
            (
                (point.x() - around.xMinimum()) / around.width() * across,
                (around.yMaximum() - point.y()) / around.height() * down,
            )
            for point in shape.vertices()
        ]
        x, y = feature["col_off"], feature["row_off"]
        for corner_x in (x, x + feature["width"]):
            for corner_y in (y, y + feature["height"]):
                nearest = min(max(abs(a - corner_x), abs(b - corner_y)) for a, b in points)
                farthest = max(farthest, nearest)
    return farthest


def frames(picture: str) -> None:
    """Draw the origins of both frames of a slide with bounds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Ellipse, Rectangle

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.9), width_ratios=(1.9, 1), layout="constrained"
    )
    slide, offset, size = (1000, 640), (420, 180), (460, 380)
    x, y, side = 640, 300, 120
    left.set_title("the whole slide: -O frame=level0", fontsize=10)
    left.add_patch(Rectangle((0, 0), *slide, facecolor="#f2f2f2", edgecolor="#444444"))
    left.add_patch(Rectangle(offset, *size, facecolor="white", edgecolor="#0072b2", linestyle="--"))
    left.annotate("", offset, (0, 0), arrowprops={"arrowstyle": "->", "color": "#0072b2"})
    left.text(
        24, 330, "tnet.offset = [420, 180]\n(openslide.bounds-x, -y)", color="#0072b2", size=9
    )
    left.text(offset[0] + 6, offset[1] - 10, "bounds", color="#0072b2", size=9)
    right.set_title("as QuPath shows it: -O frame=qupath", fontsize=10)
    right.add_patch(Rectangle((0, 0), *size, facecolor="white", edgecolor="#0072b2"))
    for axes, (dx, dy) in ((left, (0, 0)), (right, offset)):
        place = x - dx, y - dy
        tissue = (offset[0] + size[0] / 2 - dx, offset[1] + size[1] / 2 - dy)
        axes.add_patch(Ellipse(tissue, 380, 290, facecolor="#e8c4d8", edgecolor="none"))
        axes.add_patch(Rectangle(place, side, side, fill=False, edgecolor="#d55e00", linewidth=2))
        axes.plot(*place, "o", color="#d55e00", markersize=5)
        axes.text(place[0], place[1] - 12, f"[{place[0]}, {place[1]}]", color="#a04000", size=9)
        axes.plot(0, 0, "s", color="black", markersize=5)
        axes.text(6, -12, "[0, 0]", size=9)
        axes.set_aspect("equal")
        axes.axis("off")
    left.set(xlim=(-20, 1020), ylim=(670, -50))
    right.set(xlim=(-20, 480), ylim=(410, -50))
    figure.savefig(picture, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    {"qgis": qgis, "frames": frames}[sys.argv[1]](*sys.argv[2:])

"""Fill in the numbers of README.md from benchmarks/RESULTS.md; a test checks that they agree.

`make docs` runs it. It writes the blocks between the comments `<!-- figures -->`, `<!-- digits -->`
and `<!-- families -->`. The rest of the page is written by hand.
"""

import re
import textwrap
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md"
UNKNOWN = "not measured yet"
# Family, what it reads, small recipe, published recipes; the rest is measured.
FAMILIES = (
    ("tnet", "cells of cells, chosen by a policy trained with REINFORCE", "tnet-digits",
     "tnet-imagenet, tnet-fmow, tnet-cub-b0, tnet-nabirds-b0"),
    ("anchornet", "patches with evidence for a class (LSP)", "anchornet-digits",
     "anchornet-imagenet"),
    ("two_stream", "the whole image, and regions in recurrent steps", "two-stream-digits",
     "two-stream-cub"),
    ("saccader", "glimpses of one feature map", "saccader-digits", "saccader-imagenet"),
    ("dram", "a sequence of glimpses", "dram-digits", "dram-imagenet"),
    ("whole, all pixels", "the whole image, once", "whole-digits",
     "whole-bagnet77, whole-b0, whole-cub-b0, whole-nabirds-b0"),
    ("whole, small view", "the whole image at a quarter of its side", "whole-digits", ""),
)  # fmt: skip
MEASURED = ("accuracy, %", "seeds", "multiplications, M", "training, CPU min")

Rows = list[dict[str, str]]


def read_results(text: str) -> dict[str, Rows]:
    """Return the tables of RESULTS.md by section; rows as dicts by column name."""
    sections = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", text, re.S)
    return {name: _read_table(section) for name, section in sections}


def _read_table(text: str) -> Rows:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(cells[0], row, strict=False)) for row in cells[1:]]


def look_up(results: dict[str, Rows], section: str, name: str, measure: str) -> str:
    """Return one value as written in RESULTS.md."""
    rows = [
        row["value"]
        for row in results[section]
        if (row["format"], row["measure"]) == (name, measure)
    ]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows `{name}`, `{measure}` in {section}")
    return rows[0]


def figures(results: dict[str, Rows]) -> str:
    """Return the five highlights, each with a measured number and its command."""
    value = partial(look_up, results)

    def landscapes(measure: str) -> str:
        return value("learning", "EuroSAT landscapes", f"accuracy, {measure}")

    def share(format_: str) -> str:
        part = float(value("readers", format_, "one 224 px window, ours / bare"))
        return f"{100 * part:.0f} %"

    decoded = value("predict", "1 gigapixel", "decoded, of all pixels")
    sweep = float(value("traversal", "5 regions", "sweep / traversal, CPU time"))
    largest = f"{_regions(results):,} regions"
    sentences = (
        f"**Reads almost nothing**: a prediction with 8 regions decodes {decoded} of the pixels of "
        "a gigapixel scene (`python benchmarks/predict.py`).",
        f"**Fast**: encoding every tile of that scene takes {sweep:,.0f} times the CPU time of a "
        "traversal with 5 regions (`python benchmarks/traversal.py`).",
        "**Learns where to read from image labels**: on landscapes of real Sentinel-2 tiles, 8 "
        f"regions classify {landscapes('8 regions')} of the scenes correctly, 8 random regions "
        f"{landscapes('8 random regions')}, a whole-image model {landscapes('whole image')} "
        "(`python benchmarks/learning.py`, three seeds, after a warm-up on labelled tiles).",
        "**One reader interface** for GeoTIFF, SVS, NDPI, DICOM, OME-TIFF and OME-Zarr: reading a "
        f"window of a JPEG COG takes {share('COG JPEG')} of rasterio's CPU time, of an SVS slide "
        f"{share('SVS slide')} of OpenSlide's (`python benchmarks/readers.py`).",
        "**Explains itself**: the regions that were read are exported as GeoJSON for QGIS and "
        f"QuPath, figures, HTML and heat maps. A heat map of {largest} is a COG of "
        f"{value('heatmap', largest, 'file')} (`python benchmarks/heatmap.py`).",
    )
    return "".join(f"{_fill(f'- {each}', '  ')}\n" for each in sentences)


def digits(results: dict[str, Rows]) -> str:
    """Return the results of the training example on the page."""
    value = partial(look_up, results, "learning", "digits")
    minutes = float(value("training of a seed").split()[0])
    return (
        _fill(
            f"Training takes {minutes:.1f} minutes on one core. Six regions then classify "
            f"{value('accuracy, 6 regions')} of 300 test images correctly, six random regions "
            f"{value('accuracy, 6 random regions')}, and the level-1 view alone "
            f"{value('accuracy, level 1')}, which is chance (means of three seeds, "
            "`python benchmarks/learning.py`)."
        )
        + "\n"
    )


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 118, subsequent_indent=indent, break_on_hyphens=False)


def _regions(results: dict[str, Rows]) -> int:
    """Return the number of regions of the largest heat map."""
    return max(int(row["format"].split()[0].replace(",", "")) for row in results["heatmap"])


def families(results: dict[str, Rows]) -> str:
    """Return the table of families with accuracy and cost of their small recipes."""
    measured = {row["model"]: row for row in results.get("families", [])}
    lines = [
        "| family | reads | small recipe | accuracy, % (seeds) | multiplications, M "
        "| training, CPU min | published recipes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, reads, small, published in FAMILIES:
        row = measured.get(name, dict.fromkeys(MEASURED, UNKNOWN))
        accuracy, seeds, multiplications, minutes = (row[each] for each in MEASURED)
        if row[MEASURED[0]] != UNKNOWN:
            accuracy = f"{accuracy} ({seeds})"
        family = re.sub(r"^\w+", lambda word: f"`{word[0]}`", name)
        cells = (family, reads, _names(small), accuracy, multiplications, minutes)
        lines.append("| " + " | ".join((*cells, _names(published))) + " |")
    return "\n".join(lines) + "\n"


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ") if name)


def readme_page(page: str, text: str) -> str:
    """Return the page with the numbers of RESULTS.md's `text`."""
    results = read_results(text)
    for write in (figures, digits, families):
        name, made = write.__name__, write(results)
        between = re.compile(rf"(<!-- {name}\b[^\n]* -->\n).*?(<!-- /{name} -->)", re.S)
        page, count = between.subn(lambda found: found[1] + made + found[2], page)  # noqa: B023
        if count != 1:
            raise ValueError(f"README.md has {count} places for {name}")
    return page


if __name__ == "__main__":
    page, text = PAGE.read_text(encoding="utf-8"), RESULTS.read_text(encoding="utf-8")
    PAGE.write_text(readme_page(page, text), encoding="utf-8")

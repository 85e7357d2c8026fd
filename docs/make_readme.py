"""Fill in the figures of README.md from benchmarks/RESULTS.md; a test holds the two together.

`make docs` runs it. What it writes stands between comments: `<!-- figures -->`, `<!-- digits -->`
and `<!-- families -->`. The rest of the page is written by hand.
"""

import re
import textwrap
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md"
UNKNOWN = "not measured yet"
# Family, what it looks at, small recipe, published recipes; the rest is measured.
FAMILIES = (
    ("tnet", "cells of cells of the image, chosen from rewards", "tnet-digits",
     "tnet-imagenet, tnet-fmow, tnet-cub-b0, tnet-nabirds-b0"),
    ("anchornet", "patches that hold evidence for a class (LSP)", "anchornet-digits",
     "anchornet-imagenet"),
    ("two_stream", "the whole image, and its windows in steps", "two-stream-digits",
     "two-stream-cub"),
    ("saccader", "a few places of one map", "saccader-digits", "saccader-imagenet"),
    ("dram", "glimpses, one after another", "dram-digits", "dram-imagenet"),
    ("whole, all pixels", "the whole image, once", "whole-digits",
     "whole-bagnet77, whole-b0, whole-cub-b0, whole-nabirds-b0"),
    ("whole, small view", "the same at a quarter of its side", "whole-digits", ""),
)  # fmt: skip
MEASURED = ("accuracy, %", "seeds", "multiplications, M", "training, CPU min")

Rows = list[dict[str, str]]


def read_results(text: str) -> dict[str, Rows]:
    """Return the tables of RESULTS.md by section; cells by the names of their columns."""
    sections = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", text, re.S)
    return {name: _read_table(section) for name, section in sections}


def _read_table(text: str) -> Rows:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(cells[0], row, strict=False)) for row in cells[1:]]


def look_up(results: dict[str, Rows], section: str, name: str, measure: str) -> str:
    """Return one value as RESULTS.md has it."""
    rows = [
        row["value"]
        for row in results[section]
        if (row["format"], row["measure"]) == (name, measure)
    ]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows `{name}`, `{measure}` in {section}")
    return rows[0]


def figures(results: dict[str, Rows]) -> str:
    """Return five sentences with measured numbers, each with the command behind it."""
    value = partial(look_up, results)

    def landscapes(measure: str) -> str:
        return value("learning", "EuroSAT landscapes", f"accuracy, {measure}")

    def share(format_: str) -> str:
        part = float(value("readers", format_, "one 224 px window, ours / bare"))
        return f"{100 * part:.0f} %"

    decoded = value("predict", "1 gigapixel", "decoded, of all pixels")
    moves = value("predict", "1 gigapixel", "memory moves after the fifth by")
    sweep = float(value("traversal", "5 windows", "full sweep / walk, cpu time"))
    largest = f"{_windows(results):,} windows"
    sentences = (
        f"**Almost nothing is read.** Of a gigapixel scene {decoded} of the pixels are decoded to "
        f"look at 8 windows; over 50 such scenes memory moves by {moves} "
        "(`python benchmarks/predict.py`).",
        f"**Thousands of times less work.** To see every tile of it takes {sweep:,.0f} times the "
        "processor time of a walk of 5 windows (`python benchmarks/traversal.py`).",
        "**Where to look is learned from labels of whole images.** In landscapes of real "
        f"Sentinel-2 tiles {landscapes('8 windows')} are told right with 8 windows, "
        f"{landscapes('whole image')} by a model of the whole image, "
        f"{landscapes('8 random windows')} with windows drawn by chance; means of three seeds, "
        "after a warm-up on the labels of tiles (`python benchmarks/learning.py`).",
        "**One way to read them all**: GeoTIFF, SVS, NDPI, DICOM, OME-TIFF, OME-Zarr. A window of "
        f"a JPEG COG takes {share('COG JPEG')} of rasterio's processor time, one of a slide "
        f"{share('SVS slide')} of OpenSlide's (`python benchmarks/readers.py`; what is slower is "
        "listed there too).",
        "**Where it looked opens elsewhere**: GeoJSON for QGIS and QuPath, figures, pages, "
        f"tables. A heat map of {largest} is a COG of {value('heatmap', largest, 'file')}, made in "
        f"{value('heatmap', largest, 'peak memory of the process')} of memory "
        "(`python benchmarks/heatmap.py`).",
    )
    return "".join(f"{_fill(f'- {each}', '  ')}\n" for each in sentences)


def digits(results: dict[str, Rows]) -> str:
    """Return what comes of the training that the page shows."""
    value = partial(look_up, results, "learning", "digits")
    return (
        _fill(
            f"That takes {float(value('training of a seed').split()[0]):.1f} minutes of one "
            f"core. Of 300 test images {value('accuracy, 6 windows')} are then told right with six "
            f"windows, {value('accuracy, 6 random windows')} with six drawn by chance, and "
            f"{value('accuracy, level 1')} from the whole image alone, which is chance (means of "
            "three seeds, `python benchmarks/learning.py`)."
        )
        + "\n"
    )


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def _windows(results: dict[str, Rows]) -> int:
    """Return how many windows the largest heat map has."""
    return max(int(row["format"].split()[0].replace(",", "")) for row in results["heatmap"])


def families(results: dict[str, Rows]) -> str:
    """Return the table of families: recipes, and what the small ones score and cost."""
    measured = {row["model"]: row for row in results.get("families", [])}
    lines = [
        "| family | looks at | small recipe | accuracy, % (seeds) | million multiplications "
        "| training, CPU min | published runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, looks_at, small, published in FAMILIES:
        row = measured.get(name, dict.fromkeys(MEASURED, UNKNOWN))
        accuracy, seeds, multiplications, minutes = (row[each] for each in MEASURED)
        if row[MEASURED[0]] != UNKNOWN:
            accuracy = f"{accuracy} ({seeds})"
        family = re.sub(r"^\w+", lambda word: f"`{word[0]}`", name)
        cells = (family, looks_at, _names(small), accuracy, multiplications, minutes)
        lines.append("| " + " | ".join((*cells, _names(published))) + " |")
    return "\n".join(lines) + "\n"


def caveat(text: str) -> str:
    """Return what has to be beaten before a score of the table says anything."""
    found = re.search(r"reach ([\d.]+ %) \(.+?\) and ([\d.]+ %) \(.+?\) on the same images", text)
    if found is None:
        return ""
    low, high = sorted(found.groups(), key=lambda each: float(each[:-1]))
    return (
        _fill(
            f"Linear classifiers of grey values, or of frequencies, reach {low} and {high} on the "
            "same images: only what is clearly above has read something."
        )
        + "\n"
    )


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ") if name)


def readme_page(page: str, text: str) -> str:
    """Return the page with the figures of RESULTS.md's `text` in it."""
    results = read_results(text)
    for write in (figures, digits, families):
        name, made = write.__name__, write(results)
        if write is families:
            made += f"\n{caveat(text)}" if caveat(text) else ""
        between = re.compile(rf"(<!-- {name}\b[^\n]* -->\n).*?(<!-- /{name} -->)", re.S)
        page, count = between.subn(lambda found: found[1] + made + found[2], page)  # noqa: B023
        if count != 1:
            raise ValueError(f"README.md has {count} places for {name}")
    return page


if __name__ == "__main__":
    page, text = PAGE.read_text(encoding="utf-8"), RESULTS.read_text(encoding="utf-8")
    PAGE.write_text(readme_page(page, text), encoding="utf-8")

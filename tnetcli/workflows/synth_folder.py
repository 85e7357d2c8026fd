"""The folder that made-up images go to: known by its settings, and never half of an image."""

import csv
import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tnetcli.errors import OutputError
from tnetcli.files import open_regular
from tnetcli.json_text import parse_json
from tnetcli.output_file import folder_beside, write_whole
from tnetcli.scenes.base import Scene
from tnetcli.wording import one_line, reason
from tnetcli.workflows.scene_files import FORMATS, Advance, put

SETTINGS, MANIFEST, IMAGES = "synth.json", "manifest.csv", "images"
COLUMNS = ("path", "label", "split", "id", "group", "box")
MOST_BYTES = 2**20  # of the settings
OURS = re.compile(r"\d{5,}\.(tif|ome\.zarr|png|jpg)|\.tnet-\w+")


def prepare_folder(out: Path, described: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the folder, or find it made with the same settings."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"`{out}` is not a folder", hint="choose another name")
    before = _read_settings(out / SETTINGS)
    if overwrite:
        _clear(out)
    elif before is None and out.exists() and any(out.iterdir()):
        raise OutputError(
            f"`{out}` is not empty, and not from tnet synth",
            hint="choose another name, or use --overwrite",
        )
    elif before is not None and before != described:
        changed = sorted(
            key for key in {*before, *described} if before.get(key) != described.get(key)
        )
        raise OutputError(
            f"`{out}` was made with other settings: {', '.join(changed)}",
            hint="choose another name, or use --overwrite",
        )
    (out / IMAGES).mkdir(parents=True, exist_ok=True)
    write_whole(out / SETTINGS, (json.dumps(described, indent=2) + "\n").encode())


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Return what an earlier run was told; None if there was none."""
    try:
        with open_regular(path) as file:
            found = parse_json(file.read(MOST_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"cannot read `{path}`: {reason(error)}", hint="remove it") from error
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _clear(out: Path) -> None:
    """Remove what an earlier run made, and nothing else."""
    for name in (SETTINGS, MANIFEST):
        (out / name).unlink(missing_ok=True)
    images = out / IMAGES
    for each in images.iterdir() if images.is_dir() else ():
        if OURS.fullmatch(each.name):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()


def write_image(
    scene: Scene, path: Path, kind: str, advance: Advance, *, placed: bool = False
) -> None:
    """Write one image, which appears whole or not at all; `placed` on the map if it can be."""
    from rasterio._err import CPLE_BaseError
    from rasterio.errors import RasterioError

    told = {"placed": placed} if kind == "cog" else {}
    try:
        with folder_beside(path, "the image") as folder:
            made = folder / path.name
            FORMATS[kind].write(scene, made, advance, **told)
            put(made, path)
    except (RasterioError, CPLE_BaseError) as error:
        problem = f"cannot write `{path}`: {one_line(error)}"
        raise OutputError(problem, hint="is there space left?") from error


def write_manifest(path: Path, rows: Sequence[tuple[str, ...]]) -> None:
    """Write the rows below the names of the columns."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())

"""Records, lists, models, caches and clusters of others: S4, S8, S11, S13, S14, S16, S17."""

import csv
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from tests.hostile.bombs import write_files, zarr_v2
from tests.hostile.case import Case, Ended, Place, image, step, write_tiff
from tests.hostile.drivers import mrf

DEEP = 100_000  # brackets, far more than Python's stack holds
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
PASSWORD, SIGNATURE = "hunter2", "c0ffee5ec2e7"
QUERY = f"?X-Amz-Signature={SIGNATURE}&sig={SIGNATURE}"
FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1+1)")
FLAT = 4_352  # pixels a side: too many to be seen whole without a copy
MONTH = 30 * 24 * 3600  # seconds
ANOTHER_USER = 54_321


def record(image_path: str, **changes: Any) -> str:
    """Return a prediction as `tnet predict` writes it, with one window."""
    window = {
        "path": "root", "level": 1, "box": [0.0, 0.0, 512.0, 512.0], "attention": 1.0, "rank": 1,
        "share": 1.0, "label": "River", "probability": 0.9, "valid": 1.0,
        "probabilities": [0.1, 0.9],
    }  # fmt: skip
    facts = {
        "schema": "tnet.prediction/2", "image": image_path, "id": image_path, "status": "ok",
        "width": 512, "height": 512, "bands": 3, "reader": "raster", "georeference": None,
        "mpp": None, "offset": [0, 0],
        "provenance": {"model": "default", "sha256": "f" * 64, "version": "0.1.0", "config": {}},
        "fingerprint": "", "warnings": [], "label": "River", "probability": 0.9,
        "probabilities": {"Forest": 0.1, "River": 0.9}, "stop_reason": "native_resolution",
        "levels": [{"level": 1, "windows": 1, "label": "River", "probability": 0.9}],
        "windows": [window],
    }  # fmt: skip
    return json.dumps({**facts, **changes}) + "\n"


def labelled(image_path: str, label: str) -> str:
    """Return a prediction whose image, level and window have a label that is no plain text."""
    others = [each for each in (*FORMULAS, f"River{ESCAPE}", "\r=1+1") if each != label]
    level = {"level": 1, "windows": 1, "label": label, "probability": 0.9}
    window = {
        "path": "root", "level": 1, "box": [0.0, 0.0, 512.0, 512.0], "attention": 1.0, "rank": 1,
        "share": 1.0, "label": label, "probability": 0.9, "valid": 1.0,
    }  # fmt: skip
    classes = dict.fromkeys(others, 0.02) | {label: 0.9}
    return record(image_path, label=label, probabilities=classes, levels=[level], windows=[window])


def _records(*make: Callable[[Place], str]) -> Callable[[Place], object]:
    return lambda place: (place.images / "a.jsonl").write_text(
        "".join(each(place) for each in make)
    )


def _fetching(name: str, source: Callable[[Place], str], output: str) -> Case:
    """Return the case of a record that names an image elsewhere, shown with its pixels."""
    words = ("export", "{images}/a.jsonl", "-o", output)
    return Case(
        name, "S4", _records(lambda place: record(source(place))), (step(*words, codes=(0, 8)),)
    )


def _placed(name: str, crs: Callable[[Place], str], *words: str) -> Case:
    """Return the case of a record whose CRS is no CRS, but something that GDAL or PROJ opens."""

    def make(place: Place) -> None:
        os.mkfifo(place.images / "pipe")
        georeference = {"crs": crs(place), "transform": [10.0, 0.0, 5e5, 0.0, -10.0, 5e6]}
        text = record("a.tif", georeference=georeference)
        (place.images / "a.jsonl").write_text(text)

    return Case(name, "S4", make, (step("export", "{images}/a.jsonl", *words, codes=(7,)),))


GEOJSON, HEAT = ("-o", "out.geojson"), ("-o", "out.tif", "-f", "heatmap")
FETCHING = (
    _placed("crs-url-geojson", lambda place: f"{place.url}/crs", *GEOJSON),
    _placed("crs-url-heatmap", lambda place: f"{place.url}/crs", *HEAT),
    _placed("crs-vsicurl", lambda place: f"/vsicurl/{place.url}/crs", *GEOJSON),
    _placed("crs-pipe", lambda place: f"{place.images}/pipe", *HEAT),
    _placed("crs-init-pipe", lambda place: f"+init={place.images}/pipe:1", *GEOJSON),
    _placed("crs-grid-pipe", lambda place: f"+proj=longlat +nadgrids={place.images}/pipe", *HEAT),
    _fetching("export-url", lambda place: f"{place.url}/served/good.tif", "out.html"),
    _fetching("export-url-as-figure", lambda place: f"{place.url}/served/good.tif", "out.png"),
    _fetching("export-vsicurl", lambda place: f"/vsicurl/{place.url}/served/good.tif", "out.html"),
    _fetching(
        "export-vsicurl-past-the-proxy",
        lambda place: f"/vsicurl?proxy=&url={place.url}/served/good.tif", "out.html",
    ),
    Case(
        "export-mrf", "S1",
        lambda place: (
            (place.images / "scene.tif").write_text(mrf(place)),
            _records(lambda place: record(f"{place.images}/scene.tif"))(place),
        ),
        (step("export", "{images}/a.jsonl", "-o", "out.html", codes=(0, 3, 8)),),
    ),
)  # fmt: skip


def _scheduler(
    mode: int, *, folder: int = 0o755, owner: int | None = None
) -> Callable[[Place], object]:
    """Return how to write a scheduler file that another user could have written."""

    def make(place: Place) -> None:
        write_tiff(place.images / "good.tif")
        path = place.images / "scheduler.json"
        address = place.url.replace("http://", "tcp://")
        path.write_text(json.dumps({"type": "Scheduler", "id": "s", "address": address}))
        path.chmod(mode)
        place.images.chmod(folder)
        if owner is not None and os.geteuid() == 0:
            os.chown(path, owner, owner)
        elif owner is not None:
            path.chmod(0o666)  # only root can give a file away: one that others may write

    return make


CLUSTER = ("predict", "{images}/good.tif", "--scheduler", "{images}/scheduler.json",
           "-o", "out.jsonl")  # fmt: skip
CLUSTERS = tuple(
    Case(name, "S8", make, (step(*CLUSTER, codes=(2,)),))
    for name, make in (
        ("scheduler-file-for-all", _scheduler(0o666)),
        ("scheduler-file-for-the-group", _scheduler(0o664)),
        ("scheduler-file-of-another", _scheduler(0o644, owner=ANOTHER_USER)),
        ("scheduler-file-in-a-folder-for-all", _scheduler(0o644, folder=0o777)),
    )
)


def _flat(place: Place) -> None:
    """Write a private image that is too large to be seen whole without a copy."""
    path = place.images / "private.tif"
    values = np.zeros((FLAT, FLAT, 3), np.uint8)
    values[::64] = 90
    tifffile.imwrite(
        path, values, tile=(256, 256), compression="zlib", photometric="rgb", metadata=None
    )
    path.chmod(0o600)


def _open_files(folder: Path) -> Iterator[str]:
    """Yield what other users may read or write in a cache."""
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            yield f"{path.name} in the cache has mode {mode:o}"


def _cache_is_private(place: Place, ended: Sequence[Ended]) -> Iterator[str]:
    return _open_files(place.work / "cache")


def _copies(place: Place) -> list[Path]:
    return sorted((place.work / "cache" / "overviews").glob("*.tif"))


def _plant(place: Place) -> None:
    """Put MRF text where the copy of an image is expected."""
    for path in _copies(place):
        path.write_text(mrf(place))


def _plant_link(place: Place) -> None:
    """Put a link to a file of the user where the copy of an image is expected."""
    for path in _copies(place):
        path.unlink()
        path.symlink_to(place.victim / "profile")


def _shared_cache(place: Place) -> None:
    _flat(place)
    for folder in (place.work / "cache", place.work / "cache" / "overviews"):
        folder.mkdir()
        folder.chmod(0o777)


def _not_used_by_others(place: Place, ended: Sequence[Ended]) -> Iterator[str]:
    return _open_files(place.work / "cache") if ended[0].code == 0 else iter(())


PREDICT_FLAT = ("predict", "{images}/private.tif", "--quiet")
CACHES = (
    Case("cache-of-a-private-image", "S11", _flat, (step(*PREDICT_FLAT, codes=(0,)),),
         check=_cache_is_private),
    Case("cache-planted-mrf", "S11", lambda place: (_flat(place), mrf(place)),
         (step(*PREDICT_FLAT, codes=(0,)), step(*PREDICT_FLAT, codes=(0, 3, 7), before=_plant))),
    Case("cache-planted-link", "S11", _flat,
         (step(*PREDICT_FLAT, codes=(0,)),
          step(*PREDICT_FLAT, codes=(0, 3, 7), before=_plant_link))),
    Case("cache-for-all", "S11", _shared_cache, (step(*PREDICT_FLAT, codes=(0, 7)),),
         check=_not_used_by_others),
)  # fmt: skip


def _leaks(place: Place, ended: Sequence[Ended]) -> Iterator[str]:
    """Yield where a password or a signature of a URL can be read."""
    for each in ended:
        for secret in (PASSWORD, SIGNATURE):
            if secret in each.out + each.err:
                yield f"`tnet {each.words[0]}` shows {secret}"
    for path in place.work.glob("out.*"):
        for secret in (PASSWORD, SIGNATURE):
            if secret.encode() in path.read_bytes():
                yield f"{path.name} holds {secret}"


def _secret_url(place: Place, name: str) -> str:
    return f"{place.url}/served/{name}{QUERY}".replace("://", f"://alice:{PASSWORD}@")


def _with_url(place: Place) -> None:
    for name in ("good.tif", "lost.tif"):
        (place.images / name).write_text(_secret_url(place, name))  # a list of one
    lines = ["path,id", f"{_secret_url(place, 'lost.tif')},x", f"{_secret_url(place, 'a.tif')},x"]
    (place.images / "list.csv").write_text("\n".join(lines) + "\n")


GOOD = "{url}/served/good.tif" + QUERY
LOST = "{url}/served/lost.tif" + QUERY
URLS = (
    Case(
        "url-with-a-signature", "S13", lambda place: None,
        (
            step("info", GOOD, codes=(0,)),
            step("info", GOOD, "--json", codes=(0,)),
            step("predict", GOOD, "-o", "out.jsonl", codes=(0,)),
            step("export", "out.jsonl", "-o", "out.csv", codes=(0,)),
            step("export", "out.jsonl", "-O", "pixels=false", "-o", "out.html", codes=(0,)),
        ),
        may_request="/served", check=_leaks,
    ),
    Case(
        "url-with-a-signature-that-fails", "S13", lambda place: None,
        (
            step("info", LOST),
            step("predict", LOST, "-o", "out.jsonl"),
            step("predict", LOST, GOOD, "-o", "out.2.jsonl", codes=(8,)),
        ),
        may_request="/served", check=_leaks,
    ),
    Case(
        "url-with-a-password", "S13", lambda place: None,
        (
            step("info", "http://alice:hunter2@{host}/served/good.tif", codes=(0,)),
            step("predict", "http://alice:hunter2@{host}/served/good.tif", "-o", "out.jsonl",
                 codes=(0,)),
            step("predict", "http://alice:hunter2@{host}/served/lost.tif", "-o", "out.2.jsonl"),
        ),
        may_request="/served", check=_leaks,
    ),
    Case(
        "url-in-a-manifest", "S13", _with_url,
        (step("predict", "--manifest", "{images}/list.csv", "-o", "out.jsonl", codes=(3, 4)),),
        may_request="/served", check=_leaks,
    ),
)  # fmt: skip


def _formulas(place: Place, ended: Sequence[Ended]) -> Iterator[str]:
    """Yield cells that a spreadsheet would compute and signs that a terminal would obey."""
    for path in sorted(place.work.glob("out*.csv")):
        text = path.read_text()
        if any(ord(each) < 32 and each not in "\n\t" for each in text):
            yield f"{path.name} holds control characters"
        for row in csv.reader(text.splitlines()):
            yield from (
                f"{path.name} holds the formula {cell}"
                for cell in row
                if cell.startswith(("=", "+", "-", "@")) and not _is_number(cell)
            )
    yield from _escapes(place, ended)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _escapes(place: Place, ended: Sequence[Ended]) -> Iterator[str]:
    for each in ended:
        if "\x1b" in each.out + each.err:
            yield f"`tnet {each.words[0]}` prints ESC"


def _named_by_escape(place: Place) -> None:
    (place.images / f"a{ESCAPE}b.tif").write_bytes(b"II*\0")
    write_tiff(place.images / f"good{ESCAPE}.tif")


TEXTS = (
    Case(
        "csv-formulas", "S14",
        _records(
            *(lambda place, text=text: labelled(text, text) for text in FORMULAS),
            lambda place: labelled(f"a{ESCAPE}\r.tif", f"River{ESCAPE}"),
            lambda place: labelled("\t=1+1", "\r=1+1"),
        ),
        (
            step("export", "{images}/a.jsonl", "-o", "out.csv", codes=(0,)),
            step(
                "export", "{images}/a.jsonl", "-O", "per_image=true", "-o", "out2.csv", codes=(0,)
            ),
        ),
        check=_formulas,
    ),
    Case(
        "names-with-escape", "S14", _named_by_escape,
        (
            step("info", "{images}", codes=(8,)),
            step("predict", "{images}", "-o", "out.jsonl", codes=(8,)),
            step("export", "out.jsonl", "-O", "per_image=true", "-o", "out.csv", codes=(0, 8)),
        ),
        check=_formulas,
    ),
)  # fmt: skip


def _nested(name: str, before: str = "", after: str = "") -> Callable[[Place], object]:
    """Return how to write JSON that is nested deeply, and a sound image beside it."""

    def make(place: Place) -> None:
        write_tiff(place.images / "good.tif")
        (place.images / name).write_text(f"{before}{'[' * DEEP}{']' * DEEP}{after}\n")

    return make


def _nested_model(place: Place) -> None:
    write_tiff(place.images / "good.tif")
    header = ('{"__metadata__":' + "[" * DEEP + "]" * DEEP + "}").encode()
    content = struct.pack("<Q", len(header)) + header
    (place.images / "model.safetensors").write_bytes(content)


def _huge_header(place: Place) -> None:
    write_tiff(place.images / "good.tif")
    content = struct.pack("<Q", 2**62) + b"{}"
    (place.images / "model.safetensors").write_bytes(content)


def _nested_zarr(place: Place) -> None:
    attributes = b'{"multiscales": ' + b"[" * DEEP + b"]" * DEEP + b"}"
    write_files(place.images / "a.ome.zarr", {**zarr_v2(None, b""), ".zattrs": attributes})


RECORD = ('{"schema":"tnet.prediction/2", "image": "a", "id": "a", "status": "ok", "windows": ',
          "}")  # fmt: skip
NESTED = (
    Case("nested-records-export", "S14", _nested("a.jsonl", *RECORD),
         (step("export", "{images}/a.jsonl", "-o", "out.csv", codes=(4, 7)),
          step("export", "{images}/a.jsonl", "-o", "out.geojson", codes=(4, 7)))),
    Case("nested-records-merge", "S14", _nested("a.jsonl", *RECORD),
         (step("merge", "{images}/a.jsonl", "-o", "out.jsonl", codes=(4, 7)),)),
    Case("nested-records-resume", "S14",
         lambda place: (_nested("a.jsonl", *RECORD)(place),
                        (place.images / "a.jsonl").rename(place.work / "out.jsonl")),
         (step("predict", "{images}/good.tif", "-o", "out.jsonl", codes=(4, 7)),)),
    Case("nested-windows", "S14", _nested("a.jsonl", *RECORD),
         (step("predict", "{images}/good.tif", "--regions", "{images}/a.jsonl", codes=(4, 7)),)),
    Case("nested-recipe", "S14", _nested("a.yaml", "model: "),
         (step("train", "{images}/a.yaml", "-o", "run", codes=(4,)),)),
    Case("nested-labels", "S14", _nested("a.yaml", "data: "),
         (step("evaluate", "--model", "default", "--data", "{images}/a.yaml", codes=(4,)),)),
    Case("nested-model", "S14", _nested_model,
         (step("info", "{images}/good.tif", "--model", "{images}/model.safetensors",
               codes=(5,)),)),
    Case("model-with-a-huge-header", "S17", _huge_header,
         (step("info", "{images}/good.tif", "--model", "{images}/model.safetensors",
               codes=(5,)),)),
    Case("nested-scheduler-file", "S14", _nested("scheduler.json"),
         (step(*CLUSTER, codes=(2,)),)),
    image("nested-zarr", "S14", "a.ome.zarr", _nested_zarr),
)  # fmt: skip


STALE = (".tnet-00000000_1_0123456789abcdef.tmp", ".tnet-00000000_1_fedcba9876543210")
OTHERS = (
    ".tnet-mine",
    "tnet-00000000_1_0123456789abcdef.tmp",
    ".tnet-00000000_1_0123456789abcdefg.tmp",
)


def _left_behind(place: Place) -> None:
    """Leave what a process that was killed a month ago has left, and what only resembles it."""
    for folder in (place.work, place.work / "cache" / "overviews"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / STALE[0]).write_bytes(b"half")
        (folder / STALE[1]).mkdir()
        (folder / STALE[1] / "copy.tif").write_bytes(b"half")
        for name in OTHERS:
            (folder / name).write_bytes(b"mine")
        for name in (*STALE, *OTHERS):
            old = (folder / name).stat().st_mtime - MONTH
            os.utime(folder / name, (old, old))
    (place.work / "cache").chmod(0o700)


def _swept(place: Place, ended: Sequence[Ended]) -> Iterator[str]:
    for folder in (place.work, place.work / "cache" / "overviews"):
        for name in STALE:
            if (folder / name).exists():
                yield f"{folder.name}/{name} is still there"
        for name in OTHERS:
            if not (folder / name).exists():
                yield f"{folder.name}/{name} is gone"


def _killed(place: Place) -> None:
    _flat(place)
    _left_behind(place)
    _records(lambda place: record("a.tif"))(place)


SWEPT = (
    Case(
        "left-by-a-kill", "S16", _killed,
        (
            step("export", "{images}/a.jsonl", "-o", "out.csv", codes=(0,)),
            step(*PREDICT_FLAT, codes=(0,)),
        ),
        check=_swept,
    ),
)  # fmt: skip

CASES: tuple[Case, ...] = (
    *FETCHING, *CLUSTERS, *CACHES, *URLS, *TEXTS, *NESTED, *SWEPT
)  # fmt: skip

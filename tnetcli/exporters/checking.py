"""Whether an overlay is what QGIS, geojson.io, geopandas and QuPath open: `tnet export --check`."""

import hashlib
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from tnetcli.exporters import checking_shapes as shapes
from tnetcli.exporters.checking_layout import Found, Layout, OverlayFile
from tnetcli.exporters.checking_schema import complaints
from tnetcli.wording import counted, printable, shorten

MOST_PROBLEMS = 5
FRAMES = {"wgs84": "map", "qupath": "pixels", "level0": "pixels"}
PARTS = {"map": "map", "pixels": "pixel", "none": "empty"}  # as the schema names them
MAP_MARKS = {"path", "rank", "attention"}  # no other GeoJSON has all of them
SQUARE = [[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]]
Dialect: TypeAlias = Literal["map", "pixels", "both", "none", "foreign"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a good file holds; `notes` tell what is worth knowing all the same.

    `dialect` is `map` (RFC 7946) or `pixels` (QuPath), `both` in a text sequence of both, `none`
    without features, `foreign` for GeoJSON that somebody else wrote.
    """

    path: str
    dialect: Dialect
    layout: Layout
    features: int
    images: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = {
            "map": "longitude and latitude (RFC 7946)",
            "pixels": "pixels (QuPath)",
            "both": "longitude and latitude (RFC 7946) and pixels (QuPath)",
            "none": "nothing was looked at",
            "foreign": "GeoJSON that is not ours",
        }[self.dialect]
        of = "" if self.dialect == "foreign" else f" of {counted(self.images, 'image')}"
        first = f"{printable(self.path, 200)}: good, {counted(self.features, 'feature')}{of}"
        return "\n".join([f"{first}, {told}", *(f"note: {each}" for each in self.notes)])


def check_overlay(path: str | os.PathLike[str]) -> Checked:
    """Return what a file of GeoJSON holds, or raise OutputError with its first problems.

    Plain or compressed, a collection or a text sequence. What our writer made is held to the schema
    and to what a schema cannot say; what others made, to RFC 7946. Features are read one by one
    where each has a line of its own: memory follows their number by eight bytes each.
    """
    file = OverlayFile(path)
    check = _Check(file)
    for found in file.features():
        check.add(found)
    return check.done(os.fspath(path))


class _Check:
    """What was seen of a file so far."""

    def __init__(self, file: OverlayFile) -> None:
        self._file = file
        self._problems: list[str] = []
        self._notes: dict[str, tuple[str, int]] = {}  # where first, and how often
        self._dialects: set[str] = set()
        self._features = self._runs = 0
        self._image: Any = None
        self._ids = array("Q")
        self._has_boxes = False
        self._bbox: Any = file.members.get("bbox")
        if "tnet" in file.members:
            self._check_members()

    def add(self, found: Found) -> None:
        """Check one more feature."""
        self._features += 1
        feature = found.value
        if not isinstance(feature, dict) or feature.get("type") != "Feature":
            self._complain(str(found), f"{printable(shorten(feature), 60)} is no feature")
            return
        facts = (feature if self._file.layout == "sequence" else self._file.members).get("tnet")
        dialect = _dialect(feature.get("properties"), facts)
        self._dialects.add(dialect)
        if isinstance(feature.get("id"), str):
            self._ids.append(_digest(feature["id"]))
        if dialect == "foreign":
            self._check_foreign(found)
        else:
            self._check_ours(found, dialect, facts)

    def done(self, path: str) -> Checked:
        """Check what can be told at the end only, and return what was found."""
        members, ours = self._file.members, self._dialects - {"foreign"}
        is_foreign = "foreign" in self._dialects
        if self._file.layout == "collection":
            if "tnet" in members:
                self._check_sums(members)
            elif ours:
                self._complain("the collection", "no `tnet`")
            else:
                is_foreign = True
                for name in sorted(members.keys() - {"bbox", "name"}):
                    self._note(f"`{printable(name, 40)}` is no member of RFC 7946")
        for where, said in self._repeated():
            self._complain(where, said)
        self._end()
        dialect: Dialect = "none"
        if is_foreign:
            dialect = "foreign"
            self._note("nothing in it says that tnet wrote it")
        elif ours:
            dialect = "both" if len(ours) > 1 else "map" if "map" in ours else "pixels"
        facts = members.get("tnet")
        images = facts["images"] if isinstance(facts, dict) else self._runs
        return Checked(path, dialect, self._file.layout, self._features, images, self._told())

    def _check_members(self) -> None:
        """Check all members of our own collection but its features."""
        facts = self._file.members["tnet"]
        frame = facts.get("frame") if isinstance(facts, dict) else None
        empty = isinstance(facts, dict) and facts.get("images") == 0
        part = PARTS[
            "none" if empty else FRAMES.get(frame if isinstance(frame, str) else "", "map")
        ]
        whole = {"type": "FeatureCollection", "features": [], **self._file.members}
        for where, said in complaints(f"{part}Collection", whole):
            self._complain(f"the collection, {where}" if where else "the collection", said)

    def _check_sums(self, members: dict[str, Any]) -> None:
        self._end()
        if self._has_boxes and not shapes.is_box(self._bbox):
            self._complain("the collection, bbox", "is missing, or south is above north")
        if self._runs > members["tnet"]["images"]:
            self._complain("the collection, tnet.images", f"features are of {self._runs} images")

    def _check_ours(self, found: Found, dialect: str, facts: Any) -> None:
        feature, before = found.value, len(self._problems)
        rings = shapes.window_rings(feature.get("geometry"))
        part = PARTS[dialect] + ("Line" if self._file.layout == "sequence" else "Member")
        # Points take most of the time of a validator; the rings are looked at below instead.
        for where, said in complaints(part, feature if rings is None else _plain(feature)):
            self._complain(f"{found}, {where}" if where else str(found), said)
        ring_problem = shapes.map_ring_problem if dialect == "map" else shapes.pixel_ring_problem
        for said in filter(None, map(ring_problem, rings or ())):
            self._complain(f"{found}, geometry", said)
        if len(self._problems) > before:
            return  # of what is no window, nothing more can be said
        properties = feature["properties"]
        if dialect == "map":
            path, level, image = properties["path"], properties["level"], properties["image"]
            self._check_map(found, path, rings)
        else:
            path, level = properties["name"], properties["measurements"]["level"]
            image = properties["metadata"]["image"]
            if path != properties["metadata"]["path"]:
                self._complain(f"{found}, properties.name", "is not the path in metadata")
            if rings and isinstance(facts, dict) and not self._problems:
                self._look_outside(found, rings[0], facts)
        if level != path.count("/") + 1:
            self._complain(f"{found}, properties", f"level {level} does not fit the path {path}")
        if not self._runs or image != self._image:
            self._runs, self._image = self._runs + 1, image

    def _check_map(self, found: Found, path: str, rings: list[shapes.Points] | None) -> None:
        feature = found.value
        if not feature["id"].endswith(f"#{path}"):
            self._complain(f"{found}, id", f"does not end in the path {path}")
        box = feature.get("bbox")
        if rings is None:
            if box is not None:
                self._complain(f"{found}, bbox", "of no geometry")
        elif not shapes.is_box(box) or not shapes.box_holds_rings(box, rings):
            self._complain(f"{found}, bbox", "does not hold the geometry" if box else "is missing")
        else:
            self._has_boxes = True
            if shapes.is_box(self._bbox) and not shapes.box_holds(self._bbox, box):
                self._complain(f"{found}, bbox", "lies outside the bbox of the collection")

    def _look_outside(self, found: Found, ring: shapes.Points, facts: dict[str, Any]) -> None:
        x, y = facts["offset"] if facts["frame"] == "qupath" else (0, 0)
        left, top, right, bottom = *ring[0], *ring[2]
        if left < -x or top < -y or right > facts["width"] - x or bottom > facts["height"] - y:
            self._note("windows reach past the image", str(found))

    def _check_foreign(self, found: Found) -> None:
        feature = found.value
        if not isinstance(feature.get("properties", ""), dict | None):
            self._complain(f"{found}, properties", "is neither an object nor null")
        try:
            said = shapes.geometry_problem(feature.get("geometry", ""))
            odd = None if said else shapes.geometry_oddity(feature["geometry"])
        except RecursionError:
            said = "nested too deeply"
        if said:
            self._complain(f"{found}, geometry", said)
        elif odd:
            self._note(odd, str(found))

    def _repeated(self) -> Iterator[tuple[str, str]]:
        """Yield features whose id is that of one before; a second walk tells which they are."""
        digests = np.sort(np.frombuffer(self._ids, np.uint64)) if self._ids else np.zeros(0)
        twice = set(digests[1:][digests[1:] == digests[:-1]][:MOST_PROBLEMS].tolist())
        first: dict[str, int] = {}
        for found in self._file.features() if twice else ():
            id = found.value.get("id") if isinstance(found.value, dict) else None
            if not isinstance(id, str) or _digest(id) not in twice:
                continue
            if first.setdefault(id, found.number) == found.number:
                continue
            if "foreign" in self._dialects:
                self._note("features share an id", str(found))
            else:
                yield f"{found}, id", f"is that of feature {first[id]}"

    def _note(self, what: str, where: str = "") -> None:
        first, count = self._notes.get(what, (where, 0))
        self._notes[what] = first, count + 1

    def _told(self) -> tuple[str, ...]:
        return tuple(
            what + (f": {where}" if where else "") + (f" and {n - 1} more" if n > 1 else "")
            for what, (where, n) in self._notes.items()
        )

    def _complain(self, where: str, said: str) -> None:
        problem = f"{where}: {said}"
        if problem not in self._problems:
            self._problems.append(problem)
        if len(self._problems) >= MOST_PROBLEMS:
            self._end(" (there may be more)")

    def _end(self, more: str = "") -> None:
        if self._problems:
            self._file.refuse(
                f"is no good overlay: {'; '.join(self._problems)}{more}",
                hint="was it changed since? export it again with `tnet export`",
            )


def _dialect(properties: Any, facts: Any) -> str:
    """Say which rules a feature is under: as its file tells, or else as it looks."""
    frame = facts.get("frame") if isinstance(facts, dict) else None
    if isinstance(frame, str) and frame in FRAMES:
        return FRAMES[frame]
    keys = properties if isinstance(properties, dict) else {}
    metadata = keys.get("metadata")
    if "objectType" in keys and (facts or (isinstance(metadata, dict) and "path" in metadata)):
        return "pixels"
    return "map" if facts is not None or keys.keys() >= MAP_MARKS else "foreign"


def _plain(feature: dict[str, Any]) -> dict[str, Any]:
    """Return the same feature with the simplest coordinates of its kind."""
    geometry = feature["geometry"]
    simple: list[Any] = [SQUARE] if geometry["type"] == "Polygon" else [[SQUARE], [SQUARE]]
    return {**feature, "geometry": {**geometry, "coordinates": simple}}


def _digest(id: str) -> int:
    name = id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())

"""Random damage to an image: what bad disks, broken copies and faulty programs leave behind.

`Damaged.known` holds the pixels of every level that a reader must return if it returns any.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from soak_absurd import Random, Range, describing, place_in, spoil
from soak_images import Base
from soak_places import Place

from tnetcli.readers.base import Pixels


@dataclass(frozen=True)
class Known:
    """Correct pixels of a level; `free` marks pixels whose correct value is unknown."""

    pixels: Pixels
    free: NDArray[np.bool_]


@dataclass(frozen=True)
class Damaged:
    """A damaged image, and its correct pixels as far as they are known.

    `known` is None for a level whose pixels are unknown. `arguable` is True if bytes that describe
    the image were changed, so that its library is a better reference than the original.
    """

    kind: str
    note: str
    files: dict[str, bytes]
    known: tuple[Known | None, ...]
    arguable: bool = False


def damage(base: Base, others: Sequence[Base], random: Random) -> Damaged:
    """Return `base` with one random kind of damage."""
    kinds = list(KINDS)
    weights = np.array([weight for _, weight in KINDS.values()], float)
    while True:
        kind = kinds[random.choice(len(kinds), p=weights / weights.sum())]
        done = KINDS[kind][0](base, others, random)
        if done is not None and done.files != base.files:
            return done


def _pick(base: Base, random: Random) -> str:
    """Choose a file; half of the time one that describes the others."""
    data = {place.file for place in base.places}
    described = [name for name in base.files if name not in data]
    pool = described if described and random.random() < 0.5 else list(base.files)
    return str(random.choice(pool))


def _put(base: Base, name: str, content: bytes) -> dict[str, bytes]:
    return {**base.files, name: content}


def _flip(base: Base, others: Sequence[Base], random: Random) -> Damaged:
    """Flip one or several bits, anywhere or outside the pixels."""
    name = _pick(base, random)
    content = bytearray(base.files[name])
    where = describing(base, name) if random.random() < 0.5 else [(0, len(content))]
    count = int(random.choice([1, 1, 1, 2, 4, 16]))
    places = sorted({place_in(where, random) for _ in range(count)})
    for place in places:
        content[place] ^= 1 << int(random.integers(8))
    return _changed(base, "flipped bits", name, bytes(content), [(p, p + 1) for p in places])


def _changed(base: Base, kind: str, name: str, content: bytes, touched: Sequence[Range]) -> Damaged:
    """Return the damaged image after these ranges of a file were overwritten."""
    hit = [
        place
        for place in base.places
        if place.file == name
        and any(start < place.stop and stop > place.start for start, stop in touched)
    ]
    inside = all(
        any(place.start <= start and stop <= place.stop for place in hit) for start, stop in touched
    )
    arguable, lost = False, set()
    if not inside:
        spans = [span for span in base.spans if span.file == name]
        for start, stop in touched:
            if any(place.start <= start and stop <= place.stop for place in hit):
                continue
            about = {s.level for s in spans if s.start <= start and stop <= s.stop}
            lost |= about or set(range(len(base.sizes)))
        arguable = True
    note = f"{name} at {', '.join(f'{start}..{stop}' for start, stop in touched[:4])}"
    known = _truth(base)
    for place in hit:
        if not place.has_checksum:
            _set_free(known, place)
    return Damaged(
        kind, note, _put(base, name, content),
        tuple(None if level in lost else each for level, each in enumerate(known)), arguable,
    )  # fmt: skip


def _truth(base: Base) -> list[Known | None]:
    return [
        None if pixels is None else Known(pixels, np.zeros(pixels.valid.shape, bool))
        for pixels in base.truth
    ]


def _set_free(known: Sequence[Known | None], place: Place) -> None:
    level = known[place.level]
    if level is not None:
        left, top, right, bottom = place.box
        level.free[top:bottom, left:right] = True


def _truncate(base: Base, others: Sequence[Base], random: Random) -> Damaged:
    """Truncate a file: anywhere, or in its last bytes. An error, or the original pixels."""
    name = _pick(base, random)
    content = base.files[name]
    least = max(len(content) - 16, 0) if random.random() < 0.2 else 0
    keep = int(random.integers(least, max(len(content), 1)))
    # A truncated list of lines may still be a complete list.
    known = [None] * len(base.sizes) if name.endswith(".hdr") else _truth(base)
    note = f"{name} to {keep} of {len(content)} bytes"
    return Damaged("truncated", note, _put(base, name, content[:keep]), tuple(known))


def _append(base: Base, others: Sequence[Base], random: Random) -> Damaged:
    """Append bytes to a file. An error, or the original pixels."""
    name = _pick(base, random)
    junk = random.bytes(int(random.integers(1, 5000)))
    files = _put(base, name, base.files[name] + junk)
    is_text = name.endswith((".json", ".vrt", ".hdr", ".xml")) or "/." in f"/{name}"
    known = [None] * len(base.sizes) if is_text else _truth(base)
    return Damaged("appended", f"{len(junk)} bytes to {name}", files, tuple(known), True)


def _splice(base: Base, others: Sequence[Base], random: Random) -> Damaged:
    """Overwrite a part with bytes of another image, mostly its beginning."""
    other = others[random.integers(len(others))]
    source = other.files[str(random.choice(list(other.files)))]
    name = _pick(base, random)
    content = bytearray(base.files[name])
    length = int(2 ** random.uniform(2, 14))
    start = 0 if random.random() < 0.6 else int(random.integers(0, max(len(content), 1)))
    begin = 0 if random.random() < 0.6 else int(random.integers(0, max(len(source), 1)))
    part = source[begin : begin + length][: len(content) - start]
    content[start : start + len(part)] = part
    done = _changed(base, "spliced", name, bytes(content), [(start, start + max(len(part), 1))])
    return Damaged(done.kind, f"{done.note} from {other.format}", done.files, done.known, True)


def _erase(base: Base, others: Sequence[Base], random: Random) -> Damaged:
    """Replace a range of a file, as a bad sector does: by zeros, ones or noise."""
    name = _pick(base, random)
    content = bytearray(base.files[name])
    length = int(min(2 ** random.uniform(1, 12), len(content)))
    start = int(random.integers(0, len(content) - length + 1))
    filling = [bytes(length), b"\xff" * length, random.bytes(length)]
    content[start : start + length] = filling[random.integers(3)]
    return _changed(base, "erased", name, bytes(content), [(start, start + length)])


def _shift(base: Base, others: Sequence[Base], random: Random) -> Damaged:
    """Remove or insert bytes, so that all that follows is shifted; the pixels are unknown."""
    name = _pick(base, random)
    content = base.files[name]
    place, length = int(random.integers(0, len(content) + 1)), int(2 ** random.uniform(0, 8))
    if random.random() < 0.5:
        content = content[:place] + content[place + length :]
    else:
        content = content[:place] + random.bytes(length) + content[place:]
    nothing = (None,) * len(base.sizes)
    return Damaged("shifted", f"{name} from {place}", _put(base, name, content), nothing, True)


def _swap(base: Base, others: Sequence[Base], random: Random) -> Damaged | None:
    """Exchange two blocks of a level: exactly their pixels change places."""
    if not base.places or base.mask_apart:
        return None
    first = base.places[random.integers(len(base.places))]
    alike = [
        each for each in base.places
        if each.whole == first.whole and each != first
        and (each.level, each.band) == (first.level, first.band)
    ]  # fmt: skip
    if not alike or base.truth[first.level] is None:
        return None
    second = alike[random.integers(len(alike))]
    files = _exchange(base, first, second)
    if files is None:
        return None
    known = _truth(base)
    known[first.level] = _exchanged(known[first.level], first, second)
    return Damaged("swapped blocks", f"{first.box} and {second.box}", files, tuple(known))


def _exchange(base: Base, first: Place, second: Place) -> dict[str, bytes] | None:
    if first.file != second.file:  # a file for each
        swapped = {first.file: base.files[second.file], second.file: base.files[first.file]}
        return {**base.files, **swapped}
    if len(first.table) != 2:
        return None
    content = bytearray(base.files[first.file])
    for (one, code), (other, _) in zip(first.table, second.table, strict=True):
        length = struct.calcsize(code)
        content[one : one + length], content[other : other + length] = (
            content[other : other + length], content[one : one + length]
        )  # fmt: skip
    return _put(base, first.file, bytes(content))


def _exchanged(level: Known | None, first: Place, second: Place) -> Known:
    assert level is not None
    values, valid = level.pixels.values.copy(), level.pixels.valid.copy()
    bands = slice(None) if first.band is None else slice(first.band, first.band + 1)
    for here, there in ((first, second), (second, first)):
        (left, top, right, bottom), (x, y, far_x, far_y) = here.box, there.box
        values[bands, top:bottom, left:right] = level.pixels.values[bands, y:far_y, x:far_x]
        valid[top:bottom, left:right] = level.pixels.valid[y:far_y, x:far_x]
    return Known(Pixels(values, valid), level.free)


def _lose(base: Base, others: Sequence[Base], random: Random) -> Damaged | None:
    """Remove one of several files: a chunk of a zarr becomes invalid, otherwise unknown."""
    if len(base.files) < 2:
        return None
    name = str(random.choice([each for each in base.files if each != base.entry]))
    files = {key: value for key, value in base.files.items() if key != name}
    place = next((each for each in base.places if each.file == name), None)
    nothing = (None,) * len(base.sizes)
    if place is None:
        return Damaged("lost file", name, files, nothing, True)
    known = _truth(base)
    level = known[place.level]
    if level is not None:
        left, top, right, bottom = place.box
        values, valid = level.pixels.values.copy(), level.pixels.valid.copy()
        values[:, top:bottom, left:right], valid[top:bottom, left:right] = 0, False
        known[place.level] = Known(Pixels(values, valid), level.free)
    return Damaged("lost file", name, files, tuple(known))


def _mix_up(base: Base, others: Sequence[Base], random: Random) -> Damaged | None:
    """Exchange the contents of two files of an image; the pixels are unknown."""
    if len(base.files) < 2:
        return None
    one, other = (str(name) for name in random.choice(list(base.files), 2, replace=False))
    files = {**base.files, one: base.files[other], other: base.files[one]}
    return Damaged("mixed-up files", f"{one} and {other}", files, (None,) * len(base.sizes), True)


def _absurd(base: Base, others: Sequence[Base], random: Random) -> Damaged:
    """Write an absurd value into the description of the image."""
    name = _pick(base, random)
    spoilt, touched = spoil(base, name, random)
    if touched is not None:
        return _changed(base, "absurd values", name, spoilt, touched)
    nothing = (None,) * len(base.sizes)
    return Damaged("absurd values", name, _put(base, name, spoilt), nothing, True)


KINDS: dict[str, tuple[Callable[[Base, Sequence[Base], Random], Damaged | None], float]] = {
    "flipped bits": (_flip, 4),
    "absurd values": (_absurd, 4),
    "truncated": (_truncate, 2),
    "spliced": (_splice, 2),
    "swapped blocks": (_swap, 1.5),
    "erased": (_erase, 1.5),
    "shifted": (_shift, 0.7),
    "appended": (_append, 0.4),
    "lost file": (_lose, 0.7),
    "mixed-up files": (_mix_up, 0.4),
}

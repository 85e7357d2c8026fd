"""Digit glyphs, built in or from MNIST."""

import gzip
import itertools
import math
import os
import struct
import tarfile
import zlib
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import SPLITS, Split
from tnetcli.errors import ImageError
from tnetcli.files import open_regular
from tnetcli.text import first_line

SIDE = 28
DIGITS = 10
# Of MNIST's training file; the other sixth is for validation.
TRAINING_SHARE = 5 / 6
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
# MNIST has 60,000 glyphs in 47 MB; a file of many times that is something else.
MOST_GLYPHS = 500_000
MOST_MEMBERS, MOST_ARCHIVE_BYTES = 1000, 2**30
FAILURES = (OSError, EOFError, zlib.error, tarfile.TarError)
GZIP = b"\x1f\x8b"
MOST_HEADER = 2**20  # bytes of a name and the like, in an archive
HINT = "give the folder or .tgz that holds `train-images-idx3-ubyte` and the other three files"
DRAWN = 120  # of each digit, for each split
NOISE_KINDS = 50


@dataclass(frozen=True, slots=True, eq=False)
class Glyphs:
    """Grey pictures of digits, bright on black."""

    images: NDArray[np.uint8]  # (glyphs, side, side)
    labels: NDArray[np.uint8]  # (glyphs,), 0 to 9

    def of(self, *digits: int) -> NDArray[np.uint8]:
        """Return all pictures of these digits."""
        return self.images[np.isin(self.labels, digits)]


def load_glyphs(source: str | None, split: Split) -> Glyphs:
    """Return the glyphs for one split, of which no other split has any."""
    return draw_glyphs(split) if source is None else read_mnist(source, split)


# --- MNIST ------------------------------------------------------------------------------------


@cache
def read_mnist(path: str, split: Split) -> Glyphs:
    """Read the four files of MNIST, packed or not, from a folder or a .tgz; nothing is unpacked.

    Training and validation share the training file, glyph by glyph; the test file is for tests.
    """
    stem = "t10k" if split == "test" else "train"
    try:
        with _Files(path) as files:
            labels = _idx(files.read(stem, "labels", 8 + MOST_GLYPHS), LABELS_MAGIC, path)
            most = 16 + len(labels) * SIDE * SIDE
            images = _idx(files.read(stem, "images", most), IMAGES_MAGIC, path)
    except FAILURES as error:
        raise ImageError(
            f"cannot read digits of `{path}`: {first_line(error)}", hint=HINT
        ) from error
    if len(images) != len(labels) or images.shape[1:] != (SIDE, SIDE):
        counts = f"{len(labels)} labels, images of shape {images.shape}"
        raise ImageError(f"the digits of `{path}` do not fit: {counts}", hint=HINT)
    if len(set(labels)) != DIGITS or labels.max() >= DIGITS:
        raise ImageError(f"`{path}` does not hold the ten digits", hint=HINT)
    half = round(len(labels) * TRAINING_SHARE)
    part = {"train": slice(0, half), "validation": slice(half, None), "test": slice(None)}[split]
    return Glyphs(images[part], labels[part])


class _Files:
    """The files of a folder, or of a tar archive, by how they are called in MNIST."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._archive: tarfile.TarFile | None = None
        if not os.path.exists(path):
            raise ImageError(f"`{path}` does not exist", hint=HINT)
        if not os.path.isdir(path):
            self._file = open_regular(path)
            try:
                self._archive = _open_archive(self._file)
            except tarfile.ReadError as error:
                self._file.close()
                raise ImageError(
                    f"`{path}` is neither a folder nor a tar archive", hint=HINT
                ) from error

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        if self._archive is not None:
            self._archive.close()
            self._file.close()

    def read(self, stem: str, kind: str, most: int) -> bytes:
        """Return at most that much of one file, decompressed; more than that is an error."""
        names = [
            f"{stem}-{kind}{mark}idx{3 if kind == 'images' else 1}-ubyte{tail}"
            for mark in "-."
            for tail in ("", ".gz")
        ]
        with self._open(names) as file:
            packed = file.peek(2)[:2] == GZIP  # type: ignore[attr-defined]
            data = (gzip.GzipFile(fileobj=file) if packed else file).read(most + 1)
        if len(data) > most:
            raise ImageError(f"`{stem}-{kind}` of `{self._path}` is too long", hint=HINT)
        return data

    def _open(self, names: list[str]) -> IO[bytes]:
        if self._archive is not None:
            return self._open_member(self._archive, names)
        for name in names:
            if os.path.isfile(os.path.join(self._path, name)):
                return open_regular(os.path.join(self._path, name))
        raise self._missing(names)

    def _open_member(self, archive: tarfile.TarFile, names: list[str]) -> IO[bytes]:
        total = 0
        for number, member in enumerate(archive):
            total += member.size
            if number >= MOST_MEMBERS or total > MOST_ARCHIVE_BYTES:
                raise ImageError(f"`{self._path}` is too large to be MNIST", hint=HINT)
            if member.isfile() and os.path.basename(member.name) in names:
                file = archive.extractfile(member)
                assert file is not None  # a regular file
                return file
        raise self._missing(names)

    def _missing(self, names: list[str]) -> ImageError:
        return ImageError(f"no `{names[0]}` in `{self._path}`", hint=HINT)


class _Member(tarfile.TarInfo):
    """A member whose headers do not fill the memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        # Headers such as those of long names are read at once, whatever their length.
        if self.size < 0 or (self.size > MOST_HEADER and not self.isreg()):
            raise tarfile.ReadError("a header is longer than any name")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


def _open_archive(file: BinaryIO) -> tarfile.TarFile:
    """Open a tar archive, plain or compressed by gzip, which decompresses piece by piece."""
    packed = file.read(2) == GZIP
    file.seek(0)
    return tarfile.open(fileobj=file, mode="r:gz" if packed else "r:", tarinfo=_Member)


def _idx(data: bytes, magic: int, path: str) -> NDArray[np.uint8]:
    """Return the array of an idx file of bytes."""
    dimensions = magic % 256
    head = 4 + 4 * dimensions
    if len(data) < head or struct.unpack(">I", data[:4])[0] != magic:
        raise ImageError(f"`{path}` holds no idx files of MNIST", hint=HINT)
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    if len(data) - head != math.prod(shape):
        raise ImageError(f"a file of `{path}` is cut off, or longer than it says", hint=HINT)
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


# --- drawn by us ------------------------------------------------------------------------------

Point = tuple[float, float]


def _arc(x: float, y: float, wide: float, high: float, start: int, end: int) -> list[Point]:
    """Return points of an ellipse's arc, clockwise from `start` degrees, 0 being right."""
    angles = np.radians(np.linspace(start, end, 2 + abs(end - start) // 15))
    return [(x + wide * math.cos(each), y + high * math.sin(each)) for each in angles]


# Each digit as strokes in a box of 1 by 1, y pointing down.
STROKES: dict[int, list[list[Point]]] = {
    0: [_arc(0.5, 0.5, 0.3, 0.45, 0, 360)],
    1: [[(0.34, 0.26), (0.54, 0.06), (0.54, 0.95)]],
    2: [[*_arc(0.5, 0.31, 0.28, 0.25, 190, 395), (0.2, 0.93), (0.82, 0.93)]],
    3: [[*_arc(0.46, 0.28, 0.26, 0.22, 205, 440), *_arc(0.46, 0.71, 0.3, 0.23, 280, 510)]],
    4: [[(0.62, 0.95), (0.62, 0.06), (0.16, 0.66), (0.86, 0.66)]],
    5: [[(0.78, 0.07), (0.32, 0.07), (0.27, 0.46), *_arc(0.48, 0.66, 0.3, 0.27, 235, 500)]],
    6: [[(0.7, 0.07), (0.46, 0.2), (0.28, 0.45), *_arc(0.5, 0.69, 0.27, 0.24, 180, 540)]],
    7: [[(0.18, 0.08), (0.82, 0.08), (0.42, 0.95)]],
    8: [_arc(0.5, 0.28, 0.23, 0.21, 0, 360), _arc(0.5, 0.71, 0.28, 0.22, 0, 360)],
    9: [[*_arc(0.5, 0.31, 0.26, 0.24, 0, 360), (0.74, 0.6), (0.56, 0.95)]],
}


@cache
def draw_glyphs(split: Split) -> Glyphs:
    """Draw digits that lean, stretch and vary in thickness; every split has its own."""
    random = np.random.default_rng((SIDE, SPLITS.index(split)))
    images = [_draw(strokes, random) for strokes in STROKES.values()]
    return Glyphs(np.concatenate(images), np.repeat(np.arange(DIGITS, dtype=np.uint8), DRAWN))


def _draw(strokes: list[list[Point]], random: np.random.Generator) -> NDArray[np.uint8]:
    """Return many glyphs of one digit: 20 pixels of it in 28, as in MNIST."""
    pieces = np.array([pair for line in strokes for pair in itertools.pairwise(line)])
    pieces = np.broadcast_to(pieces - 0.5, (DRAWN, *pieces.shape))  # (glyphs, pieces, 2 ends, x y)
    turn, shear = random.uniform(-0.2, 0.2, DRAWN), random.uniform(-0.25, 0.25, DRAWN)
    stretch = random.uniform((0.75, 0.9), (1.1, 1.1), (DRAWN, 2))
    x, y = np.moveaxis(pieces * stretch[:, None, None], -1, 0)
    x = x + shear[:, None, None] * y
    sine, cosine = np.sin(turn)[:, None, None], np.cos(turn)[:, None, None]
    turned = np.stack([x * cosine - y * sine, x * sine + y * cosine], -1) * 20
    centre = random.uniform(-1, 1, (DRAWN, 1, 1, 2)) + SIDE / 2
    return draw_strokes(turned + centre, random.uniform(1.7, 3.4, DRAWN))


def draw_strokes(pieces: NDArray[Any], thickness: NDArray[Any]) -> NDArray[np.uint8]:
    """Draw straight pieces with round ends, bright on black: (pictures, pieces, 2 ends, x and y).

    A pixel is as bright as the pen covers it, told by its distance from the nearest piece.
    """
    row = np.arange(SIDE, dtype=np.float32) + np.float32(0.5)
    nearest = np.full((len(pieces), SIDE, SIDE), np.inf, np.float32)  # squared distances
    for piece in np.moveaxis(pieces.astype(np.float32), 1, 0):  # (pictures, 2 ends, x and y)
        start_x, start_y = piece[:, 0, 0, None], piece[:, 0, 1, None]
        along_x, along_y = piece[:, 1, 0, None] - start_x, piece[:, 1, 1, None] - start_y
        square = np.maximum(along_x**2 + along_y**2, np.float32(1e-9))
        right, down = row - start_x, row - start_y  # (pictures, side)
        part = (right * along_x / square)[:, None, :] + (down * along_y / square)[..., None]
        np.clip(part, 0, 1, out=part)
        away = (right[:, None, :] - part * along_x[..., None]) ** 2
        away += (down[..., None] - part * along_y[..., None]) ** 2
        np.minimum(nearest, away, out=nearest)
    covered = np.clip(thickness[:, None, None] / 2 - np.sqrt(nearest) + 0.5, 0, 1)
    return np.rint(255 * covered).astype(np.uint8)


def draw_noise(random: np.random.Generator) -> NDArray[np.uint8]:
    """Return strokes of two thin lines, each from a corner at an angle, a little uneven."""
    angle = np.tan(random.uniform(0, np.pi / 2.5, (NOISE_KINDS, 2)))  # (strokes, lines)
    reach = np.minimum(SIDE, SIDE / np.maximum(angle, 1e-6))
    ends = np.stack([np.stack([reach * angle, reach], -1)], 2)  # (strokes, lines, 1, x and y)
    lines = np.concatenate([np.zeros_like(ends), ends], 2)
    mirrored = random.random((NOISE_KINDS, 1)) < 0.5
    lines[:, 1, :, 0] = np.where(mirrored, SIDE - lines[:, 1, :, 0], lines[:, 1, :, 0])
    strokes = draw_strokes(lines, np.ones(NOISE_KINDS)) > 127  # hard edges, one pixel wide
    return np.where(strokes, random.integers(204, 256, strokes.shape), 0).astype(np.uint8)

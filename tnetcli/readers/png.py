"""The checksums of a PNG file, which decoders find wrong only after they gave out pixels."""

import zlib

from tnetcli.files import open_regular

SIGNATURE_BYTES = 8
PIECE = 2**20  # bytes read at a time


def check_png(path: str) -> None:
    """Refuse a PNG that is cut off or has changed since it was written; ValueError says where."""
    with open_regular(path) as file:
        place = SIGNATURE_BYTES
        file.seek(place)
        kind = b""
        while kind != b"IEND":
            head = file.read(8)
            left, kind = int.from_bytes(head[:4], "big"), head[4:]
            found = zlib.crc32(kind)
            while left and (piece := file.read(min(left, PIECE))):
                found, left = zlib.crc32(piece, found), left - len(piece)
            stored = file.read(4)
            if len(stored) < 4:
                raise ValueError(f"cut off in the chunk at byte {place}")
            if int.from_bytes(stored, "big") != found:
                raise ValueError(f"the checksum of the chunk at byte {place} does not fit")
            place = file.tell()

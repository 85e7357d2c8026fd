"""OME-Zarr images made to fill the memory, to hang, or to reach other files."""

import json
import os
import shutil
import struct
import sys
import threading
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ShardingCodec, ZstdCodec

from tests.commands import peak_memory
from tests.readers.test_zarr import edit_multiscale, object_files, random_levels, whole, write
from tests.readers.test_zarr import zip_folder as store_folder
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.zarr import OmeZarrReader

SIDE = 2048
BOMB = 2**26  # bytes that a hostile chunk decodes to, in place of SIDE * SIDE
LITTLE = 2**25  # bytes that an error may cost
linux = pytest.mark.skipif(sys.platform != "linux", reason="measures memory in /proc")
pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")


@contextmanager
def little_memory(most=LITTLE):
    """Assert that what runs inside needs little more memory than there was before."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
    before = peak_memory()
    yield
    assert peak_memory() - before < most


def use(path, side):
    """Open an image, and read from its corner unless `side` is 0."""
    with OmeZarrReader(str(path)) as reader:
        if side:
            reader.read(Window(0, 0, side, side), Size(side, side))


def refused(path, match, read=True):
    with pytest.raises(ImageError, match=match) as caught:
        use(path, 16 if read else 0)
    assert caught.value.hint
    return caught.value


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def zeros(compressor):
    part = bytes(2**24)
    return (
        b"".join(compressor.compress(part) for _ in range(BOMB // len(part))) + compressor.flush()
    )


def deflated(bits):
    return zeros(zlib.compressobj(1, zlib.DEFLATED, bits))


def zstd_bomb(stated=True):
    # Frames may state no size; then each block does, here as one byte that is repeated.
    header = struct.pack("<Q", BOMB) if stated else b""
    blocks = BOMB // 2**17
    body = b"".join(
        struct.pack("<I", (2**17 << 3) | (1 << 1) | (number == blocks - 1))[:3] + b"\0"
        for number in range(blocks)
    )
    return b"\x28\xb5\x2f\xfd" + bytes([0xC0 if stated else 0]) + b"\x38" + header + body


BOMBS = {
    "zlib": lambda: deflated(15),
    "gzip": lambda: deflated(31),
    "zstd": zstd_bomb,
    "zstd of no stated size": lambda: zstd_bomb(stated=False),
    "blosc": lambda: bytes(numcodecs.Blosc("zstd", shuffle=0).encode(np.zeros(BOMB, "u1"))),
}
OLD = {
    "zlib": numcodecs.Zlib(),
    "gzip": numcodecs.GZip(),
    "zstd": numcodecs.Zstd(),
    "zstd of no stated size": numcodecs.Zstd(),
    "blosc": numcodecs.Blosc(),
}
NEW = {"gzip": GzipCodec(), "zstd": ZstdCodec(), "blosc": BloscCodec()}


@pytest.fixture(scope="module")
def bombs():
    return {name: make() for name, make in BOMBS.items()}


def sparse(path, stored=(2, None), **options):
    return write(
        path,
        [np.zeros((1, SIDE, SIDE), "u1")],
        stored,
        chunks={"y": SIDE // (2 if stored[1] else 1), "x": SIDE // (2 if stored[1] else 1)},
        fill_value=1,
        **options,
    )


# Chunks


@linux
@pytest.mark.parametrize("name", OLD)
def test_a_chunk_of_format_2_is_not_decoded_beyond_its_size(tmp_path, bombs, name):
    path = sparse(tmp_path / "a.zarr", compressors=OLD[name])
    object_files(path)[0].write_bytes(bombs[name])
    with little_memory():
        refused(path, "more than its 4,194,304 bytes|too small")


@linux
@pytest.mark.parametrize("name", NEW)
def test_a_chunk_of_format_3_is_not_decoded_beyond_its_size(tmp_path, bombs, name):
    path = sparse(tmp_path / "a.zarr", (3, None), compressors=NEW[name])
    object_files(path)[0].write_bytes(bombs[name])
    with little_memory():
        refused(path, "more than its 4,194,304 bytes")


@linux
@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("read_whole", [False, True])
def test_a_chunk_in_a_shard_is_not_decoded_beyond_its_size(tmp_path, bombs, name, read_whole):
    path = sparse(tmp_path / "a.zarr", (3, SIDE), compressors=NEW[name])
    bomb, empty = bombs[name], b"\xff" * 16
    index = struct.pack("<QQ", 0, len(bomb)) + 3 * empty
    checksum = numcodecs.CRC32C(location="end").encode(np.frombuffer(index, "u1"))
    object_files(path)[0].write_bytes(bomb + bytes(checksum))
    with little_memory(), pytest.raises(ImageError, match="more than its 1,048,576 bytes"):
        use(path, SIDE if read_whole else 16)


@pytest.mark.parametrize("name", [*NEW])
def test_a_shard_whose_index_is_false_is_an_error(tmp_path, name):
    path = sparse(tmp_path / "a.zarr", (3, SIDE), compressors=NEW[name])
    for start, length in ((0, 2**62), (2**63, 2**63 - 9), (2**64 - 8, 16), (8, 2**64 - 1)):
        index = struct.pack("<QQ", start, length) + 3 * b"\xff" * 16
        checksum = numcodecs.CRC32C(location="end").encode(np.frombuffer(index, "u1"))
        object_files(path)[0].write_bytes(b"x" * 100 + bytes(checksum))
        refused(path, "cannot read")


@linux
@pytest.mark.parametrize("stored", [(2, None), (3, None), (3, SIDE)])
def test_a_chunk_that_is_longer_than_its_codecs_can_make_it_is_not_read(tmp_path, stored):
    path = sparse(tmp_path / "a.zarr", stored)
    os.truncate(object_files(path)[0], 2**40)
    with little_memory(), pytest.raises(ImageError, match="cannot read"):
        use(path, SIDE)


@linux
def test_a_deflated_chunk_in_a_zip_is_not_inflated_beyond_its_size(tmp_path):
    folder = sparse(tmp_path / "a.zarr", compressors=None)
    object_files(folder)[0].unlink()
    path = store_folder(folder, tmp_path / "a.zip")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0/0.0.0", bytes(BOMB))
    with little_memory():
        refused(path, f"has {BOMB:,} bytes")


@linux
def test_a_false_length_in_a_zip_is_not_believed(tmp_path):
    folder = sparse(tmp_path / "a.zarr", compressors=None)
    object_files(folder)[0].unlink()
    path = store_folder(folder, tmp_path / "a.zip")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0/0.0.0", bytes(BOMB))
    content = bytearray(Path(path).read_bytes())
    for place in (content.rindex(b"PK\x03\x04") + 22, content.rindex(b"PK\x01\x02") + 24):
        assert content[place : place + 4] == struct.pack("<I", BOMB)
        content[place : place + 4] = struct.pack("<I", SIDE * SIDE)
    Path(path).write_bytes(content)
    with little_memory():
        refused(path, "CRC")


def test_zip_methods_that_python_does_not_bound_are_refused(tmp_path):
    folder = sparse(tmp_path / "a.zarr", compressors=None)
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = tmp_path / "a.zip"
        with zipfile.ZipFile(path, "w", method) as archive:
            for each in sorted(Path(folder).rglob("*")):
                archive.write(each, each.relative_to(folder).as_posix())
        refused(path, f"compressed with method {method}", read=False)


@linux
def test_a_zip_with_a_huge_directory_is_refused(tmp_path):
    folder = write(tmp_path / "a.zarr", random_levels((20, 20)))
    path = Path(store_folder(folder, tmp_path / "a.zip"))
    content = path.read_bytes()
    start = content.index(b"PK\x01\x02")
    end = content.rindex(b"PK\x05\x06")
    entry = content[start : content.index(b"PK\x01\x02", start + 4)]
    entries = entry * (2**26 // len(entry))
    tail = content[end : end + 12] + struct.pack("<II", len(entries), start) + content[end + 20 :]
    path.write_bytes(content[:start] + entries + tail)
    with little_memory():
        refused(path, "directory has", read=False)


@linux
def test_large_chunks_are_decoded_one_after_another(tmp_path):
    side = 4096
    path = write(tmp_path / "a.zarr", random_levels((16, 16), bands=2), chunks={"c": 1})
    edit(Path(path, "0", ".zarray"), shape=[2, 2 * side, 2 * side], chunks=[1, side, side])
    for number in range(8):
        name = ".".join(format(number, "03b"))
        values = np.full(side * side, number, "u1")
        Path(path, "0", name).write_bytes(numcodecs.Blosc(shuffle=0).encode(values))
    edit(Path(path, "0", ".zarray"), compressor=numcodecs.Blosc().get_config())
    del values
    with little_memory(3 * side * side), OmeZarrReader(path) as reader:
        pixels = reader.read(Window(side - 8, side - 8, 16, 16), Size(16, 16))
    assert np.array_equal(pixels.values[:, ::8, ::8].ravel(), np.arange(8))


@pytest.mark.parametrize("side", [2**15, 2**31, 2**40])
def test_a_chunk_far_larger_than_its_level_is_refused(tmp_path, side):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    edit(Path(path, "0", ".zarray"), chunks=[3, side, side])
    refused(path, "one block", read=False)


def test_chunks_of_one_pixel_of_a_large_level_are_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    edit(Path(path, "0", ".zarray"), shape=[3, 10**5, 10**5], chunks=[3, 1, 1])
    refused(path, "10,000,000,000 chunks", read=False)


def test_a_shard_of_a_million_chunks_is_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((32, 32)), (3, 32))
    metadata = Path(path, "0", "zarr.json")
    record = json.loads(metadata.read_text())
    record["chunk_grid"]["configuration"]["chunk_shape"] = [3, 2**16, 2**16]
    metadata.write_text(json.dumps(record))
    refused(path, "16,777,216 chunks", read=False)


# Codecs


@pytest.mark.parametrize("place", ["compressor", "filters"])
def test_other_codecs_of_format_2_are_refused_before_they_are_made(tmp_path, place):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    for codec in ("pickle", "json2", "msgpack2", "vlen-utf8", "vlen-array", "categorize", "lz4", 5):
        record = {"id": codec, "protocol": 5}
        edit(Path(path, "0", ".zarray"), **{place: [record] if place == "filters" else record})
        assert f"codec `{codec}` is not supported" in str(refused(path, "codec", read=False))


@pytest.mark.parametrize(
    "name", ["vlen-utf8", "numcodecs.pcodec", "numcodecs.pickle", "antigravity"]
)
@pytest.mark.parametrize("stored", [(3, None), (3, 32)])
def test_other_codecs_of_format_3_are_refused_before_they_are_made(tmp_path, name, stored):
    path = write(tmp_path / "a.zarr", random_levels((32, 32)), stored)
    metadata = Path(path, "0", "zarr.json")
    record = json.loads(metadata.read_text())
    codecs = record["codecs"][0]["configuration"]["codecs"] if stored[1] else record["codecs"]
    codecs.append({"name": name, "configuration": {}})
    metadata.write_text(json.dumps(record))
    error = refused(path, "is not supported", read=False)
    assert f"`{name.removeprefix('numcodecs.')}`" in str(error)


def test_a_codec_with_two_names_is_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    edit(Path(path, "0", ".zarray"), compressor={"id": "pickle", "name": "zlib"})
    refused(path, "codec `pickle` is not supported", read=False)


def test_a_shard_in_a_compressor_is_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((32, 32)), (3, 32))
    metadata = Path(path, "0", "zarr.json")
    record = json.loads(metadata.read_text())
    record["codecs"].append({"name": "gzip", "configuration": {"level": 1}})
    metadata.write_text(json.dumps(record))
    refused(path, "is combined with others", read=False)


def test_a_compressed_index_of_a_shard_is_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((32, 32)), (3, 32))
    metadata = Path(path, "0", "zarr.json")
    record = json.loads(metadata.read_text())
    record["codecs"][0]["configuration"]["index_codecs"].append({"name": "gzip"})
    metadata.write_text(json.dumps(record))
    refused(path, "`gzip` is not supported", read=False)


def test_values_of_format_2_that_are_no_numbers_are_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    for dtype in ("|O", "|S9", "<U9", "<M8[ns]", "|V9", [["a", "|u1"]], None, 5):
        edit(Path(path, "0", ".zarray"), dtype=dtype)
        refused(path, "has `.*` values", read=False)


def test_values_of_format_3_that_are_no_numbers_are_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)), (3, None))
    for dtype in ("string", "bytes", {"name": "numpy.datetime64"}, "r64"):
        edit(Path(path, "0", "zarr.json"), data_type=dtype)
        refused(path, "has `.*` values", read=False)


@pytest.mark.parametrize(
    "filters",
    [
        [{"id": "delta", "dtype": "<f8", "astype": "|u1"}],
        [{"id": "astype", "encode_dtype": "|u1", "decode_dtype": "|S1000000"}],
        [{"id": "delta", "dtype": "|u1"}, {"id": "zlib"}, {"id": "delta", "dtype": "|u1"}],
        [{"id": "zlib"}] * 9,
        {"id": "zlib"},
    ],
)
def test_filters_that_would_multiply_the_values_are_refused(tmp_path, filters):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    edit(Path(path, "0", ".zarray"), filters=filters)
    refused(path, "cannot open level `0` of .*codec", read=False)


@pytest.mark.parametrize("filters", [[numcodecs.Zlib()], [numcodecs.Zstd(), numcodecs.GZip()]])
@pytest.mark.parametrize("compressor", [None, numcodecs.Zstd()])
def test_filters_that_compress_are_undone(tmp_path, filters, compressor):
    (values,) = random_levels((40, 40))
    values = values.astype("<u2")
    path = write(tmp_path / "a.zarr", [values], filters=filters, compressors=compressor)
    with OmeZarrReader(path) as reader:
        assert np.array_equal(whole(reader).values, values)


def test_a_zstd_frame_that_states_no_size_is_read(tmp_path):
    path = write(tmp_path / "a.zarr", [np.zeros((1, 16, 16), "u1")], compressors=numcodecs.Zstd())
    frame = b"\x28\xb5\x2f\xfd\x00\x38" + struct.pack("<I", (256 << 3) | 3)[:3] + b"\x07"
    Path(path, "0", "0.0.0").write_bytes(frame)
    with OmeZarrReader(path) as reader:
        assert (whole(reader).values == 7).all()


# Metadata


@linux
@pytest.mark.parametrize("name", [".zgroup", ".zattrs", "0/.zarray"])
def test_huge_metadata_is_not_read(tmp_path, name):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    Path(path, name).touch()
    os.truncate(Path(path, name), BOMB)
    with little_memory():
        refused(path, f"{BOMB:,} bytes", read=False)


@linux
@pytest.mark.parametrize("stored", [(2, None), (3, None)])
def test_huge_metadata_in_a_zip_is_not_inflated(tmp_path, stored):
    folder = write(tmp_path / "a.zarr", random_levels((20, 20)), stored)
    name = ".zattrs" if stored[0] == 2 else "zarr.json"
    content = Path(folder, name).read_bytes()
    Path(folder, name).unlink()
    path = store_folder(folder, tmp_path / "a.zip")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content + b" " * BOMB)
    with little_memory():
        refused(path, f"has {BOMB // 10**6},", read=False)


def test_metadata_is_bounded_over_all_documents(tmp_path):
    levels = random_levels((20, 20), (10, 10))
    path = write(tmp_path / "a.zarr", levels)
    for name in "01":
        edit(Path(path, name, ".zarray"), note="x" * 9_000_000)
    refused(path, "has more than 16,777,216 bytes", read=False)


@pytest.mark.parametrize("name", [".zattrs", ".zgroup", "0/.zarray"])
def test_deeply_nested_metadata_is_refused(tmp_path, name):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    for depth in (70, 900, 10**6):
        Path(path, name).write_text('{"multiscales": ' + "[" * depth + "]" * depth + "}")
        refused(path, "nested more than 64 levels", read=False)


def test_too_many_levels_are_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    edit_multiscale(path, lambda each: each.update(datasets=[{"path": "0"}] * 101))
    refused(path, "list 101 datasets", read=False)


def test_long_names_are_cut(tmp_path):
    omero = {"channels": [{"label": "x" * 10**5}, {"label": "y"}, {"label": ["z"]}]}
    path = write(tmp_path / "a.zarr", random_levels((20, 20), (10, 11)), omero=omero)
    edit_multiscale(path, lambda each: each["datasets"][0].update(path="0" + "/" * 10**5))
    with OmeZarrReader(path) as reader:
        assert max(map(len, reader.bands)) == 255
        assert len(str(reader.info.warnings)) < 1000
    edit_multiscale(path, lambda each: each["datasets"][0].update(path="9" * 10**5))
    assert len(str(refused(path, "cannot open level", read=False))) < 1000


def test_shapes_of_no_image_are_refused(tmp_path):
    for key in ("shape", "chunks"):
        path = write(tmp_path / f"{key}.zarr", random_levels((20, 20)))
        for shape in ([1] * 10**5, [2**63] * 17, [3, 20, 10**30], "x", None, [3, 2.5, 1]):
            edit(Path(path, "0", ".zarray"), **{key: shape})
            refused(path, "its shape or its chunks", read=False)


# Files


@contextmanager
def not_for_ever(pipe):
    """Write to a pipe after a while, so that a test that waits for it fails."""
    timer = threading.Timer(20, lambda: os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pipes
@pytest.mark.parametrize("name", [".zgroup", ".zattrs", "0/.zarray", "0/0.0.0"])
def test_a_pipe_is_not_opened(tmp_path, name):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    Path(path, name).unlink(missing_ok=True)
    os.mkfifo(Path(path, name))
    with not_for_ever(Path(path, name)):
        refused(path, "is a named pipe", read=name.endswith("0"))


@pytest.mark.parametrize("name", [".zattrs", "0/.zarray", "0/0.0.0", "0"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, name):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    outside = tmp_path / "outside"
    shutil.move(Path(path, name), outside)
    Path(path, name).symlink_to(outside)
    error = refused(path, "outside of the image")
    assert f"`{name}` is a link to `{outside}`" in str(error)


@pytest.mark.parametrize("name", [".zattrs", "0/0.0.0", "0"])
def test_a_link_inside_the_folder_is_followed(tmp_path, name):
    (values,) = random_levels((20, 20))
    path = write(tmp_path / "a.zarr", [values])
    shutil.move(Path(path, name), Path(path, "inside"))
    Path(path, name).symlink_to(Path(path, "inside"))
    (tmp_path / "link").symlink_to(path)
    with OmeZarrReader(str(tmp_path / "link")) as reader:
        assert np.array_equal(whole(reader).values, values)


@pytest.mark.parametrize("name", ["../b.zarr/0", "0/../../b.zarr/0", "..", "./../b.zarr/0"])
def test_a_level_is_not_sought_outside_of_the_image(tmp_path, name):
    write(tmp_path / "b.zarr", random_levels((20, 20)))
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    edit_multiscale(path, lambda each: each["datasets"][0].update(path=name))
    refused(path, "cannot open level", read=False)


def test_shards_within_shards_are_refused(tmp_path):
    (values,) = random_levels((32, 32))
    path = write(tmp_path / "a.zarr", [values], (3, 32))
    shutil.rmtree(Path(path, "0"))
    inner = ShardingCodec(chunk_shape=(3, 8, 8), codecs=[BytesCodec(), GzipCodec()])
    array = zarr.create(
        store=path,
        path="0",
        shape=values.shape,
        chunks=values.shape,
        dtype="u1",
        codecs=[ShardingCodec(chunk_shape=(3, 16, 16), codecs=[inner])],
        zarr_format=3,
    )
    array[...] = values
    refused(path, "`sharding_indexed` is not supported", read=False)


@pipes
@pytest.mark.parametrize("name", ["zarr.json", "0/zarr.json", "0/c/0/0/0"])
def test_a_pipe_in_format_3_is_not_opened(tmp_path, name):
    path = write(tmp_path / "a.zarr", random_levels((32, 32)), (3, 32))
    Path(path, name).unlink()
    os.mkfifo(Path(path, name))
    with not_for_ever(Path(path, name)):
        refused(path, "is a named pipe", read=name.endswith("0"))

"""TIFF files that claim more than they hold, refused before anything is allocated or opened."""

import io
import os
import struct

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.images import noise
from tests.slides import raw_tiff, write_ome_rgb
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers import tiff_tiles
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.readers.tiff import TiffReader
from tnetcli.readers.tiff_files import (
    MOST_DIRECTORIES,
    MOST_LAYOUTS,
    check_directories,
    summarize_tiff,
)

SIDE = 64
WHOLE, FULL = Window(0, 0, SIDE, SIDE), Size(SIDE, SIDE)
NAMESPACE = "http://www.openmicroscopy.org/Schemas/OME/2016-06"


@pytest.fixture
def path(tmp_path):
    BLOCKS.clear()
    return tmp_path / "a.ome.tif"


def scene(seed=0, samples=1):
    return noise((SIDE, SIDE), samples, seed=seed)


def pixels_of(path, **options):
    with TiffReader(str(path), ReadOptions(**options)) as reader:
        return reader.read(WHOLE, FULL).values


def ome(data='<TiffData IFD="0"/>', *, order="XYZCT", prolog="", annotations="", uuid="", **sizes):
    """Return OME-XML of one image, whose sizes are one but for X and Y."""
    every = {"X": SIDE, "Y": SIDE, "Z": 1, "C": 1, "T": 1, **sizes}
    listed = " ".join(f'Size{axis}="{size}"' for axis, size in every.items())
    reference = '<AnnotationRef ID="A"/>' if annotations else ""
    return (
        f'<?xml version="1.0"?>{prolog}<OME xmlns="{NAMESPACE}"{uuid}><Image ID="Image:0">'
        f'{reference}<Pixels ID="Pixels:0" DimensionOrder="{order}" Type="uint8" {listed}>'
        f"{data}</Pixels></Image>{annotations}</OME>"
    )


def write_ome(path, text, image=None):
    image = scene()[0] if image is None else image
    tifffile.imwrite(path, image, description=text, metadata=None, tile=(64, 64))
    return path


# Sizes of OME against directories


MODULO = (
    '<StructuredAnnotations><XMLAnnotation ID="A" Namespace="x/modulo"><Value><Modulo>'
    '<ModuloAlongZ Type="lifetime" Start="0" End="500000000"/>'
    "</Modulo></Value></XMLAnnotation></StructuredAnnotations>"
)
TOO_MUCH = {
    "depth": ome(Z=300_000_000),
    "time": ome(T=10**9),
    "width and height": ome(X=2**20, Y=2**20),
    "planes of one entry": ome('<TiffData IFD="0" NumPlanes="500000000"/>', Z=10**9),
    "place of one entry": ome('<TiffData IFD="0" FirstZ="500000000"/>', Z=10**9),
    "samples of a missing axis": ome(
        '<Channel SamplesPerPixel="1000000000"/><TiffData IFD="0"/>', order="XYZT"
    ),
    "an axis twice": ome(order="XYZZCT", Z=30_000),
    "labels within an axis": ome(Z=2, annotations=MODULO),
}


@pytest.mark.parametrize("text", TOO_MUCH.values(), ids=TOO_MUCH)
def test_more_planes_than_directories_are_refused(path, text):
    write_ome(path, text)
    with pytest.raises(ImageError, match=r"declares .* planes, but has 1|has an axis from") as e:
        TiffReader(str(path))
    assert e.value.hint


def test_one_page_named_again_and_again_is_refused(path):
    write_ome(path, ome("".join(f'<TiffData IFD="0" FirstZ="{z}"/>' for z in range(300)), Z=300))
    with pytest.raises(ImageError, match="refers too often to its 1 planes"):
        TiffReader(str(path))


def test_the_planes_of_an_acquisition_that_was_stopped_are_read(path):
    write_ome(path, ome(Z=5))
    assert np.array_equal(pixels_of(path, z=0), scene())
    with pytest.raises(ImageError, match="plane 3 is missing"):
        pixels_of(path, z=3)


@pytest.mark.parametrize("prolog", ["<!DOCTYPE x []>", '<!DOCTYPE x [<!ENTITY a "b">]>'])
def test_a_document_type_is_refused(path, prolog):
    write_ome(path, ome(prolog=prolog))
    with pytest.raises(ImageError, match="DOCTYPE"):
        TiffReader(str(path))


def test_xml_that_is_too_long_is_refused(path):
    write_ome(path, ome("<x/>" * 2**19))
    with pytest.raises(ImageError, match="XML metadata of 2,097,"):
        TiffReader(str(path))
    write_ome(path, ome(" " * 2**24))
    with pytest.raises(ImageError, match="description or metadata of"):
        TiffReader(str(path))


# Companions of OME


def part(number, name, uuid, more=""):
    inside = f'<UUID FileName="{name}">{uuid}</UUID>'
    return f'<TiffData IFD="0" FirstC="{number}"{more}>{inside}</TiffData>'


def write_set(folder, names=("a.ome.tif", "b.ome.tif")):
    data = "".join(
        part(number, name, number, ' PlaneCount="1"') for number, name in enumerate(names)
    )
    for number, name in enumerate(("a.ome.tif", "b.ome.tif")):
        text = ome(data, order="XYCZT", C=2, uuid=f' UUID="{number}"')
        write_ome(folder / name, text, scene(number)[0])
    return folder / "a.ome.tif"


def test_planes_in_other_files_are_read_from_there(path):
    write_set(path.parent)
    with TiffReader(str(path)) as reader:
        assert reader.info.files == (str(path.with_name("b.ome.tif")),)
        values = reader.read(WHOLE, FULL).values
    assert np.array_equal(values, np.concatenate([scene(0), scene(1)]))


def test_what_is_there_of_a_set_is_read(path):
    write_set(path.parent).with_name("b.ome.tif").unlink()
    assert np.array_equal(pixels_of(path, bands=("1",)), scene(0))
    with pytest.raises(ImageError, match="missing"):
        pixels_of(path)


@pytest.mark.parametrize("name", ["../b.tif", "/b.tif", "x/b.tif", "x\\b.tif", "..", ""])
def test_a_companion_elsewhere_is_refused(path, name):
    write_set(path.parent, ("a.ome.tif", name))
    with pytest.raises(ImageError, match="outside its folder") as caught:
        TiffReader(str(path))
    assert f"`{name}`" in str(caught.value)


def test_a_companion_that_is_a_pipe_is_refused_without_waiting(path):
    write_set(path.parent, ("a.ome.tif", "pipe.tif"))
    os.mkfifo(path.with_name("pipe.tif"))
    with pytest.raises(ImageError, match=r"`pipe.tif`.*is a named pipe"):
        TiffReader(str(path))


def test_a_companion_is_checked_like_the_file_itself(path):
    write_set(path.parent)
    raw_tiff(path.with_name("b.ome.tif"), {256: [1], 257: [1], 277: [65_535]})
    with pytest.raises(ImageError, match="65,535 bands"):
        TiffReader(str(path))


# Directories


PAGE = {256: 4, 257: 4, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 4, 279: 16}


def entries(tags):
    """Return a directory of numbers; a tuple is a count and where its values are stored."""
    fields = [
        struct.pack("<HHII", code, 4, *(value if isinstance(value, tuple) else (1, value)))
        for code, value in sorted(tags.items())
    ]
    return struct.pack("<H", len(fields)) + b"".join(fields)


def write_chain(path, pages, *, more=b""):
    """Write directories one after the other; `more` is stored at byte 24."""
    place = 24 + len(more)
    parts = [struct.pack("<2sHI", b"II", 42, place), bytes(16), more]
    for number, tags in enumerate(pages, 1):
        body = entries(tags)
        place += len(body) + 4
        parts += [body, struct.pack("<I", place if number < len(pages) else 0)]
    path.write_bytes(b"".join(parts))
    return str(path)


def test_too_many_directories_are_refused(path):
    write_chain(path, [PAGE] * (MOST_DIRECTORIES + 1))
    with pytest.raises(ImageError, match="more than 10,000 directories"):
        check_directories(str(path))


def test_directories_of_too_many_kinds_are_refused(path):
    kinds = [{**PAGE, 256: width} for width in range(1, MOST_LAYOUTS + 2)]
    check_directories(write_chain(path, kinds[:-1]))
    with pytest.raises(ImageError, match="of more than 100 layouts"):
        check_directories(write_chain(path, kinds))


def test_pages_that_nothing_describes_are_not_taken_for_thousands_of_bands(path):
    write_chain(path, [{**PAGE, 256: 4 + number % 2} for number in range(5000)])
    with pytest.raises(ImageError, match="5,000 pages without metadata"):
        summarize_tiff(str(path))


def test_directories_upon_one_another_are_refused(path):
    # Every directory begins within the one before and is almost as long as the file.
    count, step = 40, 12
    data = bytearray(struct.pack("<2sHI", b"II", 42, 8)) + bytes(60 * 12)
    for number in range(count):
        struct.pack_into("<H", data, 8 + number * step, 10)
        struct.pack_into("<I", data, 8 + number * step + 2 + 120, 8 + (number + 1) * step)
    path.write_bytes(data)
    with pytest.raises(ImageError, match="overlapping directories"):
        check_directories(str(path))


def test_tags_that_share_their_values_are_refused(path):
    table = (1000, 24)
    pages = [{**PAGE, 273: table, 279: table}] * 20
    with pytest.raises(ImageError, match="overlapping values"):
        check_directories(write_chain(path, pages, more=bytes(4000)))


def write_subdirectories(path, offsets):
    tags = {**PAGE, 330: (len(offsets), 24) if len(offsets) > 1 else offsets[0]}
    return write_chain(path, [tags], more=struct.pack(f"<{len(offsets)}I", *offsets))


def test_too_many_subdirectories_are_refused(path):
    with pytest.raises(ImageError, match="100,000 subdirectories"):
        check_directories(write_subdirectories(path, [0] * 100_000))


@pytest.mark.parametrize("count", [1, 2])
def test_subdirectories_in_a_circle_are_refused(path, count):
    own = 24 + 4 * count
    with pytest.raises(ImageError, match="form a cycle"):
        check_directories(write_subdirectories(path, [own] * count))


def test_a_subdirectory_with_too_many_bands_is_refused(path):
    write_ome_rgb(path, [noise((SIDE, SIDE), 3), noise((32, 32), 3)])
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages.first.pages[0].aspage().tags[277].overwrite(5000)
    with pytest.raises(ImageError, match="5,000 bands"):
        check_directories(str(path))


def test_a_shape_of_too_many_axes_is_refused(path):
    text = '{"shape": [' + "9, " * 20_000 + "1]}"
    tifffile.imwrite(path, scene()[0], description=text, metadata=None)
    with pytest.raises(ImageError, match="too many axes"):
        summarize_tiff(str(path))


def test_plane_properties_are_not_read_for_every_plane(path):
    pages = [{**PAGE, 33628: (3000, 24), 33629: (3000, 24)}]
    with pytest.raises(ImageError, match="MetaMorph"):
        check_directories(write_chain(path, pages, more=bytes(12_000)))


@pytest.mark.parametrize("directories", [[271, 65420], []])
def test_an_ndpi_is_followed_without_end_neither(tmp_path, directories):
    path = tmp_path / ("a.ndpi" if not directories else "a.tif")
    tags = {**PAGE, **dict.fromkeys(directories, 0)}
    body = entries(tags)
    path.write_bytes(struct.pack("<2sHQ", b"II", 42, 24) + bytes(12) + body + struct.pack("<Q", 24))
    with pytest.raises(ImageError, match="form a cycle"):
        check_directories(str(path))


def test_sixty_thousand_bands_are_refused_on_opening(path):
    tags = {256: [1], 257: [1], 258: [8], 259: [1], 262: [1], 273: [8], 277: [65_535], 278: [1]}
    raw_tiff(path, {**tags, 279: [65_535]}, data=bytes(65_535))
    for reader in (None, "tiff", "slide", "raster"):
        with pytest.raises(ImageError, match="65,535 bands"):
            open_image(path, reader=reader)


@pytest.mark.parametrize(("tag", "name"), [(34412, "Zeiss LSM"), (34362, "Olympus FluoView")])
def test_stacks_whose_axes_are_not_read_are_refused(tmp_path, tag, name):
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as writer:
        for seed in range(2):
            extra = [(tag, "B", 8, bytes(8), False)]
            writer.write(scene(seed)[0], metadata=None, contiguous=False, extratags=extra)
    with pytest.raises(ImageError, match=name):
        summarize_tiff(str(path))


# Blocks whose header says another size


def jpeg_of(width, height, *, mode="RGB", **options):
    file = io.BytesIO()
    image = Image.fromarray(noise((width, height), 3).transpose(1, 2, 0)).convert(mode)
    image.save(file, "JPEG", **options)
    return file.getvalue()


def write_block(path, code, data, *, samples=3, size=(64, 64), strip=None):
    """Write an image of one block; `strip` is its number of rows where it is no tile."""
    colours = 2 if samples == 3 else 1
    tags = {256: [size[0]], 257: [size[1]], 258: [8] * samples, 259: [code], 262: [colours]}
    tags |= {277: [samples], 284: [1]}
    if strip:
        tags |= {273: [8], 278: [strip], 279: [len(data)]}
    else:
        tags |= {322: [64], 323: [64], 324: [8], 325: [len(data)]}
    return raw_tiff(path, tags, data=data)


def open_whole(path):
    with TiffReader(str(path)) as reader:
        size = reader.size
        return reader.read(Window(0, 0, size.width, size.height), size).values


@pytest.mark.parametrize("side", [(128, 128), (64, 128), (128, 64), (65, 64), (63, 64), (64, 48)])
def test_a_jpeg_tile_of_another_size_is_refused(path, side):
    write_block(path, 7, jpeg_of(*side))
    with pytest.raises(ImageError, match=f"an image of {side[0]} x {side[1]} pixels, not 64 x 64"):
        open_whole(path)


@pytest.mark.parametrize(("height", "fine"), [(40, True), (48, True), (64, False), (39, False)])
def test_the_last_jpeg_strip_may_be_filled_up(path, height, fine):
    write_block(path, 7, jpeg_of(64, height), size=(64, 40), strip=40)
    if fine:
        assert open_whole(path).shape == (3, 40, 64)
    else:
        with pytest.raises(ImageError, match="an image of 64 x"):
            open_whole(path)


def test_a_jpeg_tile_of_other_samples_is_refused(path):
    write_block(path, 7, jpeg_of(64, 64, mode="L"))
    with pytest.raises(ImageError, match="block 0 is an image of"):
        open_whole(path)


def test_the_size_hidden_behind_a_broken_segment_of_the_tables_is_found(path):
    data = jpeg_of(128, 128)
    # A segment at the end of the tables swallows the first frame of the tile.
    small = b"\xff\xc0" + struct.pack(">HBHHB", 17, 8, 64, 64, 3) + bytes(9)
    tile = b"\xff\xd8" + small + data[2:]
    tables = b"\xff\xd8\xff\xe5" + struct.pack(">H", 2 + 16 + len(small)) + b"\xff\xd9"
    tags = {256: [64], 257: [64], 258: [8, 8, 8], 259: [7], 262: [2], 277: [3], 284: [1]}
    tags |= {322: [64], 323: [64], 324: [8], 325: [len(tile)], 347: list(tables)}
    raw_tiff(path, tags, data=tile)
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages.first.tags[347].overwrite(tables, dtype="B")
    with pytest.raises(ImageError, match="an image of 128 x 128"):
        open_whole(path)


def test_an_image_within_the_tables_is_refused(path):
    tifffile.imwrite(
        path, noise((64, 64), 3).transpose(1, 2, 0), tile=(64, 64), photometric="rgb",
        compression="jpeg", metadata=None, extratags=[(347, "B", 0, jpeg_of(64, 64), True)],
    )  # fmt: skip
    with pytest.raises(ImageError, match="an image within its JPEG tables"):
        open_whole(path)


def test_a_jpeg_tile_of_too_many_scans_is_refused(path):
    data = jpeg_of(64, 64, progressive=True)
    write_block(path, 7, data)
    assert open_whole(path).shape == (3, 64, 64)
    last = data.rindex(b"\xff\xda")
    write_block(path, 7, data[:last] + data[last:-2] * 120 + data[-2:])
    with pytest.raises(ImageError, match="too many scans"):
        open_whole(path)


def test_the_size_of_jpeg_is_that_of_pillow():
    for width, height, options in [
        (1, 1, {}), (300, 7, {"progressive": True}), (64, 64, {"comment": b"\xff\xc0" * 30}),
        (17, 90, {"icc_profile": bytes(70_000)}), (33, 20, {"restart_marker_rows": 1}),
    ]:  # fmt: skip
        assert tiff_tiles.jpeg(jpeg_of(width, height, **options)) == (width, height, 3)


def test_the_frame_is_searched_for_behind_complete_tables_only():
    tables = b"\xff\xd8" + b"\xff\xdb\x00\x04ab" + b"\xff\xc4\x00\x05abc"
    assert tiff_tiles._after_tables(tables) == len(tables)
    for unsure in (
        tables[:-1],
        tables + b"\xff",
        tables + b"\xff\xd9\x00\x02",
        b"\xff\xd8abcd",
    ):
        assert tiff_tiles._after_tables(unsure) == 2
    # A last table that is longer than the rest would hide the frame that libjpeg finds.
    stream = jpeg_of(64, 48)[2:]
    assert tiff_tiles.jpeg(tables + stream, len(tables)) == (64, 48, 3)


CODECS = {
    "jpeg 2000": (34712, tiff_tiles.jpeg_2000, imagecodecs.jpeg2k_encode, {"codecformat": "J2K"}),
    "jp2": (34712, tiff_tiles.jpeg_2000, imagecodecs.jpeg2k_encode, {"codecformat": "JP2"}),
    "webp": (50001, tiff_tiles.webp, imagecodecs.webp_encode, {"lossless": True}),
    "lossy webp": (50001, tiff_tiles.webp, imagecodecs.webp_encode, {"level": 80}),
}  # fmt: skip


def image_of(width, height, samples=3):
    return np.ascontiguousarray(noise((width, height), samples).transpose(1, 2, 0))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_declared_size_is_that_of_the_image(codec):
    _, declared, encode, options = codec
    for width, height in [(64, 64), (256, 256), (33, 70), (600, 8), (120, 100), (16, 9), (513, 1)]:
        assert declared(encode(image_of(width, height), **options))[:2] == (width, height)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_tile_of_another_size_is_refused_before_it_is_decoded(path, codec):
    code, _, encode, options = codec
    write_block(path, code, encode(image_of(64, 64), **options))
    assert open_whole(path).shape == (3, 64, 64)
    for side in [(128, 128), (128, 32), (32, 32)]:
        write_block(path, code, encode(image_of(*side), **options))
        with pytest.raises(ImageError, match=f"an image of {side[0]} x {side[1]} pixels"):
            open_whole(path)


@pytest.mark.parametrize("declared", {codec[1] for codec in CODECS.values()})
def test_a_block_without_a_header_is_an_error(declared):
    for data in (b"", b"\0" * 60, b"\xff\x0a", b"\xff\x4f\xff\x51"):
        try:
            found = declared(data)
        except (ValueError, struct.error):
            continue
        assert found.width < 64  # of no block


def test_a_block_that_no_header_bounds_is_refused(path):
    write_block(path, 22610, imagecodecs.jpegxr_encode(image_of(64, 64)))
    with pytest.raises(ImageError, match="compression 22610"):
        open_whole(path)


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_short_tile_is_not_taken_for_one_as_wide_as_the_image(path, compression):
    """Without its byte counts tifffile takes as many bytes as the image has pixels."""
    tifffile.imwrite(path, noise((38, 50), 3), tile=(64, 64), compression=compression)
    with tifffile.TiffFile(path) as file:
        counts = file.pages[0].tags["TileByteCounts"]
        place, offset = counts.offset, file.pages[0].dataoffsets[0]
    content = bytearray(path.read_bytes())
    content[place : place + 2] = (60000).to_bytes(2, "little")  # a tag of no meaning
    if compression:  # as many values as the image has, not as the tile has
        short = imagecodecs.zlib_encode(bytes(38 * 50 * 3))
        content[offset : offset + len(short)] = short
    path.write_bytes(content)
    with TiffReader(str(path), ReadOptions()) as reader, pytest.raises(ImageError):
        reader.read(Window(0, 0, 50, 38), Size(50, 38))


def test_a_jpeg_tile_at_the_edge_may_end_with_the_image(path):
    write_block(path, 7, jpeg_of(50, 40), size=(50, 40))
    assert open_whole(path).shape == (3, 40, 50)

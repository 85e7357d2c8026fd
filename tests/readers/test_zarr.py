import json
import logging
import multiprocessing
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    ZstdCodec,
)

from tests.images import area_average
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.zarr import OmeZarrReader
from tnetcli.testing.reader import TRUTH, ReaderContract, area_mean

DATA = Path(__file__).parents[3] / "shared" / "data" / "wsi"
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"real images are not at {DATA}")

# How an image may be stored: zarr format, and the shards around chunks of 16 x 16.
STORED = {"v2": (2, None), "v3": (3, None), "v3 in shards": (3, 32)}
CHUNK = 16


@pytest.fixture(params=STORED.values(), ids=STORED.keys())
def stored(request):
    return request.param


def random_levels(*sizes, bands=3, dtype="u1"):
    random = np.random.default_rng(7)
    return [
        random.integers(1, 200, (bands, height, width)).astype(dtype) for height, width in sizes
    ]


def write(
    path,
    levels,
    stored=(2, None),
    axes="cyx",
    names=None,
    scales=None,
    units="micrometer",
    omero=None,
    outer=None,
    chunks=None,
    fill_value=0,
    **array_options,
):
    """Write an image whose arrays already have the order of `axes`."""
    zarr_format, shard = stored
    group = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
    names = names or [str(number) for number in range(len(levels))]
    datasets = []
    for index, (name, values) in enumerate(zip(names, levels, strict=True)):
        lengths = dict(zip(axes, values.shape, strict=True))
        chunk = {axis: lengths[axis] for axis in axes} | {"y": CHUNK, "x": CHUNK} | (chunks or {})
        options = dict(array_options)
        if shard:
            around = {axis: chunk[axis] for axis in axes} | {"y": shard, "x": shard}
            options["shards"] = tuple(around[axis] for axis in axes)
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=tuple(chunk[axis] for axis in axes),
            fill_value=fill_value,
            **options,
        )
        array[...] = values
        dataset = {"path": name}
        if scales is not None and scales[index] is not None:
            dataset["coordinateTransformations"] = [{"type": "scale", "scale": scales[index]}]
        datasets.append(dataset)
    multiscale = {"axes": [axis_record(axis, units) for axis in axes], "datasets": datasets}
    if outer is not None:
        multiscale["coordinateTransformations"] = [{"type": "scale", "scale": outer}]
    describe(
        group, zarr_format, {"multiscales": [multiscale]} | ({"omero": omero} if omero else {})
    )
    return str(path)


def axis_record(axis, unit):
    if axis in "zyx":
        return {"name": axis, "type": "space"} | ({"unit": unit} if unit else {})
    return {"name": axis, "type": "channel" if axis == "c" else "time"}


def describe(group, zarr_format, attributes):
    if zarr_format == 2:
        for multiscale in attributes.get("multiscales", []):
            multiscale["version"] = "0.4"
        group.attrs.update(attributes)
    else:
        group.attrs["ome"] = {"version": "0.5", **attributes}


def edit_multiscale(path, change):
    group = zarr.open_group(path, mode="r+")
    multiscales = group.attrs["multiscales"]
    change(multiscales[0])
    group.attrs["multiscales"] = multiscales


def whole(reader):
    return reader.read(Window.whole(reader.size), reader.size)


def object_files(path, level="0"):
    """Return the chunk or shard files of a level."""
    names = Path(path, level).rglob("*")
    return sorted(
        each
        for each in names
        if each.is_file() and each.name not in {".zarray", ".zattrs", "zarr.json"}
    )


class OmeZarrContract(ReaderContract):
    stored: tuple[int, int | None]

    def open(self, path):
        return OmeZarrReader(str(path))

    @pytest.fixture(scope="class")
    @classmethod
    def image(cls, tmp_path_factory):
        levels = [TRUTH, area_average(TRUTH, 2), area_average(TRUTH, 4)]
        path = tmp_path_factory.mktemp("image") / "a.ome.zarr"
        return Path(write(path, levels, cls.stored, chunks={"y": 64, "x": 64}))

    @pytest.fixture
    def levels_image(self, tmp_path_factory):
        constants = (10, 20, 30)
        levels = [np.full((3, 512 >> i, 512 >> i), constants[i], "u1") for i in range(3)]
        path = tmp_path_factory.mktemp("levels") / "a.ome.zarr"
        return Path(write(path, levels, self.stored, chunks={"y": 64, "x": 64})), constants


class TestOmeZarrReaderOfFormat2(OmeZarrContract):
    stored = (2, None)


class TestOmeZarrReaderOfShards(OmeZarrContract):
    stored = (3, 128)


# Pixels


def test_a_window_at_full_resolution_is_the_stored_array(tmp_path, stored):
    (values,) = random_levels((70, 100))
    padded = np.pad(values, ((0, 0), (40, 40), (40, 40)))
    inside = np.pad(np.ones(values.shape[1:], bool), 40)
    with OmeZarrReader(write(tmp_path / "a.zarr", [values], stored)) as reader:
        for left, top, width, height in (
            (0, 0, 100, 70), (3, 5, 40, 33), (16, 16, 16, 16), (99, 69, 1, 1), (-8, -5, 30, 30),
            (90, 60, 30, 30),
        ):  # fmt: skip
            box = (slice(top + 40, top + 40 + height), slice(left + 40, left + 40 + width))
            pixels = reader.read(Window(left, top, width, height), Size(width, height))
            assert np.array_equal(pixels.values, padded[:, *box])
            assert np.array_equal(pixels.valid, inside[box])


def test_a_view_is_the_area_mean_of_the_coarsest_level_that_is_fine_enough(tmp_path):
    levels = random_levels((96, 128), (48, 64), (24, 32))
    with OmeZarrReader(write(tmp_path / "a.zarr", levels, (3, 32))) as reader:
        for window, out_size, level in (
            (Window(0, 0, 128, 96), Size(128, 96), 0),
            (Window(10.5, 7.25, 60, 41), Size(31, 29), 0),
            (Window(0, 0, 128, 96), Size(64, 48), 1),
            (Window(9, 5, 100, 80), Size(33, 20), 1),
            (Window(0, 0, 128, 96), Size(10, 10), 2),
            (Window(-20, -20, 200, 160), Size(25, 20), 2),
        ):
            expected = area_mean(levels[level], window.scaled(2**level, 2**level), out_size)
            pixels = reader.read(window, out_size)
            assert np.array_equal(pixels.valid, expected[0] > 0)
            assert np.abs(pixels.values - expected).max() <= 0.501


@pytest.mark.parametrize(
    "axes", ["yx", "xy", "cyx", "yxc", "xyc", "ycx", "zyx", "tyx", "czyx", "tcyx", "tczyx", "zctxy"]
)
def test_axes_are_found_by_name_in_any_order(tmp_path, axes):
    values = random_levels((40, 50))[0]  # (c, y, x)
    full = values[None, :, None] if "c" in axes else values[None, :1, None]  # (t, c, z, y, x)
    kept = [axis for axis in "tczyx" if axis in axes]
    dropped = tuple("tczyx".index(axis) for axis in "tcz" if axis not in axes)
    array = full.squeeze(dropped).transpose([kept.index(axis) for axis in axes])

    with OmeZarrReader(write(tmp_path / "a.zarr", [array], (3, 32), axes)) as reader:
        assert reader.size == Size(50, 40)
        pixels = reader.read(Window(7, 9, 30, 20), Size(30, 20))

    assert np.array_equal(pixels.values, full[0, :, 0, 9:29, 7:37])


# Levels


def test_the_multiscales_decide_the_levels_and_not_the_names_of_folders(tmp_path, stored):
    levels = [
        np.full((1, 96 // s, 128 // s), value, "u1") for s, value in ((4, 40), (1, 10), (2, 20))
    ]
    path = write(tmp_path / "a.zarr", levels, stored, names=["0", "z", "full/1"])
    decoy = zarr.open_group(path, mode="r+").create_array("1", shape=(1, 999, 999), dtype="u1")
    decoy[...] = 99

    with OmeZarrReader(path) as reader:
        assert reader.size == Size(128, 96)
        assert reader.overviews == (2.0, 4.0)
        seen = [reader.read(Window(0, 0, 64, 64), Size(n, n)).values.max() for n in (64, 32, 16)]

    assert seen == [10, 20, 40]


def test_the_scale_of_a_level_is_whole_where_odd_pixels_are_left_out(tmp_path):
    levels = random_levels((101, 101), (50, 50), (25, 25))
    scales = [[1, 0.5, 0.5], [1, 1.0, 1.0], [1, 2.0, 2.0]]
    with OmeZarrReader(write(tmp_path / "a.zarr", levels, scales=scales)) as reader:
        assert [(each.scale_x, each.scale_y) for each in reader.info.levels] == [
            (1, 1),
            (2, 2),
            (4, 4),
        ]
        assert reader.info.warnings == ()


@pytest.mark.parametrize("claim", [8.0, 2.3, 1e99])
def test_a_scale_that_does_not_fit_the_sizes_is_not_believed(tmp_path, claim):
    levels = random_levels((160, 160), (80, 80))
    scales = [[1, 1, 1], [1, claim, claim]]
    with OmeZarrReader(write(tmp_path / "a.zarr", levels, scales=scales)) as reader:
        assert reader.overviews == (2.0,)


def test_a_level_of_another_place_is_ignored_with_a_warning(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((96, 96), (48, 48), (24, 24)))

    def shift(multiscale):
        for dataset, scale, start in zip(
            multiscale["datasets"], (1, 2, 4), (0, 0.5, 40), strict=True
        ):
            dataset["coordinateTransformations"] = [
                {"type": "scale", "scale": [1, scale, scale]},
                {"type": "translation", "translation": [0, start, start]},
            ]

    edit_multiscale(path, shift)
    with OmeZarrReader(path) as reader:
        assert reader.overviews == (2.0,)
        assert "level `2` has another origin" in reader.info.warnings[0]


@pytest.mark.parametrize("other", [np.zeros((1, 24, 24), "f4"), np.zeros((2, 24, 24), "u1")])
def test_a_level_of_another_kind_is_ignored_with_a_warning(tmp_path, other):
    path = write(tmp_path / "a.zarr", [np.ones((1, 48, 48), "u1"), other])
    with OmeZarrReader(path) as reader:
        assert reader.overviews == ()
        assert "level `1`" in reader.info.warnings[0]


def test_a_listed_level_that_is_lost_is_an_error(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((96, 96), (48, 48)))
    shutil.rmtree(Path(path, "0"))
    with pytest.raises(ImageError, match="cannot open level `0`") as caught:
        OmeZarrReader(path)
    assert "copy it again" in caught.value.hint


def test_a_level_outside_of_the_group_is_refused(tmp_path):
    write(tmp_path / "secret.zarr", random_levels((32, 32)))
    path = write(tmp_path / "a.zarr", random_levels((32, 32)))
    edit_multiscale(path, lambda each: each["datasets"][0].update(path="../secret.zarr/0"))
    with pytest.raises(ImageError, match="cannot open level"):
        OmeZarrReader(path)


def test_a_block_is_the_chunk_inside_the_shard_cut_to_the_level(tmp_path):
    levels = random_levels((100, 100), (50, 10))
    with OmeZarrReader(write(tmp_path / "a.zarr", levels, (3, 32))) as reader:
        assert [each.block for each in reader.info.levels] == [Size(16, 16), Size(10, 16)]
        assert reader.info.details["shards"] == [3, 32, 32]


def test_a_chunk_that_would_fill_memory_is_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((32, 32)))
    metadata = Path(path, "0", ".zarray")
    record = json.loads(metadata.read_text())
    metadata.write_text(
        json.dumps(record | {"shape": [3, 10**6, 10**6], "chunks": [3, 10**5, 10**5]})
    )
    with pytest.raises(ImageError, match="one block"):
        OmeZarrReader(path)


# Metadata


def test_axes_that_make_no_image_are_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((20, 30)))
    for axes in (["y", "x"], ["q", "y", "x"], ["y", "y", "x"], ["c", "z", "t"], None, 5):
        edit_multiscale(path, lambda each, axes=axes: each.update(axes=axes))
        with pytest.raises(ImageError, match="ax"):
            OmeZarrReader(path)


@pytest.mark.parametrize(
    "transformations",
    [
        "no list",
        [1, {"type": "scale"}],
        [{"type": "scale", "scale": [1, "a", None]}],
        [{"type": "scale", "scale": [1, 0, 10**400]}],
        [{"type": "scale", "scale": [1, 2]}],
    ],
)
def test_malformed_transformations_are_as_good_as_none(tmp_path, transformations):
    path = write(tmp_path / "a.zarr", random_levels((40, 40), (20, 20)))
    edit_multiscale(
        path,
        lambda each: [
            dataset.update(coordinateTransformations=transformations)
            for dataset in each["datasets"]
        ],
    )
    with OmeZarrReader(path) as reader:
        assert reader.overviews == (2.0,)
        assert reader.microns_per_pixel is None


@pytest.mark.parametrize(
    ("unit", "scale", "outer", "expected"),
    [
        ("micrometer", [1, 0.5, 0.25], None, (0.25, 0.5)),
        ("nanometer", [1, 250, 250], None, (0.25, 0.25)),
        ("micrometer", [1, 1, 1], [1, 0.5, 0.5], (0.5, 0.5)),
        (None, [1, 0.5, 0.5], None, None),
        ("furlong", [1, 0.5, 0.5], None, None),
    ],
)
def test_microns_per_pixel_come_from_the_scale_and_its_unit(tmp_path, unit, scale, outer, expected):
    path = write(
        tmp_path / "a.zarr",
        random_levels((20, 20)),
        scales=[scale],
        units=unit,
        outer=outer,
    )
    with OmeZarrReader(path) as reader:
        found = reader.microns_per_pixel
    assert (None if found is None else (found.x, found.y)) == expected
    assert found is None or found.source == "OME-Zarr scale"


def test_bands_are_named_by_omero(tmp_path, stored):
    omero = {"channels": [{"label": "DAPI"}, {"label": ""}, {"label": "CD3"}]}
    path = write(tmp_path / "a.zarr", random_levels((20, 20)), stored, omero=omero)
    with OmeZarrReader(path) as reader:
        assert reader.bands == ("DAPI", "2", "CD3")


@pytest.mark.parametrize("channel_chunk", [1, 2, 5])
def test_chosen_bands_come_in_the_order_asked_for(tmp_path, stored, channel_chunk):
    (values,) = random_levels((40, 40), bands=5)
    omero = {"channels": [{"label": name} for name in "abcde"]}
    path = write(tmp_path / "a.zarr", [values], stored, omero=omero, chunks={"c": channel_chunk})
    with OmeZarrReader(path, ReadOptions(bands=("E", "1", "d"))) as reader:
        assert reader.bands == ("e", "a", "d")
        assert np.array_equal(whole(reader).values, values[[4, 0, 3]])


def test_chunks_of_bands_that_were_not_chosen_are_not_read(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((16, 16), bands=5), chunks={"c": 1})
    with OmeZarrReader(path, ReadOptions(bands=("5", "1"))) as reader:
        whole(reader)
        wanted = [Path(path, "0", name) for name in ("0.0.0", "4.0.0")]
        assert reader.cost.bytes_read == sum(each.stat().st_size for each in wanted)


@pytest.mark.parametrize(
    ("stored", "compressors", "name"),
    [
        ((2, None), numcodecs.Blosc(), "blosc"),
        ((2, None), numcodecs.Zlib(), "zlib"),
        ((2, None), None, "none"),
        ((3, None), (ZstdCodec(), Crc32cCodec()), "zstd"),
        ((3, None), None, "none"),
        ((3, 32), GzipCodec(), "gzip"),
        ((3, 32), BloscCodec(), "blosc"),
    ],
)
def test_the_layout_tells_how_the_image_is_stored(tmp_path, stored, compressors, name):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)), stored, compressors=compressors)
    with OmeZarrReader(path) as reader:
        assert reader.info.compression == name
        assert reader.info.tiled
        assert reader.info.details["zarr_format"] == stored[0]
        assert reader.info.details["ngff"] == ("0.4" if stored[0] == 2 else "0.5")


# Stacks


def stack(depth=5, times=1):
    values = np.arange(times * depth, dtype="u1").reshape(times, depth, 1, 1)
    return np.broadcast_to(values, (times, depth, 20, 30))


def test_a_stack_opens_but_is_not_read_before_a_plane_is_chosen(tmp_path, stored):
    path = write(tmp_path / "a.zarr", [stack()], stored, axes="tzyx", chunks={"z": 1})
    with OmeZarrReader(path) as reader:
        assert reader.info.details["planes"] == {"z": 5, "t": 1}
        assert "`-O z=4`" in reader.info.warnings[-1]
        with pytest.raises(ImageError) as caught:
            whole(reader)
    assert caught.value.hint == "choose a plane with `-O z=0` to `-O z=4`"


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_the_chosen_plane_is_read(tmp_path, stored, chunk):
    path = write(
        tmp_path / "a.zarr",
        [stack(5, 3)],
        stored,
        axes="tzyx",
        chunks={"z": chunk, "t": 1},
        fill_value=99,
    )
    with OmeZarrReader(path, ReadOptions(z=3, t=2)) as reader:
        assert reader.info.warnings == ()
        assert (whole(reader).values == 2 * 5 + 3).all()


def test_an_overview_with_fewer_planes_gives_the_one_that_covers_the_plane(tmp_path):
    levels = [stack(5)[0], stack(3)[0, :, :10, :15] + 100]
    path = write(tmp_path / "a.zarr", levels, axes="zyx", chunks={"z": 1}, fill_value=99)
    with OmeZarrReader(path, ReadOptions(z=4)) as reader:
        assert "average planes" in reader.info.warnings[0]
        assert (reader.read(Window(0, 0, 30, 20), Size(15, 10)).values == 102).all()


# Validity


def test_pixels_of_a_chunk_that_is_not_stored_are_not_valid(tmp_path, stored, caplog):
    (values,) = random_levels((64, 64))
    path = write(tmp_path / "a.zarr", [values], stored, fill_value=77)
    lost = 32 if stored[1] else 16  # the edge of an object
    object_files(path)[0].unlink()
    expected = values.copy()
    expected[:, :lost, :lost] = 0

    with caplog.at_level(logging.WARNING, "tnetcli"), OmeZarrReader(path) as reader:
        pixels = whole(reader)
        whole(reader)

    assert not pixels.valid[:lost, :lost].any()
    assert pixels.valid.sum() == 64 * 64 - lost**2
    assert np.array_equal(pixels.values, expected)
    assert [each.message for each in caplog.records] == [
        f"at least 1 chunks of `{path}` are missing; their pixels are invalid"
    ]


def test_a_pixel_that_lacks_one_band_is_not_valid(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((16, 32)), chunks={"c": 1})
    Path(path, "0", "1.0.1").unlink()
    with OmeZarrReader(path) as reader:
        pixels = whole(reader)
        assert reader.cost.pixels_decoded == 16 * 16 + 171  # two thirds of the other half
    assert pixels.valid[:, :16].all()
    assert not pixels.valid[:, 16:].any()
    assert not pixels.values[:, :, 16:].any()


def test_nan_is_not_valid(tmp_path, stored):
    values = np.ones((2, 20, 20), "f4")
    values[1, 3, 4] = np.nan
    with OmeZarrReader(write(tmp_path / "a.zarr", [values], stored)) as reader:
        assert reader.info.mask == "nan"
        pixels = whole(reader)
    assert np.argwhere(~pixels.valid).tolist() == [[3, 4]]
    assert pixels.values[0, 3, 4] == 0


# Damage

CODECS = {
    "v2 blosc": ((2, None), numcodecs.Blosc("zstd")),
    "v2 blosc lz4": ((2, None), numcodecs.Blosc("lz4")),
    "v2 zstd": ((2, None), numcodecs.Zstd()),
    "v2 gzip": ((2, None), numcodecs.GZip()),
    "v2 zlib": ((2, None), numcodecs.Zlib()),
    "v2 none": ((2, None), None),
    "v3 blosc": ((3, None), BloscCodec()),
    "v3 zstd": ((3, None), ZstdCodec()),
    "v3 gzip": ((3, None), GzipCodec()),
    "v3 crc": ((3, None), Crc32cCodec()),
    "v3 blosc in shards": ((3, 32), BloscCodec()),
    "v3 zstd in shards": ((3, 32), ZstdCodec()),
    "v3 none in shards": ((3, 32), None),
}


@pytest.mark.parametrize(("stored", "compressors"), CODECS.values(), ids=CODECS.keys())
def test_a_truncated_object_is_an_error_and_other_windows_are_read(tmp_path, stored, compressors):
    (values,) = random_levels((64, 64))
    path = write(tmp_path / "a.zarr", [values], stored, compressors=compressors)
    first = object_files(path)[0]
    content = first.read_bytes()
    for length in {0, 3, 20, len(content) // 2, len(content) - 2}:
        first.write_bytes(content[:length])
        with OmeZarrReader(path) as reader:
            with pytest.raises(ImageError, match="cannot read"):
                reader.read(Window(0, 0, 10, 10), Size(10, 10))
            other = reader.read(Window(40, 40, 20, 20), Size(20, 20))
        assert np.array_equal(other.values, values[:, 40:60, 40:60])


@pytest.mark.parametrize(
    ("stored", "compressors"),
    [each for name, each in CODECS.items() if name not in {"v2 none"}],
    ids=[name for name in CODECS if name not in {"v2 none"}],
)
def test_garbage_in_an_object_is_an_error(tmp_path, stored, compressors):
    path = write(tmp_path / "a.zarr", random_levels((64, 64)), stored, compressors=compressors)
    first = object_files(path)[0]
    first.write_bytes(np.random.default_rng(1).bytes(first.stat().st_size))
    with OmeZarrReader(path) as reader, pytest.raises(ImageError, match="cannot read"):
        reader.read(Window(0, 0, 10, 10), Size(10, 10))


def test_a_chunk_past_the_end_of_a_truncated_shard_is_not_taken_for_an_empty_one(tmp_path):
    # Here the index comes first, so it survives what its chunks do not.
    path = write(tmp_path / "a.zarr", random_levels((32, 32)), (3, 32))
    shutil.rmtree(Path(path, "0"))
    codec = ShardingCodec(
        chunk_shape=(3, 16, 16), codecs=[BytesCodec(), ZstdCodec()], index_location="start"
    )
    (values,) = random_levels((32, 32))
    array = zarr.create(
        store=path,
        path="0",
        shape=values.shape,
        chunks=values.shape,
        dtype="u1",
        codecs=[codec],
        zarr_format=3,
    )
    array[...] = values
    (shard,) = object_files(path)
    shard.write_bytes(shard.read_bytes()[:100])
    with OmeZarrReader(path) as reader, pytest.raises(ImageError, match="truncated"):
        reader.read(Window(20, 20, 8, 8), Size(8, 8))


def test_a_chunk_that_claims_less_than_nothing_is_an_error(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((32, 32)), compressors=numcodecs.Blosc())
    first = object_files(path)[0]
    content = bytearray(first.read_bytes())
    content[4:8] = b"\xff" * 4  # the length once decoded, of which blosc makes -1
    first.write_bytes(content)
    with OmeZarrReader(path) as reader, pytest.raises(ImageError, match="cannot read"):
        whole(reader)


# What is no image


@pytest.mark.parametrize("place", ["", "A/1"])
def test_a_plate_and_a_well_give_a_field_as_an_example(tmp_path, place):
    path = tmp_path / "plate.zarr"
    group = zarr.open_group(str(path), mode="w", zarr_format=2)
    group.attrs["plate"] = {"wells": [{"path": "Z/9"}, {"path": "A/1"}]}
    well = group.create_group("A/1")
    well.attrs["well"] = {"images": [{"path": "7"}, {"path": "0"}]}
    field = write(path / "A" / "1" / "0", random_levels((20, 20)))

    with pytest.raises(ImageError, match="plate") as caught:
        OmeZarrReader(str(path / place))

    assert f"`{field}`" in caught.value.hint
    OmeZarrReader(field).close()


@pytest.mark.parametrize("series", [1, 2])
def test_the_first_series_of_bioformats2raw_is_read(tmp_path, series):
    path = tmp_path / "a.zarr"
    zarr.open_group(str(path), mode="w", zarr_format=2).attrs["bioformats2raw.layout"] = 3
    for number in range(series):
        write(path / str(number), [np.full((1, 20, 20), number + 5, "u1")])
    with OmeZarrReader(str(path)) as reader:
        assert (whole(reader).values == 5).all()
        assert len(reader.info.warnings) == series - 1


def test_a_group_without_multiscales_is_refused_with_a_hint(tmp_path):
    zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    with pytest.raises(ImageError, match="multiscales") as caught:
        OmeZarrReader(str(tmp_path / "a.zarr"))
    assert "multiscales" in caught.value.hint


@pytest.mark.parametrize("multiscales", [[], [{}], [{"datasets": []}], "x", [3], None])
def test_multiscales_without_levels_are_refused(tmp_path, multiscales):
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    group.attrs["multiscales"] = multiscales
    with pytest.raises(ImageError, match="multiscales"):
        OmeZarrReader(str(tmp_path / "a.zarr"))


def test_what_is_no_zarr_at_all_is_refused(tmp_path):
    (tmp_path / "text.zarr").write_text("no zarr")
    (tmp_path / "folder").mkdir()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "no zarr")
    array = zarr.create_array(str(tmp_path / "array.zarr"), shape=(4, 4), dtype="u1")
    assert array.shape == (4, 4)
    for name in ("text.zarr", "folder", "a.zip", "array.zarr", "missing.zarr"):
        with pytest.raises(ImageError) as caught:
            OmeZarrReader(str(tmp_path / name))
        assert caught.value.hint


@pytest.mark.parametrize("name", [".zgroup", ".zattrs", "0/.zarray"])
def test_damaged_metadata_is_an_image_error(tmp_path, name):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    for content in ("", "[]", "null", "{", "5", '{"zarr_format": 9}'):
        Path(path, name).write_text(content)
        with pytest.raises(ImageError):
            OmeZarrReader(path)


def test_an_empty_level_is_refused(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((20, 20)))
    metadata = Path(path, "0", ".zarray")
    for change in ({"shape": [3, 0, 20]}, {"chunks": [3, 0, 16]}):
        record = json.loads(metadata.read_text())
        metadata.write_text(json.dumps(record | change))
        with pytest.raises(ImageError, match="level `0`"):
            OmeZarrReader(path)


def test_a_url_without_fsspec_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImageError, match="needs fsspec") as caught:
        OmeZarrReader("https://example.org/a.zarr")
    assert "pip install" in caught.value.hint


def test_an_image_at_a_url_is_read_and_its_size_bounded(tmp_path, stored):
    path = write(tmp_path / "a.zarr", random_levels((40, 40)), stored)
    with OmeZarrReader(path) as local, OmeZarrReader(f"file://{path}") as remote:
        assert np.array_equal(whole(remote).values, whole(local).values)
        assert remote.cost == local.cost
    object_files(path)[0].write_bytes(bytes(2**20))
    with OmeZarrReader(f"file://{path}") as reader, pytest.raises(ImageError, match="cannot read"):
        whole(reader)


# Zip files


def zip_folder(folder, target, prefix=""):
    with zipfile.ZipFile(target, "w") as archive:
        for each in sorted(Path(folder).rglob("*")):
            if each.is_file():
                archive.write(each, prefix + each.relative_to(folder).as_posix())
    return str(target)


@pytest.mark.parametrize("prefix", ["", "outer/a.zarr/"])
def test_a_zip_is_read_like_the_folder_in_it(tmp_path, stored, prefix):
    levels = random_levels((64, 64), (32, 32))
    folder = write(tmp_path / "a.zarr", levels, stored, fill_value=77)
    object_files(folder, "1")[-1].unlink()
    path = zip_folder(folder, tmp_path / "a.zarr.zip", prefix)
    with OmeZarrReader(path) as zipped, OmeZarrReader(folder) as plain:
        assert zipped.info.levels == plain.info.levels
        for out_size in (Size(64, 64), Size(32, 32), Size(20, 20)):
            one = zipped.read(Window(0, 0, 64, 64), out_size)
            other = plain.read(Window(0, 0, 64, 64), out_size)
            assert np.array_equal(one.values, other.values)
            assert np.array_equal(one.valid, other.valid)
        assert zipped.cost == plain.cost
        assert zipped.info.file_bytes == Path(path).stat().st_size


def test_damage_in_a_zip_is_an_error(tmp_path):
    folder = write(tmp_path / "a.zarr", random_levels((32, 32)), compressors=None)
    path = zip_folder(folder, tmp_path / "a.zarr.zip")
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("0/0.0.0").header_offset
    content = bytearray(Path(path).read_bytes())
    content[start + 60] ^= 255
    Path(path).write_bytes(content)
    with OmeZarrReader(path) as reader:
        with pytest.raises(ImageError, match="CRC"):
            reader.read(Window(0, 0, 8, 8), Size(8, 8))
        assert reader.read(Window(20, 20, 8, 8), Size(8, 8)).valid.all()


# Cost, processes, threads


def test_the_cost_is_that_of_the_touched_chunks(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((40, 40)))
    touched = [Path(path, "0", name) for name in ("0.1.1", "0.1.2", "0.2.1", "0.2.2")]
    with OmeZarrReader(path) as reader:
        window = Window(30, 30, 5, 5)
        foreseen = reader.estimate(window, Size(5, 5))
        reader.read(window, Size(5, 5))
        assert reader.cost.pixels_decoded == foreseen == 24 * 24
        assert reader.cost.bytes_read == sum(each.stat().st_size for each in touched)


def test_a_chunk_that_is_not_stored_costs_nothing(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((32, 32)))
    object_files(path)[0].unlink()
    with OmeZarrReader(path) as reader:
        whole(reader)
        assert reader.cost.pixels_decoded == 3 * 16 * 16


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12: zarr has threads
@pytest.mark.parametrize("zipped", [False, True])
def test_a_forked_process_reads_on(tmp_path, zipped):
    (values,) = random_levels((64, 64))
    path = write(tmp_path / "a.zarr", [values])
    path = zip_folder(path, tmp_path / "a.zip") if zipped else path
    with OmeZarrReader(path) as reader:
        whole(reader)
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=lambda: sender.send(whole(reader).values))
        child.start()
        assert receiver.poll(30), "the child is stuck"
        assert np.array_equal(receiver.recv(), values)
        child.join()
        receiver.close()
        sender.close()


# Real images


@needs_data
def test_a_crop_of_a_slide_is_what_openslide_reads():
    openslide = pytest.importorskip("openslide")
    with openslide.OpenSlide(DATA / "CMU-1-Small-Region.svs") as slide:
        region = slide.read_region((512, 768), 0, (1024, 1024)).convert("RGB")
    expected = np.asarray(region).transpose(2, 0, 1).astype(int)
    with OmeZarrReader(str(DATA / "zarr" / "CMU-1-Small-Region-crop1024.ome.zarr")) as reader:
        assert reader.overviews == (2.0, 4.0)
        assert reader.microns_per_pixel.x == 0.499
        pixels = whole(reader)
    assert pixels.valid.all()
    assert np.abs(pixels.values - expected).max() <= 1


@needs_data
def test_a_real_zip_of_floats_is_read():
    path = DATA / "zarr" / "large_image_sample_float32_8bit_range.zarr.zip"
    with OmeZarrReader(str(path)) as reader:
        assert (reader.size, reader.dtype) == (Size(100, 100), np.dtype("f4"))
        assert reader.bands == ("Band 1", "Band 2", "Band 3", "Band 4")
        pixels = whole(reader)
    with zipfile.ZipFile(path) as archive:
        chunk = numcodecs.Blosc().decode(archive.read("0/0.0.0"))
    expected = np.frombuffer(chunk, "<f4").reshape(512, 512, 4)[:100, :100]
    assert np.array_equal(pixels.values, expected.transpose(2, 0, 1))


@needs_data
@pytest.mark.parametrize(
    ("name", "stored"),
    [("image-01", False), ("image-02", True), ("image-03", True), ("image-04", False)],
)
def test_valid_examples_are_read(name, stored):
    options = ReadOptions(z=1) if name in {"image-03", "image-04"} else None
    with OmeZarrReader(str(DATA / "zarr" / "valid" / f"{name}.zarr"), options) as reader:
        # Two of them come without a single chunk.
        assert whole(reader).valid.all() == stored


@needs_data
@pytest.mark.parametrize("name", ["image-01", "image-02", "image-03"])
def test_invalid_examples_are_refused_with_a_hint(name):
    with pytest.raises(ImageError) as caught:
        OmeZarrReader(str(DATA / "zarr" / "invalid" / f"{name}.zarr"))
    assert caught.value.hint


def test_values_have_the_byte_order_of_the_machine(tmp_path):
    values = np.arange(600, dtype=">u2").reshape(1, 20, 30)
    with OmeZarrReader(write(tmp_path / "a.zarr", [values])) as reader:
        assert reader.dtype == np.dtype("=u2")
        pixels = whole(reader)
    assert pixels.values.dtype.isnative
    assert np.array_equal(pixels.values, values)


def test_a_mask_of_booleans_is_read_as_0_and_1(tmp_path):
    values = np.eye(20, dtype=bool)[None]
    with OmeZarrReader(write(tmp_path / "a.zarr", [values], fill_value=False)) as reader:
        assert reader.dtype == np.uint8
        assert np.array_equal(whole(reader).values, values)


def test_an_image_from_before_axes_is_t_c_z_y_x(tmp_path):
    path = write(tmp_path / "a.zarr", [np.ones((1, 2, 1, 20, 30), "u1")], axes="tczyx")
    edit_multiscale(path, lambda each: each.pop("axes"))
    with OmeZarrReader(path) as reader:
        assert (reader.size, len(reader.bands)) == (Size(30, 20), 2)


def test_a_mean_leaves_out_what_is_not_stored(tmp_path, stored):
    path = write(tmp_path / "a.zarr", [np.full((1, 64, 64), 50, "u1")], stored, fill_value=200)
    object_files(path)[0].unlink()
    with OmeZarrReader(path) as reader:
        assert reader.read(Window(0, 0, 64, 64), Size(1, 1)).values.item() == 50


def test_a_chunk_that_several_planes_share_is_missed_in_each(tmp_path):
    path = write(tmp_path / "a.zarr", [stack(5)[0] + 1], axes="zyx", chunks={"z": 2}, fill_value=99)
    Path(path, "0", "1.0.1").unlink()
    for z, is_stored in ((1, True), (2, False), (3, False), (4, True)):
        with OmeZarrReader(path, ReadOptions(z=z)) as reader:
            pixels = whole(reader)
        assert pixels.valid[:16, :16].all()
        assert pixels.valid[:16, 16:].all() == pixels.valid[:16, 16:].any() == is_stored


def test_a_chunk_that_its_shard_calls_empty_has_the_fill_value(tmp_path):
    values = np.full((1, 32, 32), 9, "u1")
    values[:, 16:] = 1
    path = write(tmp_path / "a.zarr", [values], (3, 32), fill_value=9)
    with OmeZarrReader(path) as reader:
        pixels = whole(reader)
    assert pixels.valid.all()
    assert np.array_equal(pixels.values, values)


def test_one_window_of_a_shard_costs_one_chunk_and_the_index(tmp_path):
    path = write(tmp_path / "a.zarr", random_levels((64, 64)), (3, 64), compressors=None)
    with OmeZarrReader(path) as reader:
        reader.read(Window(20, 20, 8, 8), Size(8, 8))
        assert reader.cost.pixels_decoded == 16 * 16
        assert reader.cost.bytes_read == 3 * 16 * 16 + 16 * 16 + 4  # values, 16 places, checksum


@pytest.mark.parametrize("options", [{"z": 5}, {"z": 0, "t": 1}])
def test_a_plane_that_does_not_exist_is_an_error_on_opening(tmp_path, options):
    path = write(tmp_path / "a.zarr", [stack()], axes="tzyx")
    with pytest.raises(ImageError, match="no plane"):
        OmeZarrReader(path, ReadOptions(**options))


@pytest.mark.parametrize(("nodata", "empty"), [(0, [[2, 2]]), (7, [[1, 1], [2, 2]]), (0.5, [])])
def test_zero_empties_a_pixel_in_all_bands_and_other_nodata_in_any(tmp_path, nodata, empty):
    values = np.full((2, 20, 20), 3, "u1")
    values[0, 1, 1] = values[:, 2, 2] = int(nodata)
    path = write(tmp_path / "a.zarr", [values])
    with OmeZarrReader(path, ReadOptions(nodata=nodata)) as reader:
        assert np.argwhere(~whole(reader).valid).tolist() == empty
        assert reader.info.mask == ("nodata" if empty else "none")


def test_nan_is_invalid_beside_the_users_nodata(tmp_path):
    values = np.ones((1, 20, 20), "f4")
    values[0, 3, 4], values[0, 5, 6] = np.nan, -1
    path = write(tmp_path / "a.zarr", [values])
    with OmeZarrReader(path, ReadOptions(nodata=-1)) as reader:
        assert np.argwhere(~whole(reader).valid).tolist() == [[3, 4], [5, 6]]


def test_an_image_without_a_stored_chunk_is_invalid_and_free(tmp_path, stored):
    path = write(tmp_path / "a.zarr", random_levels((40, 40)), stored)
    for each in object_files(path):
        each.unlink()
    with OmeZarrReader(path) as reader:
        assert not whole(reader).valid.any()
        assert (reader.cost.pixels_decoded, reader.cost.bytes_read) == (0, 0)


@pytest.mark.parametrize("omero", [None, {"channels": "x"}, {"channels": [{"label": "only one"}]}])
def test_bands_without_names_are_numbered(tmp_path, omero):
    with OmeZarrReader(write(tmp_path / "a.zarr", random_levels((20, 20)), omero=omero)) as reader:
        assert reader.bands[1:] == ("2", "3")


def test_the_scale_of_a_level_without_transformation_is_the_ratio_of_sizes(tmp_path):
    levels = random_levels((100, 90), (50, 30))
    with OmeZarrReader(write(tmp_path / "a.zarr", levels)) as reader:
        assert (reader.info.levels[1].scale_x, reader.info.levels[1].scale_y) == (3, 2)


@needs_data
@pytest.mark.parametrize("name", ["invalid/image-04", "warning/image-01"])
def test_examples_with_one_bad_level_are_read_without_it(name):
    with OmeZarrReader(str(DATA / "zarr" / f"{name}.zarr")) as reader:
        assert (reader.size, reader.overviews) == (Size(64, 64), ())
        assert "level `1`" in reader.info.warnings[0]


def test_threads_share_a_zip(tmp_path, stored):
    (values,) = random_levels((64, 64))
    path = zip_folder(write(tmp_path / "a.zarr", [values], stored), tmp_path / "a.zip")
    corners = [(left, top) for left in range(0, 40, 7) for top in range(0, 40, 7)]
    with OmeZarrReader(path) as reader, ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda at: reader.read(Window(*at, 20, 20), Size(20, 20)).values, corners)
        for (left, top), part in zip(corners, found, strict=True):
            assert np.array_equal(part, values[:, top : top + 20, left : left + 20])


def test_complex_values_are_an_error(tmp_path):
    path = write(tmp_path / "a.zarr", [np.ones((1, 20, 20), "c8")])
    with pytest.raises(ImageError, match="`<c8` values"):
        OmeZarrReader(path)


@pytest.mark.parametrize("order", ["C", "F"])
def test_both_orders_of_format_2_are_read(tmp_path, order):
    (values,) = random_levels((40, 50))
    with OmeZarrReader(write(tmp_path / "a.zarr", [values], order=order)) as reader:
        assert np.array_equal(whole(reader).values, values)


@pytest.mark.parametrize("axes", [["c", "y", "x"], [{"name": "c"}, {"name": "y"}, {"name": "x"}]])
def test_axes_without_types_are_read(tmp_path, axes):
    path = write(tmp_path / "a.zarr", random_levels((20, 30)))
    edit_multiscale(path, lambda each: each.update(axes=axes))
    with OmeZarrReader(path) as reader:
        assert (reader.size, len(reader.bands)) == (Size(30, 20), 3)

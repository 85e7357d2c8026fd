import io
import logging
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.images import area_average
from tnetcli.config import SPLITS
from tnetcli.errors import ManifestError
from tnetcli.synth import tiles as tile_files
from tnetcli.synth.tiles import read_tiles

# The real tiles lie beside the project where they were fetched; nothing else needs them.
EUROSAT = Path(__file__).parents[3] / "shared" / "data" / "labelled" / "EuroSAT_RGB.zip"
needs_eurosat = pytest.mark.skipif(not EUROSAT.exists(), reason="needs EuroSAT_RGB.zip")


def encode(pixels, kind="PNG", **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def random_tile(seed=0, side=8, bands=3):
    shape = (side, side, bands) if bands > 1 else (side, side)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def some_tiles(count=6, prefix=""):
    """Return the files of two classes, by name."""
    return {
        f"{prefix}{name}/{name}_{number}.png": encode(random_tile([number, len(name)]))
        for name in ("forest", "sea")
        for number in range(count)
    }


def write_folder(path, files):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_zip(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def problem(path):
    with pytest.raises(ManifestError) as caught:
        read_tiles(path)
    assert caught.value.hint
    return str(caught.value)


def split_counts(tiles):
    return {name: int((tiles.splits == number).sum()) for number, name in enumerate(SPLITS)}


def split_by_name(tiles):
    return {name: SPLITS[split] for name, split in zip(tiles.names, tiles.splits, strict=True)}


@pytest.fixture(params=["folder", "zip"])
def write(request, tmp_path):
    """Return a function that writes files both ways that tiles come in."""
    if request.param == "zip":
        return lambda files: write_zip(tmp_path / "tiles.zip", files)
    return lambda files: write_folder(tmp_path / "tiles", files)


def test_every_tile_has_the_pixels_of_its_file_and_the_class_of_its_folder(write):
    files = some_tiles()
    tiles = read_tiles(write(files))
    assert tiles.classes == ("forest", "sea")
    assert (tiles.side, tiles.bands) == (8, 3)
    assert sorted(tiles.names) == sorted(files)
    for number, name in enumerate(tiles.names):
        expected = np.array(Image.open(io.BytesIO(files[name])))
        assert np.array_equal(tiles.levels[0][number], expected)
        assert name.startswith(tiles.classes[tiles.labels[number]])


def test_a_jpeg_is_decoded_as_pillow_does(write):
    files = {f"a/{each}.JPG": encode(random_tile(each, 16), "JPEG") for each in range(3)}
    files["a/0.JPG"] = encode(random_tile(0, 16), "JPEG", subsampling=0, quality=92)
    tiles = read_tiles(write(files))
    for pixels, name in zip(tiles.levels[0], tiles.names, strict=True):
        assert np.array_equal(pixels, np.array(Image.open(io.BytesIO(files[name]))))


@pytest.mark.parametrize("bands", [1, 3])
def test_levels_are_area_means_of_the_full_tile_rounded_once(write, bands):
    files = {f"a/{each}.png": encode(random_tile(each, 16, bands)) for each in range(70)}
    tiles = read_tiles(write(files))
    assert [level.shape for level in tiles.levels] == [
        (70, side, side, bands) for side in (16, 8, 4, 2, 1)
    ]
    for halved, level in enumerate(tiles.levels):
        assert level.flags.c_contiguous
        for number in range(70):
            full = tiles.levels[0][number].transpose(2, 0, 1)
            expected = area_average(full, 2**halved).transpose(1, 2, 0)
            assert np.array_equal(level[number], expected)


def test_a_zip_and_a_folder_of_the_same_tiles_are_alike(tmp_path):
    files = some_tiles(20)
    one = read_tiles(write_zip(tmp_path / "a.zip", dict(reversed(files.items()))))
    other = read_tiles(write_folder(tmp_path / "a", files))
    assert one.names == other.names
    assert np.array_equal(one.splits, other.splits)
    assert np.array_equal(one.levels[0], other.levels[0])


def test_folders_around_the_classes_change_nothing(write, tmp_path):
    plain = read_tiles(write_folder(tmp_path / "plain", some_tiles(20)))
    around = read_tiles(write(some_tiles(20, "a/b/")))
    assert around.names == plain.names
    assert np.array_equal(around.splits, plain.splits)


def test_other_files_are_ignored(write):
    files = some_tiles()
    more = {
        "README.txt": b"",
        "forest/notes.md": b"",
        "forest/.DS_Store": b"",
        "__MACOSX/forest/._forest_0.png": b"junk",
        ".cache/forest/forest_0.png": b"junk",
        "index.csv": b"name,class\nforest_0.png,forest\n",
    }
    assert len(read_tiles(write(files | more)).names) == len(files)


def test_a_link_to_a_folder_of_tiles_is_a_class(tmp_path):
    path = write_folder(tmp_path / "tiles", some_tiles())
    write_folder(tmp_path / "else", {"lake_0.png": encode(random_tile())})
    (path / "lake").symlink_to(tmp_path / "else")
    assert read_tiles(path).classes == ("forest", "lake", "sea")


def test_without_an_index_names_decide_70_15_15(tmp_path):
    tile = encode(random_tile(0, 2))
    tiles = read_tiles(write_zip(tmp_path / "a.zip", {f"a/{n}.png": tile for n in range(2000)}))
    counts = split_counts(tiles)
    # Four standard deviations of a fair choice.
    assert abs(counts["train"] - 1400) < 82
    assert abs(counts["validation"] - 300) < 64
    assert abs(counts["test"] - 300) < 64


def test_the_split_of_a_tile_does_not_depend_on_the_others(tmp_path):
    few, many = (
        split_by_name(read_tiles(write_zip(tmp_path / f"{count}.zip", some_tiles(count))))
        for count in (10, 30)
    )
    assert few.items() <= many.items()


def index_of(names, splits, prefix=""):
    lines = [f"{prefix}{name},x,{split}" for name, split in zip(names, splits, strict=True)]
    return "\n".join(["file,class,split", *lines]).encode()


def test_an_index_with_all_splits_is_taken_as_it_is(write):
    files = some_tiles(6)
    splits = ["train", "Val", "test", " validation", "train", "TEST"] * 2
    tiles = read_tiles(write(files | {"index.csv": index_of(files, splits)}))
    words = [split.strip().lower().replace("val", "validation")[:10] for split in splits]
    assert split_by_name(tiles) == dict(zip(files, words, strict=True))


def test_one_held_out_split_is_divided(tmp_path):
    names = [f"a/{number}.png" for number in range(1000)]
    splits = ["train" if number < 600 else "validation" for number in range(1000)]
    files = dict.fromkeys(names, encode(random_tile(0, 2)))
    path = write_zip(tmp_path / "a.zip", files | {"index.csv": index_of(names, splits)})
    found = split_by_name(read_tiles(path))
    assert {name for name in names if found[name] == "train"} == set(names[:600])
    held_out = [found[name] for name in names[600:]]
    assert abs(held_out.count("test") - 200) < 40  # four standard deviations


@pytest.mark.parametrize("place", ["a/b/index.csv", "a/index.csv", "index.csv"])
def test_an_index_may_be_beside_the_classes_or_around(write, place):
    files = some_tiles(3, "a/b/")
    names = [name.removeprefix("a/b/") for name in files]
    splits = ["train", "validation", "test"] * 2
    tiles = read_tiles(write(files | {place: index_of(names, splits)}))
    assert split_by_name(tiles) == dict(zip(names, splits, strict=True))


@pytest.mark.parametrize("prefix", ["a/", "a\\"])
def test_an_index_may_name_files_with_the_folders_around(tmp_path, prefix):
    files = some_tiles(3)
    path = write_folder(tmp_path, {f"a/{name}": data for name, data in files.items()})
    splits = ["train", "validation", "test"] * 2
    (path / "index.csv").write_bytes(index_of(files, splits, prefix))
    assert list(read_tiles(path).splits) == [0, 1, 2] * 2


def test_tiles_that_an_index_lacks_or_misnames_are_named(write):
    files = some_tiles(2)
    index = index_of([*files][1:], ["train", "trial", "test"])
    said = problem(write(files | {"index.csv": index}))
    assert "2 of 4 tiles" in said
    assert "`forest/forest_0.png` is not in index.csv" in said
    assert "`sea/sea_0.png` has the split `trial`" in said


def test_an_index_that_is_not_utf_8_is_an_error(write):
    index = "file,split\nä.png,train\n".encode("latin-1")
    assert "index.csv" in problem(write(some_tiles() | {"index.csv": index}))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (encode(random_tile(0, 16)), "is 16 x 16 in 3 bands, most are 8 x 8 in 3 bands"),
        (encode(random_tile(0, 8, 1)), "is 8 x 8 in 1 band, most are 8 x 8 in 3 bands"),
        (encode(np.zeros((8, 16, 3), np.uint8)), "has 16 x 8 pixels"),
        (encode(np.zeros((12, 12, 3), np.uint8)), "has 12 x 12 pixels"),
        (encode(np.zeros((1, 1, 3), np.uint8)), "has 1 x 1 pixels"),
        (encode(np.zeros((2048, 2048), np.uint8)), "has 2048 x 2048 pixels"),
        (encode(np.zeros((8, 8), np.uint16)), "has pixels of mode `I;16`"),
        (encode(np.zeros((8, 8), np.float32), "TIFF"), "has pixels of mode `F`"),
        (encode(np.zeros((8, 8, 4), np.uint8)), "has transparent pixels"),
        (encode(random_tile())[:-40], "cannot be read: image file is truncated"),
        (encode(random_tile(0, 8), "JPEG")[:-9], "cannot be read: Premature end of JPEG file"),
        (b"no image at all", "is not an image that Pillow can open"),
        (b"", "is not an image that Pillow can open"),
    ],
)
def test_a_tile_that_cannot_be_used_is_named_with_the_reason(write, data, words):
    said = problem(write(some_tiles() | {"sea/bad.png": data}))
    assert said.startswith("1 of 13 tiles of")
    assert f"`sea/bad.png` {words}" in said


def test_all_bad_tiles_are_counted_and_the_first_are_named(write):
    said = problem(write(some_tiles() | {f"sea/bad_{n}.png": b"junk" for n in range(9)}))
    assert said.startswith("9 of 21 tiles of")
    assert all(f"`sea/bad_{number}.png`" in said for number in range(5))
    assert said.endswith("; and 4 more")


def test_pillow_logs_nothing(tmp_path, caplog):
    (tmp_path / "a").mkdir()
    many = np.zeros((8, 8, 13), np.uint16)
    tifffile.imwrite(tmp_path / "a" / "0.tif", many, photometric="minisblack")
    with caplog.at_level(logging.WARNING):
        problem(tmp_path)
    assert not caplog.records


@pytest.mark.parametrize("place", ["lost.png", "train/sea/lost.png"])
def test_a_tile_elsewhere_than_the_others_is_named(write, place):
    said = problem(write(some_tiles() | {place: encode(random_tile())}))
    assert f"`{place}` is not in `CLASS/` as most are" in said


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("1", [[255], [0]]),
        ("P", [[250, 130, 10], [0, 0, 0]]),
        ("RGBA", [[250, 130, 10], [0, 0, 0]]),
        ("LA", [[152], [0]]),
    ],
)
def test_other_modes_become_grey_or_rgb(tmp_path, mode, expected):
    pixels = np.zeros((2, 2, 3), np.uint8)
    pixels[0] = 250, 130, 10
    image = Image.fromarray(pixels)
    if mode == "1":
        image = Image.fromarray(pixels[..., 0]).point(lambda value: 255 * (value > 0), "1")
    elif mode == "LA":
        image = image.convert("L").convert("LA")
    elif mode == "P":
        image = image.quantize(2)
    else:
        image = image.convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    tiles = read_tiles(write_zip(tmp_path / "a.zip", {"a/0.png": buffer.getvalue()}))
    assert tiles.levels[0][0, :, 0].tolist() == expected


def test_a_file_too_large_for_a_tile_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.png", encode(random_tile()))
        archive.writestr("a/bomb.png", bytes(2**25))
    monkeypatch.setattr(tile_files, "_decode", lambda data: np.zeros((8, 8, 3)))
    assert "`a/bomb.png` has 33,554,432 bytes, more than 16,777,216" in problem(path)


def test_a_member_that_is_longer_than_it_says_is_not_decompressed(tmp_path):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.png", encode(random_tile()))
        archive.writestr("a/bomb.png", bytes(2**26))
    said, size = path.read_bytes(), (2**26).to_bytes(4, "little")
    path.write_bytes(said.replace(size, (1000).to_bytes(4, "little")))
    tracemalloc.start()
    assert "`a/bomb.png` cannot be read" in problem(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**23


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_of_unbounded_compression_is_an_error(tmp_path, method):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a/0.png", encode(random_tile()))
    assert "`a/0.png` cannot be read: `a/0.png` is compressed with method" in problem(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/0.png", encode(random_tile()))
        archive.writestr("a/index.csv", "file,split\n", method)
        archive.writestr("index.csv", "file,split\n", method)
    assert "cannot read `index.csv`" in problem(path)


def test_a_pipe_in_place_of_tiles_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "tiles.zip")
    assert "is a named pipe, not a regular file" in problem(tmp_path / "tiles.zip")


def test_a_damaged_or_locked_member_of_a_zip_is_named(tmp_path):
    path = write_zip(tmp_path / "a.zip", some_tiles())
    data = path.read_bytes()
    at = data.index(b"IDAT")
    path.write_bytes(data[: at + 6] + bytes([data[at + 6] ^ 255]) + data[at + 7 :])
    assert "`forest/forest_0.png` cannot be read: Bad CRC-32" in problem(path)
    locked = bytearray(data)
    locked[6] |= 1  # encrypted, says the file
    locked[data.index(b"PK\x01\x02") + 8] |= 1  # and so does the list
    path.write_bytes(locked)
    assert "1 of 12 tiles" in problem(path)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("missing.zip", None, "there are no tiles at"),
        ("text.zip", b"not a zip", "cannot read tiles from"),
    ],
)
def test_what_is_neither_a_folder_nor_a_zip_is_an_error(tmp_path, name, data, words):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert words in problem(tmp_path / name)


def test_no_images_in_folders_is_an_error(write):
    assert "has no images in folders" in problem(write({"a.png": encode(random_tile())}))


def test_the_fraction_done_grows_to_one(tmp_path):
    done = []
    read_tiles(write_zip(tmp_path / "a.zip", some_tiles(100)), done.append)
    assert done == sorted(done)
    assert len(done) > 2
    assert done[-1] == 1.0


def test_tiles_of_a_class_and_a_split_can_be_chosen(tmp_path):
    files = some_tiles(3)
    index = index_of(files, ["train", "validation", "train", "test", "train", "test"])
    tiles = read_tiles(write_zip(tmp_path / "a.zip", files | {"index.csv": index}))
    chosen = [tiles.names[number] for number in tiles.chosen("train", "forest")]
    assert chosen == ["forest/forest_0.png", "forest/forest_2.png"]
    assert [tiles.names[each] for each in tiles.chosen("train", "sea")] == ["sea/sea_1.png"]


def test_a_pickled_set_is_a_path_and_finds_the_one_in_use(write):
    tiles = read_tiles(write(some_tiles(40)))
    state = pickle.dumps(tiles)
    assert len(state) < 8 * 1024
    assert pickle.loads(state) is tiles


def test_another_process_reads_a_pickled_set_again(tmp_path):
    tiles = read_tiles(write_zip(tmp_path / "a.zip", some_tiles()))
    (tmp_path / "state").write_bytes(pickle.dumps(tiles))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).levels[0].sum())"
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "state"], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) == tiles.levels[0].sum()


def test_tiles_that_changed_since_they_were_pickled_are_an_error(tmp_path):
    path = write_zip(tmp_path / "a.zip", some_tiles())
    state = pickle.dumps(read_tiles(path))
    write_zip(path, some_tiles(7))
    with pytest.raises(ManifestError, match="changed"):
        pickle.loads(state)


@needs_eurosat
def test_eurosat_is_read_as_pillow_and_its_index_say(tmp_path):
    with zipfile.ZipFile(EUROSAT) as archive:
        rows = archive.read("EuroSAT_RGB/index.csv").decode().splitlines()
        given = {row.split(",")[0]: row.split(",")[2] for row in rows[1::100]}
        files = {name: archive.read(f"EuroSAT_RGB/{name}") for name in given}
    index = "\n".join([rows[0], *rows[1::100]]).encode()
    tiles = read_tiles(write_zip(tmp_path / "some.zip", {"index.csv": index} | files))
    assert (tiles.side, tiles.bands, len(tiles.classes)) == (64, 3, 10)
    for number, (name, split) in enumerate(split_by_name(tiles).items()):
        assert (given[name] == "train") == (split == "train")
        expected = Image.open(io.BytesIO(files[name]))
        assert np.array_equal(tiles.levels[0][number], expected)
    assert {"validation", "test"} <= set(split_by_name(tiles).values())

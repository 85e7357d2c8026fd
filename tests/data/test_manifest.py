import logging
import os
from collections import Counter

import numpy as np
import pytest
import rasterio
from pydantic import ValidationError

from tests.images import noise, write_geotiff
from tnetcli.data.config import DataConfig
from tnetcli.data.images import MAX_SHOWN, read_rows
from tnetcli.data.manifest import divide, read_examples
from tnetcli.errors import ManifestError, MissingExtraError
from tnetcli.geometry import Size, Window

FULL = {  # four images of two classes, none of them left to chance
    "a.tif": ("forest", "train"),
    "b.tif": ("river", "train"),
    "c.tif": ("forest", "validation"),
    "d.tif": ("river", "test"),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for name in (*FULL, "e.tif"):
        write_geotiff(folder / name, noise((80, 60)))
    write_geotiff(folder / "grey.tif", noise((80, 60), 1))
    write_geotiff(folder / "deep.tif", noise((80, 60), 3, "uint16"))
    write_geotiff(folder / "bgr.tif", noise((80, 60)), descriptions=["Blue", "green", "red"])
    (folder / "broken.tif").write_bytes(b"II*\0 and no more")
    (folder / "text.tif").write_text("hello")
    return folder


@pytest.fixture
def listed(images):
    """Return a function that writes a list beside the images and reads it."""

    def read(text, classes=2, encoding="utf-8", check_images=True, training=True, **data):
        path = images / "list.csv"
        path.write_bytes(text.encode(encoding))
        return read_examples(
            DataConfig(path=path, **data), classes, check_images=check_images, training=training
        )

    return read


def rows(*more, columns="path,label,split", leave_out=()):
    """Return the text of a good list, without some of its rows and with others added."""
    good = [
        f"{name},{label},{split}" for name, (label, split) in FULL.items() if name not in leave_out
    ]
    width = columns.count(",") - 2
    return "\n".join([columns, *(row + "," * width for row in good), *more]) + "\n"


def refused(call):
    with pytest.raises(ManifestError) as caught:
        call()
    assert caught.value.exit_code == 4
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_good_list_gives_its_images_in_order(listed, images):
    found = listed(rows())
    assert found.classes == ("forest", "river")
    assert [(each.id, each.label) for each in found.train] == [("a.tif", 0), ("b.tif", 1)]
    assert [each.id for each in found.validation] == ["c.tif"]
    assert [each.id for each in found.test] == ["d.tif"]
    with found.train[0].open() as reader:
        assert reader.path == str(images / "a.tif")
        assert reader.size == Size(80, 60)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_list_may_begin_with_a_byte_order_mark_and_have_any_line_ends(listed, encoding):
    text = rows().replace("forest", "Wald für Ñandús").replace("\n", "\r\n")
    assert listed(text, encoding=encoding).classes == ("Wald für Ñandús", "river")


def test_columns_may_stand_in_any_order_and_blank_lines_between(listed):
    text = "split,label,path\ntrain,x,a.tif\n\n,,\ntrain,y,b.tif\n val , x ,c.tif\n"
    found = listed(text)
    assert len(found.train) == 2
    assert found.validation[0].label == 0


def test_named_classes_are_numbered_as_the_recipe_names_them(listed):
    found = listed(rows(), classes=("river", "forest"))
    assert found.classes == ("river", "forest")
    assert [each.label for each in found.train] == [1, 0]


def test_a_row_says_how_its_image_is_read(listed):
    text = rows(
        'e.tif,river,train,one,p1,0.5,"3,1,2",0 0 10 20; 5.5 6 80 60',
        columns="path,label,split,id,group,mpp,bands,box",
    )
    *others, last = listed(text, mpp=0.25, bands=("1", "2", "3"), nodata=7).train
    assert (last.id, last.group) == ("one", "p1")
    assert last.boxes == (Window(0, 0, 10, 20), Window(5.5, 6, 74.5, 54))
    assert (last.options.mpp, last.options.bands) == (0.5, ("3", "1", "2"))
    assert (others[0].options.mpp, others[0].options.bands) == (0.25, ("1", "2", "3"))
    assert last.options.nodata == others[0].options.nodata == 7


def test_bands_in_another_order_are_fine_where_they_were_chosen(listed):
    chosen = rows('bgr.tif,river,train,"1,2,3"', columns="path,label,split,bands")
    assert len(listed(chosen).train) == 3
    assert len(listed(rows("bgr.tif,river,train"), bands=("red", "green", "blue")).train) == 3


def test_urls_stay_and_paths_start_at_the_list(listed, images):
    text = (
        "path,label,split\nhttps://x.org/a.tif,a,train\n/vsicurl/b.tif,b,train\nsub/c.tif,a,val\n"
    )
    found = listed(text, check_images=False)
    assert [each.path for each in found.train] == ["https://x.org/a.tif", "/vsicurl/b.tif"]
    assert found.validation[0].path == os.path.join(images, "sub/c.tif")


# Splits


def many(count, group=lambda number: "", split=lambda number: ""):
    lines = [f"{n}.tif,{'ab'[n % 2]},{group(n)},{split(n)}" for n in range(count)]
    return "\n".join(["path,label,group,split", *lines])


def test_images_without_a_split_are_divided_in_about_the_shares_asked_for(listed):
    found = listed(many(1000), check_images=False, validation=0.2, test=0.1)
    assert 160 < len(found.validation) < 240
    assert 70 < len(found.test) < 130
    assert len(found.train) + len(found.validation) + len(found.test) == 1000


def test_a_group_is_never_divided(listed):
    found = listed(many(600, group=lambda n: f"patient {n // 6}"), check_images=False, test=0.2)
    splits = {}
    for each in (*found.train, *found.validation, *found.test):
        splits.setdefault(each.group, set()).add(each.split)
    assert len(splits) == 100
    assert all(len(each) == 1 for each in splits.values())
    assert len(set.union(*splits.values())) == 3


def test_images_that_are_added_do_not_move_the_others(listed):
    few, more = (listed(many(count), check_images=False) for count in (400, 500))
    assert {each.id for each in few.validation} <= {each.id for each in more.validation}
    assert {each.id for each in few.train} <= {each.id for each in more.train}


def test_rows_without_a_split_follow_the_rest_of_their_group(listed):
    text = many(60, group=lambda n: f"g{n // 3}", split=lambda n: "test" if n % 9 == 0 else "")
    found = listed(text, check_images=False)
    in_test = {each.group for each in found.test}
    assert in_test == {f"g{n}" for n in range(0, 20, 3)}
    assert not in_test & {each.group for each in (*found.train, *found.validation)}


def test_few_groups_still_leave_one_for_each_share():
    for number in range(50):
        groups = [f"{number}/{each}" for each in range(4)]
        assert set(divide(groups, 0.1, 0.1).values()) == {"train", "validation", "test"}
        assert set(divide(groups, 0.1, 0.0).values()) == {"train", "validation"}
        assert set(divide(groups, 0.0, 0.0).values()) == {"train"}


def test_an_evaluation_takes_all_there_is(listed):
    text = "path,label\na.tif,river\nb.tif,river\n"
    found = listed(text, classes=("forest", "river"), training=False)
    assert [each.label for each in found.test] == [1, 1]
    assert found.train == found.validation == ()


# What is wrong with a list


@pytest.mark.parametrize(
    ("more", "says", "hint"),
    [
        ("no.tif,river,train", "line 6: `", "check the path"),
        ("broken.tif,river,train", "line 6: ", ""),
        ("text.tif,river,train", "text file", ""),
        ("e.tif,,train", "line 6: no label", "fill it in"),
        (",river,train", "line 6: no path", "fill it in"),
        ("e.tif,river,trian", "line 6: unknown split `trian`", "did you mean `train`?"),
        ("e.tif,rivers,train", "3 classes (forest, river, rivers), the recipe has 2", "misspelt"),
        ("e.tif,river", "line 6: 2 values for 3 columns", "quotes"),
        ("e.tif,river,train,x", "line 6: 4 values for 3 columns", "quotes"),
        ("a.tif,forest,train", "line 6: duplicate id `a.tif`, first on line 2", "once"),
        ("./a.tif,river,train", "`river`, on line 2 `forest`", "one label"),
        ("./a.tif,forest,test", "group `a.tif` is in test, and on line 2 in train", "one split"),
        ("grey.tif,river,train", "1 bands", "data.bands"),
        ("deep.tif,river,train", "uint16", "data.bands"),
        ("bgr.tif,river,train", "(Blue, green, red)", "data.bands"),
        ('"e.tif,river,train', "line 6: not CSV", "quote"),
    ],
)  # fmt: skip
def test_one_mistake_gives_one_clear_error(listed, more, says, hint):
    error = refused(lambda: listed(rows(more)))
    assert says in str(error)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("box", "says"),
    [
        ("1 2 3", "a box is not four numbers: `1 2 3`"),
        ("1 2 3 4 5", "not four numbers"),
        ("1 2 x 4", "not four numbers"),
        ("5 5 5 9", "a box is empty: `5 5 5 9`"),
        ("9 5 3 8", "empty"),
        ("nan 0 4 4", "empty"),
        ("0 0 81 60", "the box `0 0 81 60` is outside of `e.tif`, 80 x 60 pixels"),
        ("0 0 9 9; -1 0 5 5", "the box `-1 0 5 5` is outside"),
    ],
)
def test_a_wrong_box_is_reported_with_its_line(listed, box, says):
    text = rows(f"e.tif,river,train,{box}", columns="path,label,split,box")
    error = refused(lambda: listed(text))
    assert str(error).count("line 6: ") == 1
    assert says in str(error)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("mpp", "0", "mpp is not within"),
        ("mpp", "a quarter", "mpp is not within"),
        ("bands", '"1,,2"', "a band without a name"),
        ("bands", "7", "no band `7`"),
    ],
)
def test_a_wrong_way_to_read_an_image_is_reported_with_its_line(listed, column, value, says):
    error = refused(
        lambda: listed(rows(f"e.tif,river,train,{value}", columns=f"path,label,split,{column}"))
    )
    assert "line 6: " in str(error)
    assert says in str(error)


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("path,split\na.tif,train\n", "no column `label`", "path, split"),
        ("path,lable\na.tif,x\n", "no column `label`", "rename `lable` to `label`"),
        ("path;label\na.tif;x\n", "no column `path`", "commas"),
        ("path,label,label\na.tif,x,y\n", "2 columns `label`", "path, label, label"),
        ("path,label\n", "lists no image", "one line per image"),
        ("", "no column `path`", "none"),
    ],
)
def test_wrong_columns_are_reported(listed, text, says, hint):
    error = refused(lambda: listed(text))
    assert says in str(error)
    assert hint in error.hint


def test_a_list_that_is_not_utf_8_is_reported_with_its_line(listed):
    error = refused(lambda: listed(rows("é.tif,river,train"), encoding="latin-1"))
    assert "line 6: not UTF-8 text" in str(error)
    assert "iconv" in error.hint


def test_an_unknown_label_is_reported_once_with_the_nearest_class(listed):
    text = rows("e.tif,forst,train", "grey.tif,forst,train")
    error = refused(lambda: listed(text, classes=("forest", "river"), check_images=False))
    assert "line 6: unknown label `forst` of 2 images" in str(error)
    assert error.hint == "did you mean `forest`?"
    error = refused(lambda: listed(rows(leave_out=("b.tif", "d.tif")), check_images=False))
    assert "only one class: `forest`" in str(error)


@pytest.mark.parametrize(
    ("leave_out", "says"),
    [
        (("a.tif", "b.tif"), "no image to train on"),
        (("c.tif",), "no image in the validation split"),
        (("b.tif",), "no image to train on of class `river`"),
    ],
)
def test_an_empty_split_is_reported(listed, leave_out, says):
    error = refused(lambda: listed(rows(leave_out=leave_out)))
    assert f"`: {says}" in str(error)


def test_a_group_in_two_splits_is_reported(listed):
    text = rows("e.tif,river,test,p", "x/../e.tif,river,train,p", columns="path,label,split,group")
    error = refused(lambda: listed(text, check_images=False))
    assert "line 7: group `p` is in train, and on line 6 in test" in str(error)


def test_a_named_class_without_an_image_is_reported(listed):
    error = refused(lambda: listed(rows(), classes=("forest", "river", "lake")))
    assert "no image to train on of class `lake`" in str(error)


def test_one_image_in_two_splits_is_reported_whatever_it_is_called(listed):
    text = rows("./a.tif,forest,test,p", columns="path,label,split,group")
    error = refused(lambda: listed(text))
    assert "line 6: `" in str(error)
    assert "is in test, and on line 2 in train" in str(error)
    assert "same `group`" in error.hint


def test_all_problems_are_reported_at_once(listed):
    text = rows("no.tif,river,train", "e.tif,,train", "grey.tif,river,nowhere")
    error = refused(lambda: listed(text))
    assert str(error).startswith("4 problems in ")
    for says in ("line 6: ", "line 7: no label", "line 8: unknown split", "line 8: `"):
        assert says in str(error)


def test_many_problems_are_counted(listed):
    error = refused(lambda: listed(rows(*(f"no{n}.tif,river,train" for n in range(30)))))
    assert str(error).startswith("30 problems in ")
    assert str(error).endswith(f"; and {30 - MAX_SHOWN} more")
    assert str(error).count("line ") == MAX_SHOWN
    assert "line 6: " in str(error)


def test_a_column_that_is_not_used_is_warned_of(listed, caplog):
    with caplog.at_level(logging.WARNING):
        listed(rows(columns="path,label,split,gruop"))
    assert "`gruop`" in caplog.text
    assert "did you mean `group`?" in caplog.text


def test_a_missing_extra_is_no_fault_of_the_list(listed, monkeypatch):
    def fail(*_, **__):
        raise MissingExtraError.of("zarr", "reading OME-Zarr")

    monkeypatch.setattr("tnetcli.data.manifest.open_image", fail)
    with pytest.raises(MissingExtraError):
        listed(rows())


def test_lines_are_counted_in_the_file_and_not_in_rows(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text('path,note\n\na.tif,"two\nlines"\nb.tif,\n')
    assert [(row.line, row["path"]) for row in read_rows(path)] == [(3, "a.tif"), (5, "b.tif")]


# Folders


@pytest.fixture
def folder(tmp_path):
    for label in ("forest", "river"):
        for number in range(6):
            (tmp_path / label / "deeper").mkdir(parents=True, exist_ok=True)
            write_geotiff(
                tmp_path / label / "deeper" / f"{number}.tif", noise((16, 16)), blocksize=None
            )
    (tmp_path / "README").write_text("not an image")
    (tmp_path / "river" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def in_folder(path, classes=2, **data):
    return read_examples(DataConfig(kind="folder", path=path, **data), classes)


def test_a_folder_for_each_class_is_a_list(folder):
    found = in_folder(folder, validation=0.3)
    assert found.classes == ("forest", "river")
    everything = (*found.train, *found.validation)
    assert Counter(each.label for each in everything) == {0: 6, 1: 6}
    assert "river/deeper/3.tif" in {each.id for each in everything}
    assert all(found.classes[each.label] in each.path for each in everything)


def test_a_folder_divides_the_same_wherever_it_lies(folder, tmp_path_factory):
    before = in_folder(folder)
    moved = tmp_path_factory.mktemp("elsewhere") / "data"
    os.rename(folder, moved)
    after = in_folder(moved)
    assert [each.id for each in before.validation] == [each.id for each in after.validation]
    os.rename(moved, folder)


def test_folders_of_splits_hold_folders_of_classes(folder):
    (folder / "train").mkdir()
    (folder / "val").mkdir()
    for label in ("forest", "river"):
        os.rename(folder / label, folder / "train" / label)
        (folder / "val" / label).mkdir()
        os.rename(folder / "train" / label / "deeper" / "0.tif", folder / "val" / label / "0.tif")
    found = in_folder(folder)
    assert found.classes == ("forest", "river")
    assert (len(found.train), len(found.validation), len(found.test)) == (10, 2, 0)


def test_an_image_beside_the_folders_is_reported(folder):
    write_geotiff(folder / "lost.tif", noise((16, 16)), blocksize=None)
    assert "`lost.tif` is in no class folder" in str(refused(lambda: in_folder(folder)))


def test_a_broken_image_in_a_folder_is_reported(folder):
    (folder / "river" / "broken.tif").write_bytes(b"")
    assert "is empty" in str(refused(lambda: in_folder(folder)))


# Crops


BOXED = "path,label,split,box\na.tif,forest,train,10 5 50 45\nb.tif,river,train,0.4 0 79.5 60\n"
BOXED += "c.tif,forest,validation,1 2 4 9\nd.tif,river,test,70 50 80 60\n"


def test_a_crop_shows_the_pixels_of_the_box_and_nothing_else(listed, images):
    found = listed(BOXED, crop="box")
    for example, rows, columns in (
        (found.train[0], slice(5, 45), slice(10, 50)),
        (found.train[1], slice(0, 60), slice(0, 80)),  # parts of pixels count as whole ones
        (found.validation[0], slice(2, 9), slice(1, 4)),
        (found.test[0], slice(50, 60), slice(70, 80)),
    ):
        with rasterio.open(example.path) as file:
            truth = file.read()[:, rows, columns]
        with example.open() as reader:
            assert (reader.size.height, reader.size.width) == truth.shape[1:]
            pixels = reader.read(Window.whole(reader.size), reader.size)
        assert np.array_equal(pixels.values, truth)
        assert example.boxes == ()  # its label is to be seen all over


def test_a_crop_with_context_grows_small_boxes_more(listed):
    found = listed(BOXED, crop="context")
    with found.train[0].open() as reader:  # 40 of 80 pixels grow by 15 %, 40 of 60 too
        assert reader.size == Size(46, 46)
    with found.validation[0].open() as reader:  # 3 of 80 by 200 %, 7 of 60 by 100 %
        assert reader.info.details["crop"] == [0, 0, 7, 13]


def test_without_crop_an_image_is_whole_and_keeps_its_box(listed):
    example = listed(BOXED).train[0]
    assert example.boxes == (Window(10, 5, 40, 40),)
    with example.open() as reader:
        assert reader.size == Size(80, 60)


@pytest.mark.parametrize(
    ("box", "says"),
    [
        ("", "line 6: no box to crop the image to"),
        ("0 0 9 9; 5 5 9 9", "line 6: 2 boxes to crop one image to"),
        ("0 0 9 x", "line 6: a box is not four numbers: `0 0 9 x`"),
        ("0 0 9 nan", "line 6: a box is empty: `0 0 9 nan`"),
        ("9 9 3 3", "line 6: a box is empty: `9 9 3 3`"),
        ("70 0 90 20", "line 6: the box `70 0 90 20` is outside of `e.tif`, 80 x 60 pixels"),
        ("200 200 220 220", "line 6: the box `200 200 220 220` is outside of `e.tif`"),
    ],
)
def test_what_cannot_be_cropped_is_reported_with_its_line(listed, box, says):
    found = refused(lambda: listed(f"{BOXED}e.tif,river,train,{box}\n", crop="context"))
    assert says in str(found)
    assert "problems" not in str(found)


def test_a_box_of_two_pixels_has_no_context(listed):
    text = f"{BOXED}e.tif,river,train,3 3 5 30\n"
    assert len(listed(text, crop="box").train) == 3
    assert "line 6: a side of the box has 2 pixels or fewer" in str(
        refused(lambda: listed(text, crop="context"))
    )


def test_a_box_outside_is_reported_when_the_image_is_opened_if_not_before(listed):
    text = f"{BOXED}e.tif,river,test,70 0 90 20\n"
    example = listed(text, crop="box", check_images=False).test[-1]
    found = refused(example.open)
    assert "list.csv`: line 6: the box `70 0 90 20` is not inside `e.tif`, 80 x 60" in str(found)


def test_several_boxes_of_an_image_are_rows_that_stay_together(listed):
    text = "path,label,id,box\n" + "".join(
        f"{name}.tif,{label},{name}{number},{number} 0 {number + 9} 9\n"
        for name, label in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"))
        for number in range(3)
    )
    found = listed(text, crop="box", validation=0.5)
    homes = [{each.path for each in part} for part in (found.train, found.validation)]
    assert homes[0].isdisjoint(homes[1])
    assert len(found.train) + len(found.validation) == 12


def test_folders_have_no_boxes_to_crop_to(images):
    with pytest.raises(ValidationError, match="only a manifest has"):
        DataConfig(path=images, kind="folder", crop="box")


def test_a_list_that_is_not_there_is_reported(tmp_path):
    error = refused(lambda: read_examples(DataConfig(path=tmp_path / "no.csv"), 2))
    assert "No such file" in str(error)


def test_an_empty_folder_and_a_file_for_a_folder_are_reported(tmp_path, folder):
    (tmp_path / "nothing").mkdir()
    assert "no images found" in str(refused(lambda: in_folder(tmp_path / "nothing")))
    assert "kind: manifest" in refused(lambda: in_folder(folder / "README")).hint

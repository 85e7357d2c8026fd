from pathlib import Path

import pytest

from tnetcli.data.images import Image
from tnetcli.errors import UsageError
from tnetcli.prediction.batch import Shard, missing_shards, parse_shard, shard_of_job
from tnetcli.readers.base import ReadOptions


def images(*groups):
    return [Image(f"{i}.tif", f"{i}", group, ReadOptions()) for i, group in enumerate(groups)]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_every_image_is_in_one_part_and_parts_are_even(count):
    everything = images(*map(str, range(13)))
    parts = [Shard(number, count).take(everything) for number in range(1, count + 1)]
    assert sorted(each.id for part in parts for each in part) == sorted(e.id for e in everything)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_images_of_a_group_stay_together_and_in_order():
    everything = images("a", "b", "a", "c", "b", "a")
    parts = [[each.id for each in Shard(number, 2).take(everything)] for number in (1, 2)]
    assert parts == [["0", "2", "3", "5"], ["1", "4"]]


def test_every_part_has_a_file_of_its_own():
    assert Shard(2, 4).name(Path("out/a.jsonl")) == Path("out/a.2-of-4.jsonl")


def test_files_of_parts_that_are_not_there_are_missed():
    files = [Path("out/a.1-of-3.jsonl"), Path("out/a.3-of-3.jsonl"), Path("b.jsonl")]
    assert missing_shards(files) == [Path("out/a.2-of-3.jsonl")]
    assert missing_shards(files[-1:]) == []


@pytest.mark.parametrize("text", ["1/1", " 3 / 8 ", "8/8"])
def test_a_part_of_parts_is_read(text):
    number, count = map(int, text.split("/"))
    assert parse_shard(text) == Shard(number, count)


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(UsageError, match="--shard") as caught:
        parse_shard(text)
    assert "1/8" in caught.value.hint


@pytest.mark.parametrize(
    ("task", "count", "first", "step", "number"),
    [(0, 4, 0, 1, 1), (3, 4, 0, 1, 4), (1, 4, 1, 1, 1), (4, 4, 1, 1, 4), (14, 3, 10, 2, 3)],
)
def test_the_part_of_a_job_array_is_found(task, count, first, step, number):
    values = {"ID": task, "COUNT": count, "MIN": first, "STEP": step}
    environment = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}
    assert shard_of_job(environment) == Shard(number, count)


def test_outside_of_a_job_array_there_is_no_part():
    assert shard_of_job({}) is None


@pytest.mark.parametrize("values", [("9", "4"), ("x", "4"), ("1", "many")])
def test_an_array_that_makes_no_sense_is_an_error(values):
    task, count = values
    environment = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": count}
    with pytest.raises(UsageError, match="SLURM_ARRAY_TASK_ID"):
        shard_of_job(environment)

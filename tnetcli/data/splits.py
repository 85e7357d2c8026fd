"""Split labelled images by group."""

import hashlib
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tnetcli.data.config import DataConfig
from tnetcli.data.listing import Listed, Problems
from tnetcli.text import shorten


def assign_splits(
    listed: Sequence[Listed], data: DataConfig | None, problems: Problems
) -> list[Listed]:
    """Return all images with a split; those of a group share the one that any of them names.

    Groups that name none are divided in the shares of `data`; without it, all are for the test.
    """
    chosen = _chosen(listed, problems)
    free = {each.group for each in listed} - chosen.keys()
    made = dict.fromkeys(free, "test")
    if data is not None:
        made = divide(free, data.validation, data.test)
    assigned = [replace(each, split=(chosen | made)[each.group]) for each in listed]
    _check_files_stay_together(assigned, problems)
    return assigned


def _chosen(listed: Sequence[Listed], problems: Problems) -> dict[str, str]:
    """Return the split of every group of which a row names one."""
    first: dict[str, Listed] = {}
    for each in listed:
        if not each.split:
            continue
        before = first.setdefault(each.group, each)
        if before.split != each.split:
            problems.add(
                f"group `{shorten(each.group)}` is in {each.split}, and{_at(before)} in "
                f"{before.split}",
                line=each.line,
                hint="what belongs together is in one split, or a score tells nothing",
            )
    return {group: each.split for group, each in first.items()}


def divide(groups: Iterable[str], validation: float, test: float) -> dict[str, str]:
    """Divide groups by a hash of their names, at least one to each share that is not zero.

    A group stays where it is when others come or go, unless there are very few.
    """
    ranked = sorted((_place(group), group) for group in set(groups))
    places = [place for place, _ in ranked]
    tested = max(bisect_left(places, test), int(test > 0))
    held_out = max(bisect_left(places, test + validation), tested + int(validation > 0))
    return {
        group: "test" if rank < tested else "validation" if rank < held_out else "train"
        for rank, (_, group) in enumerate(ranked)
    }


def _place(group: str) -> float:
    """Return a number in [0, 1) that depends on the name alone."""
    digest = hashlib.sha256(group.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _check_files_stay_together(listed: Sequence[Listed], problems: Problems) -> None:
    first: dict[str, Listed] = {}
    for each in listed:
        before = first.setdefault(os.path.normpath(each.path), each)
        if before.split != each.split and before.group != each.group:
            problems.add(
                f"`{shorten(each.path)}` is in {each.split}, and{_at(before)} in {before.split}",
                line=each.line,
                hint="give rows of one image the same `group`",
            )


def _at(listed: Listed) -> str:
    return "" if listed.line is None else f" on line {listed.line}"


def check_splits(listed: Sequence[Listed], classes: Sequence[str], problems: Problems) -> None:
    """Notice a split that is empty, and classes that nobody could learn."""
    splits = {each.split for each in listed}
    if listed and "train" not in splits:
        problems.add("no image to train on", hint="see its `split` and `group` columns")
    if listed and "validation" not in splits:
        problems.add(
            "no image in the validation split",
            hint="write `validation` into the `split` of some rows; rows without a split are "
            "divided by `data.validation`",
        )
    trained = {each.label for each in listed if each.split == "train"}
    missing = [name for name in classes if name not in trained]
    if "train" in splits and missing:
        problems.add(
            f"no image to train on of class `{shorten(', '.join(missing))}`",
            hint="every class needs an image in the training split",
        )

"""Open every listed image once, before hours are spent: is it there and like the rest."""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tnetcli.csv_file import Problems
from tnetcli.errors import MissingExtraError, TnetError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.open import open_image
from tnetcli.training.listing import Listed
from tnetcli.training.statistics import Kind
from tnetcli.wording import shorten

THREADS = 8  # that open files: they wait for disks more than they work
Asked = tuple[str, ReadOptions]
Found = tuple[Size, Kind]


def check_files(
    listed: Sequence[Listed], bands: tuple[str, ...] | None, problems: Problems
) -> None:
    """Note images that are missing, unreadable or unlike the others, and boxes outside of them.

    The order of bands is not doubted where it was chosen for one image, not by `bands` for all.
    """
    asked = dict.fromkeys((each.path, each.options) for each in listed)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="inspection") as pool:
        found = dict(zip(asked, pool.map(_open, asked), strict=True))
    kinds = Counter(each[1] for each in found.values() if not isinstance(each, TnetError))
    usual = kinds.most_common(1)[0][0] if kinds else None
    for each in listed:
        look = found[each.path, each.options]
        if isinstance(look, TnetError):
            problems.add(str(look), line=each.line, hint=look.hint)
            continue
        size, kind = look
        mixed_up = each.options.bands == bands and usual is not None and kind.is_mixed_up(usual)
        if usual is not None and (mixed_up or not kind.is_like(usual)):
            problems.add(
                f"`{shorten(each.path)}` has {kind}, most images have {usual}",
                line=each.line,
                hint="choose the same bands in one order: by name with `data.bands`, or for one "
                "image in the column `bands`",
            )
        for box in each.boxes:
            _check_box(box, size, each, problems)


def _open(asked: Asked) -> Found | TnetError:
    path, options = asked
    try:
        with open_image(path, options=options) as reader:
            return reader.size, Kind.of(reader)
    except MissingExtraError:
        raise  # nothing is wrong with the list
    except TnetError as error:
        return error


def _check_box(box: Window, size: Size, listed: Listed, problems: Problems) -> None:
    if not box.is_inside(size):
        edges = " ".join(f"{edge:g}" for edge in box.box)
        problems.add(
            f"the box `{edges}` is outside of `{shorten(os.path.basename(listed.path))}`, "
            f"{size} pixels",
            line=listed.line,
            hint="`x0 y0 x1 y1` in full-resolution pixels; `;` between two boxes",
        )

"""One part of many, so that jobs of an array share the images without talking to one another."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tnetcli.errors import UsageError
from tnetcli.workflows.images import Image


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `count`, counted from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def take(self, images: Sequence[Image]) -> list[Image]:
        """Return this part: every image is in one, and images of a group are in the same."""
        groups = list(dict.fromkeys(image.group for image in images))
        mine = set(groups[self.number - 1 :: self.count])
        return [image for image in images if image.group in mine]

    def name(self, path: Path) -> Path:
        """Return the file of this part: jobs that share a command line must not share a file."""
        return path.with_name(f"{path.stem}.{self.number}-of-{self.count}{path.suffix}")


def missing_files(files: Sequence[Path]) -> list[Path]:
    """Return the files of parts whose names tell that they should be among these."""
    given = {os.path.abspath(file) for file in files}
    expected: dict[str, Path] = {}
    for file in files:
        found = re.fullmatch(r"(.*)\.(\d{1,9})-of-(\d{1,6})", file.stem)
        if found is None:
            continue
        for number in range(1, int(found[3]) + 1):
            other = Shard(number, int(found[3])).name(file.with_name(f"{found[1]}{file.suffix}"))
            expected[os.path.abspath(other)] = other
    return [path for name, path in expected.items() if name not in given]


def parse_shard(text: str) -> Shard:
    """Turn `2/8` into the second of eight parts."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    number, count = (int(part) for part in found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(
            f"--shard is not a part of parts: `{text}`", hint="from --shard 1/8 to --shard 8/8"
        )
    return Shard(number, count)


def shard_of_job(environment: Mapping[str, str] = os.environ) -> Shard | None:
    """Return the part that a SLURM job array gives to this task; None outside of one."""
    names = ("ID", "COUNT", "MIN", "STEP")
    defaults = {"MIN": "0", "STEP": "1"}
    given = [environment.get(f"SLURM_ARRAY_TASK_{name}", defaults.get(name, "")) for name in names]
    if not given[0] or not given[1]:
        return None
    try:
        task, count, first, step = map(int, given)
        return _checked(Shard((task - first) // max(step, 1) + 1, count))
    except ValueError as error:
        raise UsageError(
            f"cannot tell the part from SLURM_ARRAY_TASK_ID={given[0]} and _COUNT={given[1]}",
            hint="give --shard I/N yourself, or --shard 1/1 for all images",
        ) from error


def _checked(shard: Shard) -> Shard:
    if not 1 <= shard.number <= shard.count:
        raise ValueError(f"no such part: {shard}")
    return shard

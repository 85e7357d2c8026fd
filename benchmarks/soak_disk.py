"""An output folder on a disk that can be filled up."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

SPACE = 2**20  # bytes of the tmpfs: a few times the output of a batch


class Disk:
    """A small tmpfs if the user may mount one, otherwise a file size limit for children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SPACE}", "tmpfs", str(self.folder)]
        self.is_mounted = False
        with suppress(OSError):
            self.is_mounted = subprocess.run(command, capture_output=True).returncode == 0
        self.limit: int | None = None

    @property
    def kind(self) -> str:
        """Return a description of the disk."""
        return f"a tmpfs of {SPACE >> 10} kB" if self.is_mounted else "RLIMIT_FSIZE"

    def fill(self, output: Path, left: int) -> None:
        """Leave about `left` bytes of free space."""
        if not self.is_mounted:
            self.limit = (output.stat().st_size if output.exists() else 0) + left
            return
        page = os.sysconf("SC_PAGESIZE")
        with (self.folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(page))
        # Free space is counted in pages; the last page of the records has space as well.
        os.truncate(self.folder / "filler", max(0, self._filled() - left // page * page))

    def _filled(self) -> int:
        return (self.folder / "filler").stat().st_size

    def free(self) -> None:
        """Free the space."""
        self.limit = None
        (self.folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount the disk."""
        if self.is_mounted:
            subprocess.run(["umount", str(self.folder)], check=True)

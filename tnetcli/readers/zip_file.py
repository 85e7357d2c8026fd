"""Open zip files that others made: a small directory, and members of a bounded size."""

import io
import os
import zipfile

from tnetcli.files import open_descriptor

# Python makes an object of each entry of the directory: ten times its size in memory.
MOST_DIRECTORY = 2**24  # bytes
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive(zipfile.ZipFile):
    """A zip file for reading; BadZipFile where its directory is too large."""

    _file: "_BoundedFile | None" = None

    def __init__(self, path: str) -> None:
        self._file = _BoundedFile(open_descriptor(path))
        try:
            super().__init__(self._file)
        except BaseException:
            self._file.close()
            raise
        self._file.most = None

    def close(self) -> None:
        """Close the file as well, which ZipFile leaves open where it was given one."""
        if self._file is not None:  # ZipFile closes an archive that was never opened, too
            super().close()
            self._file.close()

    def read_part(self, name: str, most: int, start: int, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of a member, a negative `start` counted from its end.

        BadZipFile where the member is larger than `most`; KeyError where there is none.
        """
        member = self.getinfo(name)
        if member.compress_type not in METHODS:
            # Python decompresses the other methods without a limit.
            raise zipfile.BadZipFile(f"`{name}` is compressed with method {member.compress_type}")
        # What is merely stored can be read in part without reading the rest.
        is_whole = (start, stop) == (0, None) or member.compress_type != zipfile.ZIP_STORED
        if is_whole and member.file_size > most:
            raise zipfile.BadZipFile(f"`{name}` has {member.file_size:,} bytes, more than {most:,}")
        start = max(0, member.file_size + start) if start < 0 else start
        stop = member.file_size if stop is None else min(stop, member.file_size)
        with self.open(member) as file:
            file.seek(start)
            return file.read(max(0, stop - start))


class _BoundedFile(io.BufferedReader):
    """A file of which no more than `most` bytes are read at once."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(io.FileIO(descriptor))
        self._length = os.fstat(descriptor).st_size
        self.most: int | None = MOST_DIRECTORY

    def read(self, size: int | None = -1) -> bytes:
        if self.most is not None:
            left = max(0, self._length - self.tell())
            wanted = left if size is None or size < 0 else min(size, left)
            if wanted > self.most:
                raise zipfile.BadZipFile(f"its directory has {wanted:,} bytes")
        return super().read(size)

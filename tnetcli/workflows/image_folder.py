"""A folder with a file for each image, named by its id."""

import hashlib
import os
import re
from pathlib import Path

from tnetcli.errors import OutputError
from tnetcli.wording import reason

ROOT = "_"
LONGEST = 200  # bytes of a name; file systems take 255
DEEPEST = 1500  # bytes of all folders together; systems take 4096, and the output lies somewhere


class ImageFolder:
    """Gives every image a file of its own below one folder, which is made."""

    def __init__(self, folder: str | os.PathLike[str], suffix: str) -> None:
        self.folder = Path(folder)
        self.suffix = suffix
        _make(self.folder)

    def path(self, id: str) -> Path:
        """Return the file of an image: its id below the folder, and no other's.

        What file systems do not take is replaced; a digest then keeps apart what would meet.
        """
        *folders, name = id.split("/")
        if len(id.encode(errors="surrogatepass")) > DEEPEST:
            folders = [ROOT]  # no system takes it as it is; the digest tells it from others
        safe = [_safe(each) for each in folders]
        safe = [f"{each}_" if each.endswith(self.suffix) else each for each in safe]  # no file's
        told = "/".join([*safe, _safe(name)])
        # Absolute paths lie below `_`, and nothing else does without a digest.
        plain = f"{ROOT}{id}" if id.startswith("/") else id
        if told != plain or folders[:1] == [ROOT]:
            digest = hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=4)
            name = f"{_safe(name)}-{digest.hexdigest()}"
        return self.folder.joinpath(*safe, f"{name}{self.suffix}")

    def place(self, id: str) -> Path:
        """Return the file of an image, and see to it that its folder is there."""
        path = self.path(id)
        _make(path.parent)
        return path


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder `{folder}`: {reason(error)}", hint="name another"
        ) from error


def _safe(part: str) -> str:
    """Return a part of a path that leads nowhere else and that file systems take."""
    plain = re.sub(r'[\x00-\x1f<>:"|?*\\\ud800-\udfff]', "_", part)
    plain = plain.encode()[-LONGEST:].decode(errors="ignore")
    return "_" if plain in ("", ".", "..") else plain

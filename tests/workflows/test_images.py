import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.images import noise, write_geotiff

AS_NOBODY = """
import os, sys
from tnetcli.readers.base import ReadOptions
from tnetcli.readers import raster
from tnetcli.traversal import Plan
from tnetcli.workflows.images import find_images
from tnetcli.workflows.info import inspect
os.setuid(65534)
for image in find_images(sys.argv[1:], recursive=True):
    result = inspect(image, reader=None, options=ReadOptions(), plan=Plan(1, (1,)), view_size=64)
    print(os.path.basename(image), "failed" if result.error else "ok")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("argument", ["closed", "."])
def test_a_folder_that_may_not_be_listed_does_not_end_the_batch(argument):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_geotiff(folder / "a.tif", noise((64, 64)))
        (folder / "closed").mkdir(mode=0o700)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(folder / argument), str(folder / "a.tif")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["a.tif ok", "closed failed"]

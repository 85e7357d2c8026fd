import pytest

from tests.images import write_constant_levels_tiff, write_geotiff
from tests.readers.contract import ReaderContract
from tnetcli.readers.raster import RasterReader


class TestRasterReader(ReaderContract):
    direct = True

    def open(self, path):
        return RasterReader(str(path), direct=self.direct)

    @pytest.fixture
    def image(self, tmp_path, truth):
        return write_geotiff(tmp_path / "a.tif", truth, overviews=[2, 4])

    @pytest.fixture
    def levels_image(self, tmp_path):
        return write_constant_levels_tiff(tmp_path / "levels.tif", (10, 20, 30)), (10, 20, 30)


class TestRasterReaderThroughGdal(TestRasterReader):
    direct = False

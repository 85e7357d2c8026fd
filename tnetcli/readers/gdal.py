"""Open rasters with rasterio, after a check of every file that GDAL would open.

GDAL opens sidecars, overviews and the sources of a VRT with any of its drivers, and some of them
write files, fetch URLs or read any file as raw pixels. A raster is therefore identified by its
content, its sidecars must match their names, and the sources of a VRT must be ordinary images in
its folder.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache
from time import time
from typing import Any
from xml.parsers import expat

import rasterio
from rasterio.errors import RasterioError, RasterioIOError
from rasterio.io import DatasetReader

from tnetcli import files
from tnetcli.errors import ImageError
from tnetcli.files import is_inside, is_remote, open_regular
from tnetcli.readers.detect import JPEG_2000_MAGIC, PNG_MAGIC, TIFF_MAGIC
from tnetcli.readers.tiff_files import check_directories
from tnetcli.readers.watch import watching
from tnetcli.text import one_line, shorten

# Drivers allowed for a URL; not VRT, which could name any local file.
REMOTE_DRIVERS = ("GTiff", "JP2OpenJPEG", "PNG", "JPEG", "WEBP", "GIF", "BMP")
ALLOWED = "CPL_VSIL_CURL_ALLOWED_FILENAME"
CLOUDS = ("s3", "gs", "az", "adls", "oss", "swift")
GDAL_FAILURES = (RasterioError, OSError, ValueError)
# Messages that GDAL only logs although the pixels are wrong.
DAMAGE = re.compile(
    r"corrupt|premature|truncat|bogus|extraneous|unexpected|inconsisten|cannot|failed|error|"
    r"short|not a jpeg|unsupported marker",
    re.IGNORECASE,
)


class _Collector(logging.Handler):
    """Collects the messages of threads that asked for them; others are left alone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.thread = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        messages = getattr(self.thread, "messages", None)
        if messages is not None:
            messages.append(record.getMessage())


_COLLECTOR = _Collector()
logging.getLogger("rasterio").addHandler(_COLLECTOR)


@contextmanager
def raise_on_damage() -> Iterator[None]:
    """Raise RasterioIOError for logged damage: GDAL returns wrong pixels for a bad JPEG tile."""
    messages: list[str] = []
    _COLLECTOR.thread.messages = messages
    try:
        yield
    finally:
        _COLLECTOR.thread.messages = None
    for message in messages:
        if DAMAGE.search(message):
            raise RasterioIOError(message)


@contextmanager
def confined(path: str) -> Iterator[None]:
    """Let GDAL fetch nothing, or only `path` if it is a URL; all its errors are RasterioErrors.

    Sidecars of a URL are not requested: GDAL would open the answer with any driver. rasterio sets
    options for this thread, on the main thread for the process while the block runs.
    """
    if is_remote(path):
        options = {"GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR"}
        scheme, _, rest = path.partition("://")
        if scheme.lower() in ("http", "https", "ftp"):
            options[ALLOWED] = f"/vsicurl/{path}"
        elif scheme in CLOUDS:
            options[ALLOWED] = f"/vsi{scheme}/{rest}"
    else:
        # Masks and overviews beside the image count, whatever the environment says.
        options = {ALLOWED: "none", "GDAL_DISABLE_READDIR_ON_OPEN": "FALSE"}
    try:
        with rasterio.Env(**options):
            yield
    except RasterioError:
        raise
    except Exception as error:
        # Some calls let exceptions of GDAL through, whose classes rasterio does not publish.
        if type(error).__module__.startswith("rasterio."):
            raise RasterioIOError(str(error)) from error
        raise


def open_dataset(path: str, **options: Any) -> Any:
    """Open `path` with a handle that is not shared, by the one driver that matches its content."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ImageError(
            f"GDAL needs file names in UTF-8: `{path}`",
            hint="rename it (`convmv -f latin1 -t utf8` renames many), or give a link to it",
        ) from error
    drivers = list(REMOTE_DRIVERS) if is_remote(path) else [driver_of(path)]
    if None in drivers:
        raise RasterioIOError("the format is not supported")
    with confined(path):
        return DatasetReader(path, driver=drivers, sharing=False, **options)


def open_checked(path: str) -> Any:
    """Check every file that GDAL would open for `path`, then open it.

    Raises ImageError if one of them is not allowed. Further handles need only `open_dataset`.
    """
    if not is_remote(path):
        _check_image(path, path, set())
    return _open_named(path)


def _open_named(path: str) -> Any:
    """Open a dataset; raise ImageError if it names files that GDAL must not open."""
    with ExitStack() as stack, confined(path):
        dataset = stack.enter_context(closing(open_dataset(path)))
        # Only overviews in the obsolete format of ERDAS are named.
        if "OVERVIEW_FILE" in {key.upper() for key in dataset.tags(ns="OVERVIEWS")}:
            raise ImageError(
                f"the metadata of `{path}` name other files in an item OVERVIEW_FILE",
                hint="remove the item, or make overviews of a local copy with `gdaladdo`",
            )
        folder = os.path.dirname(os.path.abspath(path))
        for name in () if is_remote(path) else dataset.files:
            if not is_inside(name, folder) or not os.path.exists(name):
                raise ImageError(
                    f"`{path}` has a part outside its folder: `{shorten(name)}`",
                    hint="copy all its files into one folder",
                )
        stack.pop_all()
        return dataset


# The drivers in use, by the first bytes of a file. VRT and ENVI are recognised otherwise.
MAGIC: dict[str, tuple[bytes, ...]] = {
    "GTiff": TIFF_MAGIC,
    "JP2OpenJPEG": JPEG_2000_MAGIC,
    "PNG": (PNG_MAGIC,),
    "JPEG": (b"\xff\xd8\xff",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "WEBP": (b"RIFF",),
    "HFA": (b"EHFA_HEADER_TAG",),
    "NITF": (b"NITF", b"NSIF"),
}
# Allowed sources of a VRT. GDAL chooses their drivers, some by text at the beginning of a file; a
# zero byte among the first bytes rules these out.
SOURCES = frozenset(MAGIC) - {"NITF"}
HEAD_BYTES, ZERO_WITHIN = 4096, 16
SIDECARS = (".ovr", ".msk", ".aux.xml")
METADATA_ENDINGS = (".xml", ".txt", ".imd", ".rpb", ".pvl", ".rpc", ".pass", ".dim", ".aux")
VRT_BYTES = 2**26  # a mosaic of ten thousand scenes has 15 MB
MOST_NESTED_VRTS, MOST_SOURCES, DEEPEST_XML = 8, 2**16, 32
RECENT = 2.0  # seconds; time stamps of folders may be as coarse
# `NITF_IM:0:x.ntf` names a part of a file and `<MRF_META>` is one: GDAL chooses the driver.
SUBDATASET = re.compile(r"[A-Za-z]\w+:|<")

# Everything that `gdalbuildvrt`, `gdal_translate` and `gdalwarp` write, in lower case: GDAL ignores
# case. Any other element could name a file or run code.
VRT_ELEMENTS = frozenset("""
    vrtdataset srs geotransform gcplist gcp metadata mdi vrtrasterband description unittype offset
    scale nodatavalue hidenodatavalue colorinterp colortable entry categorynames category
    histograms histitem histmin histmax bucketcount includeoutofrange approximate histcounts
    maskband overviewlist overview simplesource complexsource averagedsource nodatafrommasksource
    kernelfilteredsource kernel size coefs sourcefilename sourceband sourceproperties srcrect
    dstrect nodata usemaskband scaleoffset scaleratio exponent srcmin srcmax dstmin dstmax clamp
    lut colortablecomponent maskvaluethreshold remappedvalue blockxsize blockysize gdalwarpoptions
    warpmemorylimit resamplealg workingdatatype option options sourcedataset transformer
    approxtransformer maxerror basetransformer genimgprojtransformer srcgeotransform
    srcinvgeotransform dstgeotransform dstinvgeotransform reprojecttransformer
    reprojectiontransformer sourcesrs targetsrs sourcecrs targetcrs bandlist bandmapping
    srcnodatareal srcnodataimag dstnodatareal dstnodataimag srcalphaband dstalphaband cutline
    cutlineblenddist
""".split())  # fmt: skip  # noqa: SIM905
VRT_ATTRIBUTES = frozenset("""
    rasterxsize rasterysize subclass dataaxistosrsaxismapping coordinateepoch domain format key
    name datatype band blockxsize blockysize relativetovrt shared xoff yoff xsize ysize resampling
    src dst c1 c2 c3 c4 id info pixel line x y z projection normalized
""".split())  # fmt: skip  # noqa: SIM905
VRT_CLASSES = frozenset({"vrtwarpeddataset", "vrtsourcedrasterband", "vrtwarpedrasterband"})
FILE_ELEMENTS = frozenset({"sourcefilename", "sourcedataset"})


def driver_of(path: str) -> str | None:
    """Return the driver that may open a local file, by its content; None if there is none."""
    head = _head(path)
    for driver, magics in MAGIC.items():
        if head.startswith(magics) and (driver != "WEBP" or head[8:12] == b"WEBP"):
            return driver
    if b"<VRTDataset" in head.split(b"\0", 1)[0]:
        return "VRT"
    for name in (f"{os.path.splitext(path)[0]}.hdr", f"{path}.hdr"):
        try:
            with open_regular(name) as file:
                return "ENVI" if file.read(4) == b"ENVI" else None
        except OSError:
            continue
    return None


def _check_image(path: str, root: str, done: set[str], nested: int = 0) -> None:
    """Check the sidecars of an image and, for a VRT, its sources; `root` is the image to open."""
    done.add(os.path.abspath(path))
    sidecars = sidecars_of(path)
    metadata = [name for name in sidecars if name.casefold().endswith(".aux.xml")]
    for name in sidecars:
        if name in metadata:
            _parse_xml(name, files.MOST_XML_BYTES)
        elif driver_of(name) != "GTiff":
            raise ImageError(
                f"the sidecar `{name}` is not a TIFF",
                hint="remove it, or make it again with `gdaladdo`",
            )
    for name in sidecars:
        if name not in metadata:
            check_directories(name)  # of a damaged mask, GDAL takes all pixels for valid
            _check_names(name)
    driver = driver_of(path)
    if driver == "VRT":
        for element, name in _Vrt(path).sources:
            if os.path.abspath(name) not in done:
                _check_source(name, element, path, root, done, nested + 1)
    elif nested:
        silent = driver == "GTiff" and not check_directories(path).has_metadata
        if metadata or not silent:  # opening every source of a mosaic would take a while
            _check_names(path)


def _check_source(
    path: str, element: str, vrt: str, root: str, done: set[str], nested: int
) -> None:
    """Check a file that an element of a VRT names."""
    problem = None
    if not is_inside(path, os.path.dirname(os.path.abspath(root))):
        problem = "outside its folder"
    else:
        try:
            driver = driver_of(path)
            is_image = driver in SOURCES and b"\0" in _head(path)[:ZERO_WITHIN]
            if driver != "VRT" and not is_image:
                problem = "which is not an image of a supported format"
        except OSError as error:
            problem = one_line(error) if os.path.lexists(path) else "which does not exist"
    if problem is not None:
        raise ImageError(
            f"`{vrt}` names in `{element}` the file `{shorten(path)}`, {problem}",
            hint="put its sources beside it, as GeoTIFF, and make it again with `gdalbuildvrt`",
        )
    if len(done) > MOST_SOURCES or nested > MOST_NESTED_VRTS:
        raise ImageError(
            f"`{root}` has too many sources, or VRTs nested too deeply",
            hint="make one VRT of the images themselves",
        )
    with watching(root):  # each source is progress
        _check_image(path, root, done, nested)


def _check_names(path: str) -> None:
    """Raise ImageError if a part of an image cannot be opened, or names other files."""
    try:
        _open_named(path).close()
    except GDAL_FAILURES as error:
        raise ImageError(
            f"cannot open `{path}`, a part of an image: {one_line(error)}",
            hint="make or copy it again, or remove it",
        ) from error


def _parse_xml(path: str, most: int, **handlers: Any) -> None:
    """Parse XML with handlers of expat; raise ImageError if it is too long or malformed."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ImageError(f"`{path}` is longer than {most // 2**20} MiB", hint="is it a VRT?")
    # GDAL assumes UTF-8 whatever the declaration says.
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text, parser.buffer_size = True, 2**20

    def refuse(name: str, *_: object) -> None:
        raise _refused(path, "a DOCTYPE", f"!DOCTYPE {name}")

    for name, handler in {"StartDoctypeDecl": refuse, **handlers}.items():
        setattr(parser, f"{name}Handler", handler)
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise ImageError(
            f"`{path}` is malformed XML: {one_line(error)}",
            hint="make or copy it again, or remove it",
        ) from error


def _refused(path: str, what: str, element: str) -> ImageError:
    return ImageError(
        f"`{path}` has {what}, which is not allowed: `<{shorten(element)}>`",
        hint="if you trust it, convert it to a GeoTIFF: gdal_translate -of COG IN OUT",
    )


class _Vrt:
    """A VRT, in which only elements that are known to be harmless are allowed.

    `sources` are the files that it names, each with the name of its element.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = os.path.dirname(os.path.abspath(path))
        self.sources: list[tuple[str, str]] = []
        self._open: list[str] = []
        self._in_xml = 0  # depth at which metadata in XML begins
        self._name = ""
        self._file: tuple[str, bool] | None = None  # open element, and whether relative to the VRT
        _parse_xml(
            path, VRT_BYTES, StartElement=self._start, EndElement=self._end,
            CharacterData=self._text, Comment=self._break, StartCdataSection=self._break,
            ProcessingInstruction=self._instruction,
        )  # fmt: skip

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._break()
        if len(self._open) >= DEEPEST_XML:
            raise _refused(self._path, "elements nested too deeply", name)
        lowered = {key.casefold(): value for key, value in attributes.items()}
        if len(lowered) < len(attributes):
            raise _refused(self._path, "a duplicate attribute", name)
        self._open.append(name)
        if not self._in_xml:
            self._check(name, lowered)

    def _check(self, name: str, attributes: dict[str, str]) -> None:
        kind = name.casefold()
        if kind not in VRT_ELEMENTS:
            raise _refused(self._path, "an element that could name files or run code", name)
        if unknown := attributes.keys() - VRT_ATTRIBUTES:
            raise _refused(self._path, f"an attribute `{shorten(min(unknown))}`", name)
        subclass = attributes.get("subclass", "")
        if subclass and subclass.casefold() not in VRT_CLASSES:
            raise _refused(self._path, f"a subClass `{shorten(subclass)}`", name)
        if kind == "metadata":
            if attributes.get("domain", "").strip().casefold() == "overviews":
                raise _refused(self._path, "metadata that name overviews", name)
            if attributes.get("format", "").casefold() == "xml":
                self._in_xml = len(self._open)
        if kind in FILE_ELEMENTS:
            relative = attributes.get("relativetovrt", "0")
            if relative not in ("0", "1"):
                raise _refused(self._path, f"relativeToVRT=`{shorten(relative)}`", name)
            self._file, self._name = (name, relative == "1"), ""

    def _text(self, text: str) -> None:
        if files.GRIDS.search(text):
            raise _refused(self._path, "the name of a grid, which PROJ would open", self._open[-1])
        if self._file is not None:
            self._name += text

    def _break(self, *_: object) -> None:
        """Refuse what splits a file name in two: GDAL would take the part before it."""
        if self._file is not None:
            raise _refused(self._path, "a file name that is not plain text", self._file[0])

    def _instruction(self, target: str, _: str) -> None:
        # GDAL parses `<?x />` as an element that ends there, and the rest as its content.
        raise _refused(self._path, "a processing instruction", f"?{target}")

    def _end(self, name: str) -> None:
        if self._file is not None:
            element, is_relative = self._file
            if self._name != self._name.strip():
                raise _refused(self._path, "a file name with spaces around it", name)
            if SUBDATASET.match(self._name):
                raise _refused(self._path, "the name of a subdataset", name)
            place = os.path.join(self._folder, self._name) if is_relative else self._name
            self.sources.append((element, place))
            self._file = None
        if self._in_xml == len(self._open):
            self._in_xml = 0
        self._open.pop()


def _head(path: str) -> bytes:
    with open_regular(path) as file:
        return file.read(HEAD_BYTES)


def sidecars_of(path: str) -> list[str]:
    """Return the overviews, masks and metadata beside an image, and those of each of these.

    Raises ImageError for a pipe, a device or a socket whose name GDAL would open.
    """
    folder, base = os.path.split(path)
    stem = os.path.splitext(base)[0].casefold()
    changed = os.stat(folder or ".").st_mtime_ns
    # Files that are written just now may not show in the time of their folder.
    moment = time() if time() - changed / 1e9 < RECENT else 0.0
    names, irregular = _listed(folder or ".", changed, moment)
    for name in irregular:
        lowered = name.casefold()
        if name != base and (lowered.startswith(stem) or lowered.endswith(METADATA_ENDINGS)):
            place = os.path.join(folder, name)
            raise ImageError(f"`{place}`, beside an image, is not a regular file", hint="remove it")
    start = f"{base.casefold()}."
    return [os.path.join(folder, name) for name in names if name.casefold().startswith(start)]


@lru_cache(maxsize=16)  # one batch has thousands of images in a folder
def _listed(folder: str, changed: int, moment: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of all sidecars in a folder, and of its irregular files."""
    sidecars, irregular = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.casefold().endswith(SIDECARS):
                sidecars.append(entry.name)
            try:
                if not entry.is_file() and not entry.is_dir():
                    files.check_regular(entry.stat(), entry.path)
            except FileNotFoundError:
                continue  # a broken link
            except OSError:
                irregular.append(entry.name)
    return tuple(sorted(sidecars)), tuple(irregular)

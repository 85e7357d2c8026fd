"""Environment variables that change what tnet does: shown without secrets, and judged."""

import re
from collections.abc import Iterator, Mapping

from tnetcli.wording import printable

LONGEST = 200  # characters of a value
HIDDEN = "(set, not shown)"
GROUPS = ("TNET_", "GDAL_", "CPL_", "VSI_", "PROJ_", "SLURM_", "HF_", "CUDA_", "NCCL_", "DASK_")
NAMES = (
    *("NO_COLOR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "XDG_CACHE_HOME", "TMPDIR"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"),
)
SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PWD|AUTH|BEARER|COOKIE|HEADER|CREDENTIAL|JWT|SIGNATURE", re.IGNORECASE
)
# Two rows of blocks of a Sentinel-2 scene: 2 x 10980 x 512 pixels of three bands of 8 bits.
LEAST_CACHE = 2 * 10980 * 512 * 3
MEGA = 1 << 20


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those that matter, by name; what may be secret is only said to be there."""
    return {
        name: HIDDEN if SECRET.search(name) else printable(_without_login(value), LONGEST)
        for name, value in sorted(variables.items())
        if name in NAMES or name.startswith(GROUPS)
    }


def _without_login(value: str) -> str:
    """Take the name, the password and the signature out of a URL."""
    value = re.sub(r"(://)[^/@\s]*@", r"\1", value)
    return re.sub(r"(://[^?\s]*)\?\S*", rf"\1?{HIDDEN}", value)


def judge(variables: Mapping[str, str], memory: int | None) -> Iterator[tuple[str, str]]:
    """Yield settings that are known to go wrong, each with what to do about it."""
    hiding = variables.get("GDAL_DISABLE_READDIR_ON_OPEN", "")
    if hiding.upper() == "EMPTY_DIR":
        yield (
            f"GDAL_DISABLE_READDIR_ON_OPEN={hiding} hides overviews and masks in files of their "
            "own (.ovr, .msk): images are decoded in full, and masked pixels become valid",
            "unset GDAL_DISABLE_READDIR_ON_OPEN",
        )
    cache = _cache_bytes(variables.get("GDAL_CACHEMAX", ""), memory)
    if cache is not None and cache < LEAST_CACHE:
        yield (
            f"GDAL_CACHEMAX={variables['GDAL_CACHEMAX']} is {cache / MEGA:.1f} MB: the same blocks "
            "are decoded over and over",
            f"unset GDAL_CACHEMAX, or set it to {-(-LEAST_CACHE // MEGA)} (MB) or more",
        )


def _cache_bytes(text: str, memory: int | None) -> int | None:
    """Return what GDAL makes of GDAL_CACHEMAX; None where it is not set, or not a number."""
    text = text.strip()
    if part := re.fullmatch(r"(\d+(?:\.\d*)?)\s*%", text):
        return None if memory is None else int(float(part[1]) / 100 * memory)
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return None
    # Below 100000 they are megabytes, from there on bytes.
    return int(text) * MEGA if int(text) < 100_000 else int(text)

"""Classify gigapixel images by looking closer only where it matters."""

from typing import TYPE_CHECKING, Any

from tnetcli.errors import TnetError

if TYPE_CHECKING:
    from tnetcli.readers.open import open_image

__version__ = "0.1.0.dev0"
__all__ = ["TnetError", "__version__", "open_image"]


def __getattr__(name: str) -> Any:
    # `import tnetcli` stays instant: the readers load when first asked for.
    if name == "open_image":
        from tnetcli.readers.open import open_image

        return open_image
    raise AttributeError(f"module `tnetcli` has no attribute `{name}`")

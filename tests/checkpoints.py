"""Tiny model files for tests, and functions that break them."""

import json
import struct
from pathlib import Path
from typing import Any

import torch

from tests.encoding import encode, levels_of
from tnetcli.geometry import Region, Window
from tnetcli.models.base import Model
from tnetcli.models.checkpoint import KEY, SCHEMA, Description, save_checkpoint
from tnetcli.models.registry import build_model

BACKBONE = "test_efficientnet"  # the smallest of timm
VIEW_SIZE = 64
LEVELS = {"whole": 1, "two_stream": 2, "anchornet": 2}  # of families with a fixed number


def fields(family: str = "tnet", **changes: Any) -> dict[str, Any]:
    """Return the fields of a valid description."""
    return {
        "family": family,
        "config": {"backbone": BACKBONE, "view_size": VIEW_SIZE},
        "classes": ["river", "forest", "town"],
        "bands": ["B02", "B03", "B04", "B08"],
        "normalisation": {
            "dtype": "uint16",
            "mean": [400.5, 600.0, 500.0, 2000.0],
            "std": [200.0, 200.0, 250.0, 900.5],
        },
        "traversal": {"levels": LEVELS.get(str(family), 3), "keep": [2, 1]},
        **changes,
    }


def tiny(family: str = "tnet", **changes: Any) -> tuple[Model, Description]:
    """Build a model with random weights and running statistics, and its description."""
    description = Description(**fields(family, **changes))
    torch.manual_seed(0)
    model = build_model(
        description.family,
        description.config,
        classes=len(description.classes),
        bands=len(description.bands),
    )
    model.train()
    outputs_of(model, 3)
    return model.eval(), description


def outputs_of(model: Model, count: int) -> tuple[torch.Tensor, ...]:
    """Return all outputs of a model for fixed views."""
    generator = torch.Generator().manual_seed(1)
    side = model.view_size
    views = torch.randn((count, model.bands, side, side), generator=generator)
    root = Region(Window(0, 0, 1000, 800))
    regions = [root, *(root.child(model.grid, 0, 0) for _ in range(count - 1))]
    with torch.no_grad():
        encoded = encode(model, views, regions)
        mask, levels = torch.ones((1, count), dtype=torch.bool), levels_of(regions)
        aggregated = model.aggregate(encoded.features[None], mask, levels)
    return (*encoded[:2], *aggregated[:3])


def write_tiny(path: Path, family: str = "tnet", **changes: Any) -> Path:
    """Save a tiny model."""
    save_checkpoint(path, *tiny(family, **changes))
    return path


def pack(header: Any, data: bytes = b"") -> bytes:
    """Return a file of a header, a table or bytes, and the data that follows it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def unpack(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a file and the data that follows it."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def pack_description(value: Any) -> bytes:
    """Return a file with a description, given as text or as a table, and no tensors."""
    text = value if isinstance(value, str) else json.dumps({"schema": SCHEMA, **value})
    return pack({"__metadata__": {KEY: text}})

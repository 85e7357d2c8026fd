"""What a parser written in Python runs into when what it parses is damaged."""

import struct

# Found by feeding Pillow, tifffile and zarr with spoilt files (benchmarks/soak.py).
PARSING_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
)

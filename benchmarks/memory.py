"""What a process holds in memory, as Linux counts it."""

import re
from pathlib import Path


def status(field: str) -> float:
    """Return a field of this process in thousands of bytes: `VmRSS` now, `VmHWM` at most.

    VmHWM is of this address space alone; getrusage would count the parent's as well.
    """
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, field
    return int(found[1]) * 1.024

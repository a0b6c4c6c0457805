"""Runs of many small operations on a GPU, recorded once as a CUDA graph and played again.

A run is a function of tensors that returns nothing, changes some of them in place and looks at no value. On a GPU the
launches of its operations cost more than their work; a graph launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps

import torch
from torch import Tensor

Run = Callable[..., None]
Shapes = tuple[tuple[int, ...], ...]

# Graphs that are kept; each holds buffers as large as the tensors of one call.
GRAPHS = 16


def replayed(changes: tuple[int, ...]) -> Callable[[Run], Run]:
    """Let a run be replayed from a graph where its tensors, all float32, lie on a GPU.

    `changes`: the positions of the tensors that it changes. One graph is recorded for each combination of shapes.
    """

    def decorate(run: Run) -> Run:
        @wraps(run)
        def call(*tensors: Tensor) -> None:
            if not tensors[0].is_cuda:
                run(*tensors)
                return
            graph, buffers = _record(run, tuple(tuple(t.shape) for t in tensors), tensors[0].device)
            torch._foreach_copy_(buffers, list(tensors))
            graph.replay()
            torch._foreach_copy_([tensors[place] for place in changes], [buffers[place] for place in changes])

        return call

    return decorate


@lru_cache(maxsize=GRAPHS)
def _record(run: Run, shapes: Shapes, device: torch.device) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of one call, and the buffers that it reads and writes."""
    buffers = [torch.zeros(shape, device=device) for shape in shapes]
    graph = torch.cuda.CUDAGraph()
    # Once outside of the graph, as the first call of an operation may set things up that cannot be recorded.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run(*buffers)
    torch.cuda.current_stream(device).wait_stream(stream)
    # Other threads may copy and allocate meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run(*buffers)
    return graph, buffers

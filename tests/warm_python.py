"""A Python that has its imports behind it: programs start in it in milliseconds instead of seconds.

    with WarmPython(folder, ("torch",), environment) as warm:
        subprocess.run(["bitnest-format", "--help"], env=environment | {"PATH": warm.path})

`folder` gets two programs, `python` and `bitnest-format`. Each run of one is a fork of one waiting process, with the
caller's arguments, folder, variables and streams. A caller whose variables would have changed those imports gets an
interpreter of its own. POSIX only.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Read while the imports run, and never again.
READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TRITON_", "TORCH", "PYTHON", "OMP_", "CUDA_")
DECLINED = 255


class WarmPython:
    """The waiting process; a context manager. `path` is a PATH that has its two programs first."""

    def __init__(self, folder: Path, modules: Sequence[str], environment: Mapping[str, str]):
        self._socket = folder / "socket"
        programs = folder / "bin"
        programs.mkdir(parents=True)
        call = f'exec "{sys.executable}" -IS "{Path(__file__).resolve()}" call "{self._socket}"'
        for name, arguments in (("python", ""), ("bitnest-format", "-m bitnest_format ")):
            program = programs / name
            program.write_text(f'#!/bin/sh\n{call} {arguments}"$@"\n', encoding="utf-8")
            program.chmod(0o755)
        # What else is installed beside this interpreter (torchrun, say) comes after them.
        self.path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), environment.get("PATH", "")])
        self._command = [sys.executable, __file__, "serve", str(self._socket), *modules]
        self._environment = dict(environment)

    def __enter__(self) -> WarmPython:
        self._process = subprocess.Popen(self._command, env=self._environment, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def serve(place: str, modules: Sequence[str]) -> None:
    """Import, then answer calls until terminated."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    before = _read_at_import(os.environ)  # imports write there too
    for module in modules:
        importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries finished children
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.send(bytes([_answer(connection, before)]))
            os._exit(0)
        connection.close()


def _answer(connection: socket.socket, before: Mapping[str, str]) -> int:
    """Become the program that was asked for; returns its exit status."""
    header, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size, data = int.from_bytes(header, "little"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    request: dict[str, Any] = json.loads(data)
    if _read_at_import(request["environment"]) != before:
        return DECLINED
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # The old objects remember what their streams could do when the waiting process began.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    status = 1
    try:
        _run(request["arguments"])
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _run(arguments: list[str]) -> None:
    """As `python ARGUMENTS`: a file, `-m module`, or `-c code`."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


def call(place: str, arguments: list[str]) -> int:
    """Have the waiting process run a program with this process's streams; returns its exit status."""
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    data = json.dumps(request).encode("utf-8")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
        connection.sendall(data)
        status = connection.recv(1)
    if status == bytes([DECLINED]):
        os.execv(sys.executable, [sys.executable, *arguments])
    return status[0] if status else 1  # nothing: it died


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(call(sys.argv[2], sys.argv[3:]))

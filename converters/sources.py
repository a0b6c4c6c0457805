"""Opens whatever a path holds as the right kind of source, by looking at the content."""

from __future__ import annotations

from pathlib import Path

from bitnest_format.converters.base import Source
from bitnest_format.converters.gguf import GGUF_MAGIC, GgufSource
from bitnest_format.converters.hf import CONFIG_FILE, HuggingFaceSource
from bitnest_format.converters.rotation_file import describe_pickle
from bitnest_format.errors import SourceError
from bitnest_format.shards import Files


def open_source(
    path: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    ignore_unknown_tensors: bool = False,
    weights: Files | None = None,
) -> Source:
    """The model at `path`: a Hugging Face folder, a GGUF file, or a folder that holds nothing but one GGUF file.

    `name` and `revision` say where on the Hub it came from, if it did. `weights` are the files of a repository whose
    safetensors are read from there; `path` then holds its other files. Raises `SourceError` listing what stands in
    the way.
    """
    try:
        if weights is not None:
            return HuggingFaceSource(
                path, name=name, revision=revision, ignore_unknown_tensors=ignore_unknown_tensors, weights=weights
            )
        return _open(path, name, revision, ignore_unknown_tensors)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error


def _open(path: Path, name: str | None, revision: str | None, ignore_unknown_tensors: bool) -> Source:
    if path.is_file():
        return GgufSource(
            _checked_file(path), name=name, revision=revision, ignore_unknown_tensors=ignore_unknown_tensors
        )
    if not path.is_dir():
        raise SourceError(f"{path}: no such file or folder")
    files = sorted(path.glob("*.gguf"))
    if files and not any(path.glob("*.safetensors*")):
        if len(files) > 1:
            raise SourceError(
                f"{path}: holds {len(files)} GGUF files ({', '.join(file.name for file in files)}). Give the path of "
                "the one to convert, the least quantized if in doubt."
            )
        return GgufSource(files[0], name=name, revision=revision, ignore_unknown_tensors=ignore_unknown_tensors)
    return HuggingFaceSource(path, name=name, revision=revision, ignore_unknown_tensors=ignore_unknown_tensors)


def _checked_file(path: Path) -> Path:
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] == GGUF_MAGIC or path.suffix == ".gguf":
        return path
    if path.suffix in (".safetensors", ".json"):
        raise SourceError(f"{path}: give the folder that holds it and its {CONFIG_FILE}")
    known = describe_pickle(path)
    if known:
        raise SourceError(f"{path}: {known}")
    raise SourceError(f"{path}: is not a GGUF file; expected one, or a folder with {CONFIG_FILE} and safetensors")

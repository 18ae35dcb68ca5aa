"""Files and folders that people take for GGUF models: what they are, and what to do with them."""

import os
import re
from pathlib import Path

EXAMINED_BYTES = 4096
MOST_NAMED = 5

_CHOOSE = "Choose a .gguf model."
_UNPACK = "Unpack it, and choose a .gguf file in it."
_CONVERT = "Use the model's GGUF version, or its safetensors: localllm create NAME --from FOLDER."
_SAFETENSORS = "localllm create NAME --from FOLDER converts the folder that it is in."
_NEWER = "Download the model as GGUF: files of that time are not read any more."
_OLDER = (b"ggml", b"ggmf", b"ggjt")
_MAGICS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself", "Run git lfs pull there, or download it."),
    (b"PK\3\4", "a ZIP archive", _UNPACK),
    (b"\x1f\x8b", "a gzip archive", _UNPACK),
    (b"\xfd7zXZ\0", "an xz archive", _UNPACK),
    (b"BZh", "a bzip2 archive", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!", "a RAR archive", _UNPACK),
    (b"\x80\x02", "a PyTorch checkpoint", _CONVERT),
    (b"\x80\x04", "a PyTorch checkpoint", _CONVERT),
    (b"\x93NUMPY", "a NumPy array", _CONVERT),
    (b"\x89HDF", "an HDF5 file", _CONVERT),
    (b"MZqFpD", "a llamafile", "It has the model inside: unpack it with unzip, and choose the .gguf file."),
    (b"%PDF-", "a PDF document", _CHOOSE),
    (b"\x89PNG", "a picture", _CHOOSE),
    (b"\xff\xd8\xff", "a picture", _CHOOSE),
    # Four letters of a little-endian number, so that they are stored in reverse.
    *(
        (magic[::-1], f"a model in the format {magic.decode()}, older than GGUF", _NEWER)
        for magic in (b"ggml", b"ggmf", b"ggjt")
    ),
    (b"algg", "a LoRA adapter in the format ggla, older than GGUF", "Convert the adapter to GGUF."),
    (b"FUGG", "a big-endian GGUF file", "Use the little-endian version of the model."),
)
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml|!--)", re.IGNORECASE)
_TEXT = re.compile(r"[^\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]*")


def described_file(start: bytes) -> str:
    """What a file is that begins with these bytes, up to EXAMINED_BYTES, and what to do; two sentences."""
    what, advice = _of_file(start)
    return f"{what}. {advice}"


def described_binary(start: bytes) -> str:
    """What a file is that is not text, as in "it is a picture"; "" if that is not known."""
    if start.startswith(b"GGUF"):
        return "it is a GGUF model"
    return (_of_magic(start) or ("", ""))[0]


def _of_file(start: bytes) -> tuple[str, str]:
    if not start:
        return "it is empty", "Download it again."
    if not any(start):
        return "its beginning was never written", "Download it again: an interrupted download leaves such files."
    if _PAGE.match(start):
        return "it is a web page", "Download the file itself, not the page about it (with /resolve/)."
    return _of_magic(start) or _of_text(start)


def _of_magic(start: bytes) -> tuple[str, str] | None:
    for is_so, what, advice in (
        (start.startswith(b"PK\3\4") and b".pkl" in start, "it is a PyTorch checkpoint", _CONVERT),
        (start[257:262] == b"ustar", "it is a tar archive", _UNPACK),
        *((start.startswith(magic), f"it is {what}", advice) for magic, what, advice in _MAGICS),
        (start[8:9] == b"{" and not any(start[4:8]), "it is a safetensors file", _SAFETENSORS),
    ):
        if is_so:
            return what, advice
    return None


def _of_text(start: bytes) -> tuple[str, str]:
    text = start.decode(errors="ignore")
    if len(text.encode()) >= len(start) - 3 and _TEXT.fullmatch(text):  # a character may be cut at the end
        return f"it is {'JSON' if text.lstrip()[:1] in ('{', '[') else 'text'}", _CHOOSE
    return f"it starts with {start[:4].hex(' ')}", _CHOOSE


def described_folder(folder: Path) -> str:
    """What is in a folder that was named as a model, and what to do; two sentences."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"it is a folder that cannot be read: {error.strerror}. Choose a .gguf model."
    models = [name for name in names if name.lower().endswith(".gguf")]
    if models:
        more = " ..." if len(models) > MOST_NAMED else ""
        return f"it is a folder. Choose a model in it: {', '.join(models[:MOST_NAMED])}{more}."
    if any(name.lower().endswith(".safetensors") for name in names):
        return f"it is a folder of safetensors. localllm create NAME --from {folder} converts it."
    return "it is a folder without a .gguf file. Choose a .gguf model."

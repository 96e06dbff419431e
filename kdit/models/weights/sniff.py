"""Recognises by its first bytes what a file is that should be something else. Called by the file readers."""

from __future__ import annotations

HEAD_BYTES = 128
_LFS_POINTER = (b"version https://git-lfs.github.com/", b"version https://hawser.github.com/")
_PICKLE_PROTOCOLS = (2, 3, 4, 5)


def foreign_content(head: bytes) -> str | None:
    """What the file is, as the end of "... is", or None if its beginning is not one of the usual mistakes.

    Only looks; nothing is decoded or run, whatever the file is called.
    """
    if head.startswith(_LFS_POINTER):
        return "a Git LFS pointer, not the file itself; run 'git lfs pull' or download the file again"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive as torch.save writes it; a pickle can run code, so convert it to safetensors"
    if len(head) > 1 and head[0] == 0x80 and head[1] in _PICKLE_PROTOCOLS:
        return "a pickle, which can run code, so convert it to safetensors"
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    if head.lstrip()[:1] == b"<":
        return "a web page, perhaps an error message that was saved in place of the file"
    return None

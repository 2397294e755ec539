"""What blocks are called where names are paths: `ab/abcd...`, a folder of two digits and a name of all 32."""

import re

FOLDERS = tuple(f"{i:02x}" for i in range(256))
_PATH = re.compile(r"(?:.*/)?([0-9a-f]{2})/(\1[0-9a-f]{30})")


def path_of(key: bytes) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}"


def key_of(path: str) -> bytes | None:
    """The key of the block whose path, from any folder on, this is. None: it is none's."""
    match = _PATH.fullmatch(path)
    return bytes.fromhex(match[2]) if match else None

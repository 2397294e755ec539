"""Who can write files and folders."""

import os
import stat


def is_private(info: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and nobody else may write to it."""
    return info.st_uid == os.getuid() and not others_write(info)


def others_write(info: os.stat_result) -> bool:
    """Whether the mode of a file or folder lets users other than the owner write to it."""
    return bool(info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))

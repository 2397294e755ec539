"""Who can write files and folders."""

import os
import stat


def is_private(info: os.stat_result) -> bool:
    """Whether it is this user's, and nobody else may write it."""
    return info.st_uid == os.getuid() and not others_write(info)


def others_write(info: os.stat_result) -> bool:
    """Whether its mode lets others than its owner write it."""
    return bool(info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))

"""What the command line shows while a user waits."""

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def spinner(text: str) -> Progress:
    """On stderr, and gone when it ends: a context manager."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    progress.add_task(text, total=None)
    return progress

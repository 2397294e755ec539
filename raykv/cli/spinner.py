"""The spinner that the command line shows while a user waits."""

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def spinner(text: str) -> Progress:
    """Return a context manager that shows a spinner on stderr."""
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

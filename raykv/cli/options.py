"""Options of several commands."""

import click

from raykv.config import TRANSPORTS

SIZE = "A fraction of the node's memory (0.3), or bytes (20GiB, 500MB, 1073741824)."
NAME = click.option("--name", default="default", show_default=True, help="Name of the pool.")
TRANSPORT = click.option(
    "--transport", type=click.Choice(TRANSPORTS), default="auto", show_default=True, help="How blocks cross nodes."
)
YES = click.option("--yes", is_flag=True, help="Do not ask first, as a terminal does.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")

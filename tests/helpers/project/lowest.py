"""The lowest versions that pyproject.toml admits, as pip's constraints.

python -m tests.helpers.project.lowest EXTRA ...
"""

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def lowest(*extras: str) -> list[str]:
    """Constraints for raykv itself and these extras. ValueError for a requirement without a lowest version."""
    optional = PROJECT["optional-dependencies"]
    found = []
    for requirement in chain(PROJECT["dependencies"], *(optional[extra] for extra in extras)):
        if not (bound := re.fullmatch(r"([\w.-]+)>=([\w.]+)(,<[\w.]+)?", requirement)):
            raise ValueError(f"{requirement!r} names no lowest version: find it by `make pythons`")
        found.append(f"{bound[1]}=={bound[2]}")
        if bound[1] == "fsspec":
            found.append(f"s3fs=={bound[2]}")  # this s3fs needs just that fsspec; without it pip tries every s3fs
    return found


if __name__ == "__main__":
    print("\n".join(lowest(*sys.argv[1:])))

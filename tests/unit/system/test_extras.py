"""Errors name the packages of an extra, not the extra itself, since no index has raykv."""

import re
import tomllib

import pytest
from helpers.project.pages import ROOT

from raykv.system.extras import to_install

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAMED = {
    name
    for file in [*(ROOT / "raykv").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]
    for name in re.findall(r"to_install\([\"']([\w-]+)[\"']\)", file.read_text())
}


def test_a_command_names_the_packages_of_an_extra() -> None:
    assert to_install("redis") == "pip install 'redis>=8'"
    assert to_install("fsspec") == "pip install 'fsspec>=2024.3'"
    with pytest.raises(ValueError, match="no extra 'none'"):
        to_install("none")


@pytest.mark.parametrize("extra", sorted(NAMED))
def test_every_extra_that_an_error_names_is_one(extra: str) -> None:
    assert EXTRAS.keys() >= NAMED >= {"gpu", "vllm", "ui", "redis", "nixl", "serve", "transformers", "data", "fsspec"}
    command = to_install(extra)
    assert all(re.split(r"[<>=\[]", package)[0] in command for package in EXTRAS[extra])


def test_no_error_names_an_index_that_has_no_raykv() -> None:
    for file in [*(ROOT / "raykv").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]:
        assert not re.search(r"pip install '?raykv", file.read_text()), file

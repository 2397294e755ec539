"""Tells users how to install packages that only parts of raykv need."""

from importlib.metadata import requires


def to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, for raykv from a clone, a wheel or an image.

    extra: name of the extra in pyproject.toml. Raises ValueError for an unknown name.
    """
    listed = (line.partition(";") for line in requires("raykv") or [])
    packages = [package.strip() for package, _, marker in listed if marker.strip() == f'extra == "{extra}"']
    if not packages:
        raise ValueError(f"raykv has no extra {extra!r}")
    return "pip install " + " ".join(f"'{package}'" if set(package) & set("<>=*[") else package for package in packages)

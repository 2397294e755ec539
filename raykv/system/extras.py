"""The advice to install a package that only a part of raykv needs."""

from importlib.metadata import requires


def to_install(extra: str) -> str:
    """Return the command that installs an extra of raykv, for raykv from a clone, a wheel or an image.

    extra: name of the extra in pyproject.toml. Raises ValueError for an unknown name.
    """
    listed = (line.partition(";") for line in requires("raykv") or [])
    packages = [package.strip() for package, _, marker in listed if marker.strip() == f'extra == "{extra}"']
    if not packages:
        raise ValueError(f"raykv has no extra {extra!r}")
    return "pip install " + " ".join(f"'{package}'" if set(package) & set("<>=*[") else package for package in packages)

"""Certificates, and Ray's settings that name them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from raykv.line import tls

HOST = "127.0.0.1"


def settings(folder: Path, *hosts: str, authority: trustme.CA | None = None) -> dict[str, str]:
    """Ray's settings for a certificate of `hosts`, made in the folder. authority: signs it; None: a new one."""
    authority = authority or trustme.CA()
    folder.mkdir(exist_ok=True)
    leaf = authority.issue_cert(*hosts)
    files = {name: str(folder / name) for name in tls.FILES}
    certificate, key, of_authority = files.values()
    leaf.cert_chain_pems[0].write_to_path(certificate)
    leaf.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(of_authority)
    return {"RAY_USE_TLS": "1", **files}


@contextmanager
def used(folder: Path, host: str = HOST, authority: trustme.CA | None = None) -> Iterator[None]:
    """Have this process use TLS as Ray would, with a certificate of a host."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings(folder, host, authority=authority).items():
            patch.setenv(name, value)
        tls.context.cache_clear()
        yield
    tls.context.cache_clear()


def of_ray(folder: Path) -> dict[str, str]:
    """Ray's settings, for a certificate that Ray makes and that is its own authority."""
    from ray._common.tls_utils import generate_self_signed_tls_certs

    certificate, key = generate_self_signed_tls_certs()
    (folder / "certificate.pem").write_text(certificate)
    (folder / "key.pem").write_text(key)
    paths = folder / "certificate.pem", folder / "key.pem", folder / "certificate.pem"
    return {"RAY_USE_TLS": "1", **dict(zip(tls.FILES, map(str, paths), strict=True))}

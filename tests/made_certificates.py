"""Certificates of an authority, and of a stranger's, made by openssl for a test."""

import shutil
import subprocess

import pytest

from howdah.plan.comm import Tls

WHY = "openssl, which makes the certificates, is not there"
NEEDS_OPENSSL = pytest.mark.skipif(not shutil.which("openssl"), reason=WHY)


def made(folder):
    """Makes the files of a `member` and of a `stranger`; a function that names one's."""
    for name in ("ca", "other-ca"):
        _make(folder, name)
    for name, authority in (("member", "ca"), ("stranger", "other-ca")):
        _make(folder, name, "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key")

    def files(name, ca="ca"):
        return Tls(*(str(folder / file) for file in (f"{name}.pem", f"{name}.key", f"{ca}.pem")))

    return files


def _make(folder, name, *signed):
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    out = ("-subj", f"/CN={name}", "-days", "2", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    words = ["openssl", "req", "-x509", *key, *signed, *out]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    (folder / f"{name}.key").chmod(0o600)

"""Upstream's servers with access control or TLS, and who may do what there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from peers.java import JavaCluster
from peers.process import free_port

from cosmodrome import ClientOptions, Credentials

ADMIN = ClientOptions(credentials=Credentials("cosmoAdmin", "admin-secret"))
USER = ClientOptions(credentials=Credentials("cosmoUser", "user-secret-1"))
FORGED = ClientOptions(credentials=Credentials("cosmoUser", "a-wrong-secret"))
UNKNOWN = ClientOptions(credentials=Credentials("nobody123", "a-wrong-secret"))
ACCOUNTS = """accounts:
- accessKey: cosmoAdmin
  secretKey: admin-secret
  whiteRemoteAddress:
  admin: true
- accessKey: cosmoUser
  secretKey: user-secret-1
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: DENY
  topicPerms:
  - Open=PUB|SUB
  - Copied=PUB|SUB
  - ReadOnly=SUB
  groupPerms:
  - readers=SUB
  - cosmodrome_spark=SUB
"""


def guarded_cluster(folder: Path) -> JavaCluster:
    """Knows the accounts above and refuses everybody else; not started."""
    cluster = JavaCluster(folder, free_port(), free_port(-2, 1), settings={"aclEnable": "true"})
    cluster.prepare()
    (folder / "conf" / "plain_acl.yml").write_text(ACCOUNTS)
    return cluster


def make_certificate(folder: Path) -> Path:
    """A folder with cert.pem, for 127.0.0.1 and signed by itself, and key.pem."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("openssl is needed to make a certificate")
    folder.mkdir()
    subprocess.run(
        [
            *(tool, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={folder.name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    return folder

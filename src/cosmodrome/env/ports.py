"""Ports where servers listen unless they are told otherwise. Everybody derives from here."""

from __future__ import annotations

NAMESRV_PORT = 9876
BROKER_PORT = 10911
HEALTH_PORT = 8080  # of `cosmo up`

NAMESRV_DEFAULT = f"127.0.0.1:{NAMESRV_PORT}"
BROKER_DEFAULT = f"127.0.0.1:{BROKER_PORT}"

"""The test for loopback hosts, which only this machine can reach."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`, which is an IP address or a name.

    The only name that counts as loopback is `localhost`.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

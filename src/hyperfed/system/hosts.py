"""Which host an address is of."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address is that of this host, by the loopback."""
    try:
        return host.casefold() == "localhost" or ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def host_of(address: str) -> str:
    """Returns the host of ``host:port``, without the brackets of IPv6.

    Raises:
        ValueError: it is no such address.
    """
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    if not bare or (":" in bare and bare == host) or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, such as fl.example.org:8443")
    return bare

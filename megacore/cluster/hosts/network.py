"""Network address and interface of this host on the route to another host, and a free port.

This host needs no name. Imports only the standard library.
"""

import fcntl
import socket
import struct
from pathlib import Path

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the interface of gloo and of NCCL."""
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s24x")


def free_ports(count: int) -> list[int]:
    """Return different ports that are currently free on this host."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def free_port() -> int:
    """Return a port that is currently free on this host."""
    return free_ports(1)[0]


def local_address(peer: str) -> str:
    """Return this host's address on the route to `peer`; nothing is sent.

    Raises:
        OSError: there is no route to `peer`.
    """
    family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_to(peer: str) -> str | None:
    """Return the interface of the route to `peer`; None if none is found."""
    try:
        address = local_address(peer)
    except OSError:
        return None
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    return None if ":" in address else _routed(peer)


def interface_problem(names: str) -> str | None:
    """Return an error message if `names` are not all interfaces of this host, else None.

    Args:
        names: comma-separated names of interfaces, in the format of GLOO_SOCKET_IFNAME.
    """
    present = [name for _, name in socket.if_nameindex()]
    absent = [name for name in names.split(",") if name not in present]
    return f"it has no interface {absent[0]!r} (it has {', '.join(present)})" if absent else None


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _addresses(name: str) -> list[str]:
    addresses = [address] if (address := interface_address(name)) is not None else []
    for line in _lines("/proc/net/if_inet6"):
        fields = line.split()
        if fields[-1] == name:
            addresses.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return addresses


def _routed(peer: str) -> str | None:
    """Return the interface of the route to `peer` from the routing table.

    This finds interfaces with several addresses, of which `_addresses` returns only the first.
    """
    try:
        target = struct.unpack("<I", socket.inet_aton(socket.gethostbyname(peer)))[0]
    except OSError:
        return None
    best: tuple[int, str] | None = None
    for line in _lines("/proc/net/route")[1:]:
        name, network, _, _, _, _, _, mask, *_ = line.split()
        bits = int(mask, 16)
        if target & bits == int(network, 16) and (best is None or bits.bit_count() > best[0]):
            best = (bits.bit_count(), name)
    return None if best is None else best[1]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []

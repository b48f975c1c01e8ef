"""How this machine is reached: the address and the interface that lead to another, and a free port.

No name is needed.

Only the standard library is imported.
"""

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s24x")


def free_port() -> int:
    """A port that is free on this machine now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def local_address(peer: str) -> str:
    """This machine's address on the way to `peer`; nothing is sent.

    Raises OSError where no way leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_to(peer: str) -> str | None:
    """The interface of the route to `peer`; None where none is found."""
    try:
        own = local_address(peer)
    except OSError:
        return None
    for _, name in socket.if_nameindex():
        if own in _addresses(name):
            return name
    return None if ":" in own else _routed(peer)


def interface_problem(names: str) -> str | None:
    """Why `names`, as GLOO_SOCKET_IFNAME takes them, are no interfaces of this machine.

    None where they are.
    """
    there = [name for _, name in socket.if_nameindex()]
    absent = [name for name in names.split(",") if name not in there]
    return f"it has no interface {absent[0]!r} (it has {', '.join(there)})" if absent else None


def _addresses(name: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode()[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:  # it has none of this kind
            pass
    for line in _lines("/proc/net/if_inet6"):
        fields = line.split()
        if fields[-1] == name:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return found


def _routed(peer: str) -> str | None:
    """By the routing table: an interface may have more addresses than its first."""
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

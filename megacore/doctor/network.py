"""Names, interfaces and ports of this machine, as the other hosts and their traffic meet them."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacore.launch.hosts.network import interface_to, local_address

_SIOCGIFADDR = 0x8915
_INTERFACES = Path("/sys/class/net")


def look_at_network(peers: Mapping[str, str], interface: str) -> dict[str, Any]:
    """This machine's own name, the names of the others, its interface towards them, and two free ports.

    Args:
        peers: addresses of the other hosts, by name.
        interface: `launch.interface`.
    """
    name = socket.gethostname()
    found: dict[str, Any] = {"hostname": name, "own_addresses": resolve(name) if peers else []}
    found["peers"] = {peer: resolve(address) for peer, address in peers.items()}
    usable = [addresses[0] for addresses in found["peers"].values() if addresses and not is_loopback(addresses[0])]
    device = interface_to(usable[0]) if usable and interface == "auto" else None
    address = _route_from(usable[0]) if device is not None else None
    if peers and interface != "auto":
        device = interface.partition(",")[0]
        address = interface_address(device)
    found["interface"] = device
    found["address"] = address
    found.update(describe_interface(device) if device else {"exists": False})
    found["interfaces"] = sorted(path.name for path in _INTERFACES.iterdir()) if _INTERFACES.is_dir() else []
    found["ports"] = free_ports(2)
    return found


def resolve(name: str) -> list[str]:
    """IPv4 addresses of a name, as this machine's resolver gives them; [] where it knows none."""
    try:
        answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def is_loopback(address: str) -> bool:
    """Whether an address leads to whoever uses it."""
    return ipaddress.ip_address(address).is_loopback


def _route_from(peer: str) -> str | None:
    try:
        return local_address(peer)
    except OSError:
        return None


def interface_address(name: str) -> str | None:
    """The IPv4 address of an interface; None where it has none or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def describe_interface(name: str) -> dict[str, Any]:
    """Speed (Mbit/s, None where the driver does not tell), MTU and state of an interface."""
    place = _INTERFACES / name
    speed = _number(place / "speed")
    return {
        "exists": place.exists(),
        "speed": speed if speed is not None and speed > 0 else None,
        "mtu": _number(place / "mtu"),
        "state": _text(place / "operstate"),
    }


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # an interface that is down has no speed
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None

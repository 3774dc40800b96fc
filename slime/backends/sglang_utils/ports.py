"""Ports that stay ours between choosing them and the moment a slowly starting server listens on them."""

import errno
import random
import socket


class PortInUseError(ConnectionError):
    """A port that was asked for is taken."""


def reserve_port(host: str, port: int) -> socket.socket:
    """A bound, not listening socket: nobody is handed this port until it is closed, but a server may listen on it.

    (Linux lets two SO_REUSEADDR sockets bind one address as long as neither listens; sglang and its router set the
    option, programs that look for a free port do not get one that is bound.)
    """
    reservation = socket.socket(_family(host))
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((host, port))
    except OSError as error:
        reservation.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} on {host} is in use by another process; choose another port") from error
        raise OSError(error.errno, f"cannot bind port {port} on {host}: {error.strerror}") from error
    return reservation


def reserve_free_port(host: str, low: int = 15000, high: int = 20000, attempts: int = 200) -> socket.socket:
    """Reserves a random free port in [low, high); the number is `.getsockname()[1]`."""
    candidates = random.sample(range(low, high), min(attempts, high - low))
    for port in candidates:
        reservation = socket.socket(_family(host))
        try:
            reservation.bind((host, port))  # without SO_REUSEADDR: also refuses what somebody else has reserved
        except OSError as error:
            reservation.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return reservation
    raise PortInUseError(f"none of {len(candidates)} ports tried between {low} and {high} on {host} is free")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

"""Where the trainer ranks meet: the address of this node and a port nobody listens on."""

import ray

from slime.backends.sglang_utils.ports import reserve_free_port

MASTER_PORT_LOW, MASTER_PORT_HIGH = 20000, 21000


def get_master_addr_and_port() -> tuple[str, int]:
    """This node's address as other nodes reach it, and a random free port in [20000, 21000).

    Called on the node of trainer rank 0, inside its process, a moment before that process listens on the port.
    Raises PortInUseError if no port is free.
    """
    address = ray.util.get_node_ip_address()
    with reserve_free_port(address, MASTER_PORT_LOW, MASTER_PORT_HIGH) as reservation:
        return address, reservation.getsockname()[1]

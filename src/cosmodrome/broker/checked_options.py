"""Options of a broker that cannot work are refused before anything is built."""

from __future__ import annotations

import logging
import re

import msgspec

from cosmodrome.broker.address import parse_address
from cosmodrome.broker.operate.metrics import extra_labels
from cosmodrome.broker.role import MASTER_NAMES, SLAVE_NAME
from cosmodrome.env.options import BrokerOptions, StoreOptions
from cosmodrome.env.ports import BROKER_PORT
from cosmodrome.errors import ConfigError
from cosmodrome.layout import TOPIC_BYTES_MAX
from cosmodrome.transport.ports import HA_OFFSET, VIP_OFFSET, broker_name_of_machine
from cosmodrome.wire.names import REPLY_TOPIC_SUFFIX

log = logging.getLogger(__name__)

# Compat: Java clients take the first broker of a hash table with 16 places for the master.
BROKER_ID_ADVISED_MAX = 15

_LABEL = re.compile(r"[%|a-zA-Z0-9_.-]+\Z")


def checked_options(options: BrokerOptions, store: StoreOptions) -> BrokerOptions:
    """The options with their defaults filled in, or ConfigError."""
    if not store.store_path_root_dir:
        raise ConfigError("storePathRootDir is empty; say where the messages are kept")
    _check_ports(options.listen_port, store.ha_listen_port)
    name = options.broker_name or broker_name_of_machine()
    _check_label("brokerName", name, TOPIC_BYTES_MAX)
    _check_label(
        "brokerClusterName",
        options.broker_cluster_name,
        TOPIC_BYTES_MAX - len(REPLY_TOPIC_SUFFIX),
    )
    extra_labels(options.metrics_label)
    broker_id = _checked_id(options.broker_id, store.broker_role)
    if store.broker_role == SLAVE_NAME:
        _check_master(options, store)
    return msgspec.structs.replace(options, broker_name=name, broker_id=broker_id)


def _checked_id(broker_id: int, role: str) -> int:
    if role == SLAVE_NAME:
        if broker_id <= 0:
            raise ConfigError(
                f"brokerRole is SLAVE and brokerId is {broker_id}; give the slave an id above 0"
            )
        if broker_id > BROKER_ID_ADVISED_MAX:
            log.warning(
                "broker_id_large id=%d; a Java client may take a slave with such an id for the"
                " master; use ids up to %d",
                broker_id,
                BROKER_ID_ADVISED_MAX,
            )
        return broker_id
    if role not in MASTER_NAMES:
        raise ConfigError(
            f"brokerRole is {role!r}; use one of {', '.join((*MASTER_NAMES, SLAVE_NAME))}"
        )
    if broker_id != 0:
        # Compat: a master always has id 0, whatever its file says.
        log.warning("broker_id_ignored id=%d role=%s; a master is 0", broker_id, role)
    return 0


def _check_master(options: BrokerOptions, store: StoreOptions) -> None:
    """Whether a slave can find its master."""
    if store.ha_master_address:
        parse_address(
            "haMasterAddress",
            store.ha_master_address,
            example_port=BROKER_PORT + HA_OFFSET,
            form="host:port of the master's HA port",
        )
    elif not options.namesrv_addr:
        raise ConfigError(
            "brokerRole is SLAVE, but nothing says where its master is; set namesrvAddr to the name"
            " servers of the master, or haMasterAddress to its HA port"
        )


def _check_ports(port: int, ha_port: int) -> None:
    if not port:
        return
    if ha_port in (port, port + VIP_OFFSET):
        raise ConfigError(
            f"haListenPort is {ha_port}, which is the listenPort or the VIP port ({VIP_OFFSET:+d});"
            f" leave it out to have listenPort {HA_OFFSET:+d}"
        )
    if port + VIP_OFFSET <= 0 or (ha_port or port + HA_OFFSET) > 65_535:
        raise ConfigError(
            f"listenPort is {port}; it must leave room for the VIP port {VIP_OFFSET:+d} and the HA"
            f" port {HA_OFFSET:+d}, or be 0 for any free one"
        )


def _check_label(key: str, name: str, length_max: int) -> None:
    # The broker makes topics of these names, and a topic becomes a directory.
    if not _LABEL.match(name) or not name.strip(".") or len(name) > length_max:
        raise ConfigError(
            f"{key} is {name[:64]!r}; use 1 to {length_max} letters, digits and the characters"
            " % | _ - ."
        )

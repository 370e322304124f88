"""The one tree of exceptions.

Handlers raise `Refused`; the router alone turns exceptions into replies. A remark is
written for the person who reads it at night: what is wrong, then what to do next.
"""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """Response codes of the remoting protocol (4.9), under upstream's names."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    UPDATE_AND_CREATE_ACL_CONFIG_FAILED = 209
    DELETE_ACL_CONFIG_FAILED = 210
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED = 211
    FLOW_CONTROL = 215
    ILLEGAL_OPERATION = 604  # 5.x


class CosmodromeError(Exception):
    """Root of everything this package raises on purpose."""


class ProtocolError(CosmodromeError):
    """Bytes that break the protocol; the connection they came from is closed."""


class Refused(CosmodromeError):
    """A request answered with a code other than success."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(f"[{code}] {remark}")
        self.code = code
        self.remark = remark


class AccessDenied(Refused):
    """A request that its sender may not make."""

    def __init__(self, remark: str) -> None:
        # Compat: upstream has no code of its own for this.
        super().__init__(Code.SYSTEM_ERROR, remark)


class Unreachable(CosmodromeError):
    """No connection to a peer could be made, or it broke while a call was out."""


class TimedOut(CosmodromeError):
    """A peer did not answer in time; whether it acted is unknown."""


class ConfigError(CosmodromeError):
    """A setting is unknown, malformed or contradicts another one."""


class StoreError(CosmodromeError):
    """The store cannot do what was asked."""


class StoreCorrupt(StoreError):
    """Bytes on disk are not what this store wrote; names the file and the position."""


class StoreUnwritable(StoreError):
    """Appends are refused for now or for good (disk full, failed sync, stopped, slave)."""


class StoreBusy(StoreUnwritable):
    """Appends are refused for a moment: something is full or not ready yet; send again."""


class MessageTooLarge(StoreError):
    """A message breaks a limit of the record format or of `maxMessageSize`."""


class DirectoryInUse(StoreError):
    """Another process holds the lock of this store directory."""


class ConsensusError(CosmodromeError):
    """The consensus engine did not do what was asked, or did not say so."""


class ConsensusUnavailable(ConsensusError):
    """No endpoint answered. A transaction was not begun; a read may be repeated at once."""


class ResultUnknown(ConsensusError):
    """The answer to a transaction was lost: read again before anything else.

    It may be applied, not applied, or applied later than the next read. Only another change of a
    key that it compared rules it out.
    """


class ConsensusRefused(ConsensusError):
    """The engine answered and did nothing; the same request fails until somebody changes something:
    account, rights, version, settings or the request itself."""


class LeaseGone(ConsensusError):
    """The lease expired or was revoked, and its keys went with it; ask for another one."""


# What peers may be told of a failure: the log has the rest, and they need not know where this
# machine keeps its files.


def reason_of(error: BaseException) -> str:
    """Why it failed, without the path that an OSError names."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def name_of(path: str) -> str:
    """A file by its folder and its own name, `commitlog/00000000000000000000`."""
    return "/".join(path.replace("\\", "/").rsplit("/", 2)[-2:])

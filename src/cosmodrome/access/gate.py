"""The gate: who may do what, asked once for every request before its handler runs.

With access control (`aclEnable`) a request passes when it is signed with the secret of an account
that has what its row needs. The order is upstream's: global white addresses, the account, the
account's white addresses, the signature, the rights. Three things differ from upstream:

- every code of both servers is checked, not only a few of the broker;
- white addresses spare the signature of requests about messages only, never of those for peers
  and administrators; an account's white address does not spare its rights;
- peers that cannot sign are admitted by address (`peerAddresses`), for what peers need only.

Without access control, a server that listens on more than loopback is in protected mode: what
changes or shows its configuration is served to this machine only, and what peers need to this
machine and to `peerAddresses`.
"""

from __future__ import annotations

import hmac
import logging
import os.path
from collections.abc import Callable, Mapping
from typing import Any

from cosmodrome.access.account_table import Accounts
from cosmodrome.access.accounts import EVERYTHING, Account
from cosmodrome.access.addresses import Addresses, is_loopback
from cosmodrome.env.base import Env
from cosmodrome.env.options import AccessOptions
from cosmodrome.errors import AccessDenied, ConfigError
from cosmodrome.layout import ACCESS_KEY, SIGNATURE
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.needs import Group, Level, Needs, Resource, Right, Topic
from cosmodrome.wire.signature import signature
from cosmodrome.wire.table import Call, Command

log = logging.getLogger(__name__)

ACCOUNT_FILE = "plain_acl.yml"
NAME_CHARACTERS_MAX = 128

Row = type[Command[Any]]
# The topic of the message at a log offset. None: there is no message. UNPROVEN: what is there looks
# like a message, but no queue has it. It may be part of a body, so its word cannot be taken.
TopicAt = Callable[[int], str | None]
UNPROVEN = ""


class Gate:
    """`is_local` says whether a host is this machine. `topic_at` is the store's."""

    def __init__(
        self,
        server: str,
        options: AccessOptions,
        accounts: Accounts,
        is_local: Callable[[str], bool],
        topic_at: TopicAt,
    ) -> None:
        self.enabled = options.acl_enable
        on_network = not self.enabled and not is_loopback(options.bind_address)
        self.protected = on_network and options.protected_mode
        self._open = on_network and not options.protected_mode
        self._bind_address = options.bind_address
        self.accounts = accounts
        self._server = server
        self._peers = Addresses([options.peer_addresses])
        self._is_local = is_local
        self._topic_at = topic_at

    async def start(self) -> None:
        """ConfigError when access control is on and there are no accounts to go by."""
        if self.enabled:
            await self.accounts.start()
        elif self.protected:
            log.info(
                "protected_mode server=%r bind=%s; the configuration is served to this machine"
                " only, see docs/security.md",
                self._server,
                self._bind_address,
            )
        elif self._open:
            log.warning(
                "NO ACCESS CONTROL server=%r bind=%s; protectedMode is off, so everybody who"
                " reaches this port can change its configuration, read every message and delete"
                " topics. Set aclEnable=true, or bindAddress=127.0.0.1",
                self._server,
                self._bind_address,
            )

    async def stop(self) -> None:
        await self.accounts.stop()

    # --- what the fast lane asks -------------------------------------------------------------

    def account(self, access_key: str) -> Account | None:
        return self.accounts.get(access_key)

    def passes_unsigned(self, host: str) -> bool:
        """Whether requests about messages need neither account nor signature from there."""
        return self.accounts.white.has(host)

    def grants(self, access_key: str, row: Row, ask: object) -> bool:
        """Whether an account has the rights to all that a request about messages touches; `ask`
        needs the fields only by which the row finds that."""
        account = self.account(access_key)
        needs = row.needs
        if account is None or needs is None or needs.level is not Level.KNOWN:
            return False
        try:
            self._check_rights(row, needs, account, ask)
        except AccessDenied:
            return False
        return True

    # --- what handlers ask -------------------------------------------------------------------

    def account_of(self, call: Call) -> str:
        """The access key that a request about messages got in with, "" when it needed none."""
        asked = self.enabled and not self.passes_unsigned(call.connection.peer[0])
        return call.frame.ext.get(ACCESS_KEY, "") if asked else ""

    def may_get(self, host: str, access_key: str, *resources: Resource) -> bool:
        """Whether a client may be told now, unasked, about all of these. It is at `host`, and its
        last heartbeat got in with `access_key`."""
        if not self.enabled or self.passes_unsigned(host):
            return True
        account = self.account(access_key)
        return account is not None and not any(
            resource.right & ~self._right(account, resource)[2] for resource in resources
        )

    # --- what the router asks ----------------------------------------------------------------

    def check(self, row: Row, ask: Command[Any], frame: Frame, peer: tuple[str, int]) -> None:
        """AccessDenied unless the request may be served; what it says is meant for the peer."""
        needs = row.needs
        assert needs is not None, f"{row.describe()} does not say what it needs"
        if self.enabled:
            self._check_account(row, needs, ask, frame, peer[0])
        elif self.protected and needs.level is not Level.KNOWN:
            self._check_address(row, needs, peer[0])

    def denies_peer(self, host: str, access_key: str, signed: bytes, found: str) -> str:
        """Why a peer that speaks another protocol may not come in, "" when it may. It signed a text
        of its own with its account, or has none."""
        if self._peers.has(host) or not (self.enabled or self.protected):
            return ""
        if self.protected:
            local = self._is_local(host)
            return "" if local else f"{host} is not listed, and this {self._server} is protected"
        account = self.account(access_key)
        if account is None:
            return f"{access_key[:NAME_CHARACTERS_MAX]!r} is no account of this {self._server}"
        if not _is_signature(account, {}, signed, found):
            return f"the signature of account {account.access_key!r} is wrong"
        if not (account.peer or account.admin):
            return f"account {account.access_key!r} is no peer of this cluster"
        return ""

    def admits_peers_at(self, host: str) -> bool:
        """Whether a peer at this host can come in at all; `denies_peer` may still say no."""
        return not self.protected or self._peers.has(host) or self._is_local(host)

    def _check_address(self, row: Row, needs: Needs, host: str) -> None:
        if self._is_local(host) or (needs.level is Level.PEER and self._peers.has(host)):
            return
        listed = f"add {host} to peerAddresses, " if needs.level is Level.PEER else ""
        raise AccessDenied(
            f"{row.describe()} is refused: this {self._server} is in protected mode, because it"
            " listens on a network without access control. Ask from its own machine,"
            f" {listed}switch access control on (aclEnable=true, see docs/security.md), bind it"
            " to 127.0.0.1 (bindAddress), or set protectedMode=false on a network that you trust."
        )

    def _check_account(
        self, row: Row, needs: Needs, ask: Command[Any], frame: Frame, host: str
    ) -> None:
        about_messages = needs.level is Level.KNOWN
        if self.passes_unsigned(host) if about_messages else self._is_listed_peer(needs, host):
            return
        account = self._signer(row, frame, host, white_counts=about_messages)
        if needs.level is Level.ADMIN and not account.admin:
            raise _denied(row, account, "is no administrator", "set admin: true for it")
        if needs.level is Level.PEER and not (account.peer or account.admin):
            raise _denied(row, account, "is no peer of this cluster", "set peer: true for it")
        self._check_rights(row, needs, account, ask)

    def _is_listed_peer(self, needs: Needs, host: str) -> bool:
        return needs.level is Level.PEER and self._peers.has(host)

    def _signer(self, row: Row, frame: Frame, host: str, *, white_counts: bool) -> Account:
        access_key = frame.ext.get(ACCESS_KEY)
        if not access_key:
            raise AccessDenied(
                f"{row.describe()} has no credentials, and this {self._server} has access control;"
                " give the client the access key and secret key of an account."
            )
        account = self.account(access_key)
        if account is None:
            raise AccessDenied(
                f"{row.describe()}: there is no account {access_key[:NAME_CHARACTERS_MAX]!r} at"
                f" this {self._server}; check the access key, or add the account to"
                f" {ACCOUNT_FILE}."
            )
        if white_counts and account.white.has(host):
            return account
        if not _is_signature(account, frame.ext, frame.body, frame.ext.get(SIGNATURE, "")):
            raise AccessDenied(
                f"{row.describe()}: the signature of account {account.access_key!r} is wrong;"
                " check the secret key of the client."
            )
        return account

    def _check_rights(self, row: Row, needs: Needs, account: Account, ask: object) -> None:
        if needs.resources is not None:
            for resource in needs.resources(ask):
                self._check_right(row, account, resource)

    def _check_right(self, row: Row, account: Account, resource: Resource) -> None:
        kind, name, has = self._right(account, resource)
        if resource.right & ~has and name == UNPROVEN:
            raise AccessDenied(
                f"{row.describe()}: no queue has the message that account {account.access_key!r}"
                " asks for, so it is not known whose it is: its topic was deleted, or no message"
                " begins at that log offset. An administrator can ask for it."
            )
        if resource.right & ~has:
            right = Right(resource.right & ~has).name
            raise _denied(
                row,
                account,
                f"has no right {right} to {kind} {name[:NAME_CHARACTERS_MAX]!r}",
                f"add {name[:NAME_CHARACTERS_MAX]}={right} to its {kind}Perms",
            )

    def _right(self, account: Account, resource: Resource) -> tuple[str, str, Right]:
        """Kind and name of what it is, and the right that the account has to it."""
        if isinstance(resource, Group):
            return "group", resource.name, account.group_right(resource.name)
        if isinstance(resource, Topic):
            return "topic", resource.name, account.topic_right(resource.name)
        topic = self._topic_at(resource.log_offset)
        if topic is None:  # no message, so nothing to protect: the handler says that there is none
            return "topic", UNPROVEN, resource.right
        if topic == UNPROVEN:
            return "topic", UNPROVEN, EVERYTHING if account.unlimited else Right.NONE
        return "topic", topic, account.topic_right(topic)


def build_gate(
    server: str,
    options: AccessOptions,
    config_dir: str,
    env: Env,
    *,
    is_local: Callable[[str], bool],
    topic_at: TopicAt = lambda log_offset: None,
) -> Gate:
    """`config_dir` is where the account file is unless `aclFile` says otherwise."""
    try:
        accounts = Accounts(options.acl_file or os.path.join(config_dir, ACCOUNT_FILE), env)
        return Gate(server, options, accounts, is_local, topic_at)
    except ConfigError as error:
        raise ConfigError(f"peerAddresses: {error}") from None


def _is_signature(account: Account, ext: Mapping[str, str], body: bytes, found: str) -> bool:
    expected = signature(account.secret, ext, body).encode()
    return hmac.compare_digest(expected, found.encode(errors="replace"))


def _denied(row: Row, account: Account, why: str, remedy: str) -> AccessDenied:
    return AccessDenied(
        f"{row.describe()}: account {account.access_key!r} {why}; an administrator can"
        f" {remedy} (`cosmo acl set`)."
    )

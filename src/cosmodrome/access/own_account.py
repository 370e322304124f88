"""The account of a broker itself: it signs what the broker asks name servers and its master."""

from __future__ import annotations

from collections.abc import Callable

from cosmodrome.access.account_table import Accounts
from cosmodrome.env.options import BrokerOptions
from cosmodrome.wire import signature
from cosmodrome.wire.frame import Frame


class OwnAccount:
    """`brokerAccessKey` with its secret, which may stand in the broker's own account file. Without
    the setting it is the first account there that belongs to a peer. It may be none."""

    def __init__(self, options: BrokerOptions, accounts: Accounts) -> None:
        self._access_key = options.broker_access_key
        self._secret = options.broker_secret_key.encode()
        self._accounts = accounts

    def sign(self, frame: Frame) -> None:
        """Sign a request, if there is an account to sign it with."""
        pair = self._pair()
        if pair is not None:
            signature.sign(frame, *pair)

    def signature(self, text: Callable[[str], bytes]) -> tuple[str, str] | None:
        """Access key, and signature of the text that is made with it, if there is an account."""
        pair = self._pair()
        if pair is None:
            return None
        access_key, secret = pair
        return access_key, signature.signature(secret, {}, text(access_key))

    def _pair(self) -> tuple[str, bytes] | None:
        if self._access_key and self._secret:
            return self._access_key, self._secret
        if self._access_key:
            account = self._accounts.get(self._access_key)
        else:
            peers = (account for account in self._accounts.all.values() if account.peer)
            account = next(peers, None)
        return None if account is None else (account.access_key, account.secret)

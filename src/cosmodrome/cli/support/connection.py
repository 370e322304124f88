"""How commands connect to a cluster: with TLS when flags, environment or the context say so.

The flags stand before the command (`cosmo --tls-ca ca.pem topic list`), so that every command has
them. They win over what a context with the same name servers says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cosmodrome.errors import ConfigError

if TYPE_CHECKING:  # every command loads this module, and some are to start fast
    import ssl

    from cosmodrome.client.options import ClientOptions

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class TlsChoice:
    """Whether and how to use TLS; any file switches it on."""

    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_no_verify: bool = False

    @property
    def wanted(self) -> bool:
        return self != TlsChoice()


def tls_options(*, environment: bool) -> Callable[[F], F]:
    """The fields of `TlsChoice` as flags; with `environment`, COSMO_TLS_CA and its like too."""

    def add(command: F) -> F:
        for flag, kind, text in (
            ("--tls-no-verify", True, "Use TLS and accept any certificate of a server."),
            ("--tls-key", False, "PEM file with the key of --tls-cert."),
            ("--tls-cert", False, "PEM file with the certificate to show to servers."),
            (
                "--tls-ca",
                False,
                "PEM file of the authorities that sign the certificates of servers.",
            ),
            ("--tls", True, "Connect with TLS."),
        ):
            name = flag.removeprefix("--").replace("-", "_")
            more: dict[str, Any] = {"is_flag": True} if kind else {"metavar": "FILE"}
            variable = f"COSMO_{name.upper()}" if environment else None
            command = click.option(
                flag, help=text, envvar=variable, show_envvar=environment, **more
            )(command)
        return command

    return add


def client_options(namesrv: str, **changes: Any) -> ClientOptions:
    """Options of a client that calls these name servers."""
    from cosmodrome.cli.support import context
    from cosmodrome.client.options import ClientOptions

    choice = _chosen()
    if not choice.wanted:
        choice = context.tls_of(namesrv)
    return ClientOptions(tls=_context(choice) if choice.wanted else None, **changes)


def _chosen() -> TlsChoice:
    """What stands before the command."""
    here = click.get_current_context(silent=True)
    words = {} if here is None else here.find_root().params
    names = (field.name for field in dataclasses.fields(TlsChoice))
    return TlsChoice(**{name: words[name] for name in names if words.get(name)})


@functools.cache  # clients share connections only when their options are equal
def _context(choice: TlsChoice) -> ssl.SSLContext:
    import ssl

    try:
        context = ssl.create_default_context(cafile=choice.tls_ca)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-ca {choice.tls_ca}: {error}; name a PEM file with certificates"
        ) from None
    if choice.tls_no_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if choice.tls_cert is not None:
        try:
            context.load_cert_chain(choice.tls_cert, choice.tls_key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {choice.tls_cert} --tls-key {choice.tls_key}: {error}; name PEM files"
                " that belong together"
            ) from None
    elif choice.tls_key is not None:
        raise ConfigError("--tls-key needs the certificate of that key: add --tls-cert")
    return context

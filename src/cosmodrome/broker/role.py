"""What a broker does for its clients: a master takes messages, a slave serves what it has.

Services keep the `Role` and ask it whenever it matters; none of them keeps its answer.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import Code, Refused

SLAVE_NAME: Final = "SLAVE"
SYNC_MASTER_NAME: Final = "SYNC_MASTER"
MASTER_NAMES: Final = ("ASYNC_MASTER", SYNC_MASTER_NAME)


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    takes_sends: bool  # and changes of tables; delivers what waited, asks about transactions

    def check_takes_changes(self, what: str) -> None:
        """Refused on a slave, which cannot do `what`."""
        if not self.takes_sends:
            raise Refused(
                Code.SYSTEM_ERROR, f"This broker is a slave and cannot {what}; ask its master."
            )


MASTER: Final = Role(takes_sends=True)
SLAVE: Final = Role(takes_sends=False)


def role_of(options: StoreOptions) -> Role:
    """The role that the setting `brokerRole` names."""
    return SLAVE if options.broker_role == SLAVE_NAME else MASTER

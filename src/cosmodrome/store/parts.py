"""The parts of an open store, for those who look after several of them."""

from __future__ import annotations

import dataclasses

from cosmodrome.store.commit_log.flush import Flush
from cosmodrome.store.commit_log.log import Log
from cosmodrome.store.dispatch import Dispatch
from cosmodrome.store.index import Index
from cosmodrome.store.queue import Queues


@dataclasses.dataclass(frozen=True, slots=True)
class StoreParts:
    log: Log
    flush: Flush
    dispatch: Dispatch
    queues: Queues
    index: Index | None

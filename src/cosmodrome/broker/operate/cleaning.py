"""Clean-ups that an administrator starts by hand; by itself the broker does them later."""

from __future__ import annotations

from cosmodrome.broker.members.topics import Topics
from cosmodrome.store.store import Store
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.wire.commands.broker import CleanExpiredConsumequeue, DeleteExpiredCommitlog
from cosmodrome.wire.commands.topic import CleanUnusedTopic
from cosmodrome.wire.names import TIMER_TOPIC
from cosmodrome.wire.table import Call, Reply


class Cleaning:
    def __init__(self, store: Store, topics: Topics) -> None:
        self._store = store
        self._topics = topics

    @DeleteExpiredCommitlog.handler
    def delete_expired_log(self, ask: DeleteExpiredCommitlog, call: Call) -> Reply:
        audited(call, "expired_log_cleaned")
        self._store.delete_expired()
        return Reply()

    @CleanExpiredConsumequeue.handler
    def clean_expired_queues(self, ask: CleanExpiredConsumequeue, call: Call) -> Reply:
        # Upstream also drops queues whose messages are all gone and starts their offsets again
        # at 0; a group with an older offset could then skip messages. Here a queue keeps its end.
        audited(call, "queues_cleaned")
        self._store.clean_queues()
        return Reply()

    @CleanUnusedTopic.handler
    def clean_unused_topics(self, ask: CleanUnusedTopic, call: Call) -> Reply:
        """Drop the queues of topics that nobody knows, for example after a restored table."""
        unused = [name for name in self._store.queues() if not self._is_used(name)]
        for name in unused:
            self._store.delete_topic(name)
        audited(call, "unused_topics_cleaned", dropped=unused)
        return Reply()

    def _is_used(self, name: str) -> bool:
        # The broker keeps messages of its own in topics without a row in the table.
        if name == TIMER_TOPIC or self._topics.is_system(name):
            return True
        return self._topics.get(name) is not None

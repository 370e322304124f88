"""What a consumer wants of a topic: everything, some tags, or what an expression selects."""

from __future__ import annotations

import dataclasses

from cosmodrome.client.instance import Instance
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import ConfigError, Unreachable
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    EVERYTHING,
    MASTER_ID,
    SQL92,
    TAG,
    CheckClientRequestBody,
    SubscriptionData,
)
from cosmodrome.wire.commands.client import CheckClientConfig

TAGS_SEPARATOR = "||"


@dataclasses.dataclass(frozen=True, slots=True)
class Subscription:
    """`topic` is the full name; a broker replaces a subscription by one with a later version."""

    topic: str
    version: int
    expression: str = EVERYTHING
    kind: str = TAG
    tags: frozenset[str] = frozenset()  # empty: whatever the broker sent

    @classmethod
    def of(
        cls, topic: str, version: int, *, tags: str | None = None, sql: str | None = None
    ) -> Subscription:
        if sql is not None:
            if tags is not None:
                raise ConfigError(f"topic {topic}: give tags or sql, not both")
            if not sql.strip():
                raise ConfigError(f"topic {topic}: the SQL expression is empty; leave it out")
            return cls(topic, version, sql, SQL92)
        text = (tags or "").strip()
        if text in ("", EVERYTHING):
            return cls(topic, version)
        names = list(dict.fromkeys(tag.strip() for tag in text.split(TAGS_SEPARATOR)))
        names = [name for name in names if name]
        if not names:
            raise ConfigError(f"topic {topic}: no tag in {tags!r}; write for example 'A || B'")
        return cls(topic, version, text, TAG, frozenset(names))

    def data(self) -> SubscriptionData:
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.expression,
            sub_version=self.version,
            expression_type=self.kind,
            tags_set=sorted(self.tags),
        )

    def wants(self, message: ReceivedMessage) -> bool:
        """Brokers compare hashes of tags, and different tags may share one."""
        return not self.tags or message.tags in self.tags


async def check(instance: Instance, group: str, subscription: Subscription) -> None:
    """Let a broker of the topic check an SQL expression; Refused says what is wrong with it."""
    if subscription.kind == TAG:
        return
    route = await instance.routes.get(subscription.topic)
    body = CheckClientRequestBody(
        client_id=instance.client_id, group=group, subscription_data=subscription.data()
    )
    failure: Unreachable | None = None
    for name in route.addresses:
        address = instance.routes.address(name, MASTER_ID) or instance.routes.address(name, 1)
        if address is None:
            continue
        try:
            await instance.links.call(address, CheckClientConfig(body=bodies.encode(body)))
            return
        except Unreachable as error:
            failure = error
    raise failure or Unreachable(f"topic {subscription.topic} has no broker that could be asked")

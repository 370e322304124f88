"""Single requests about a queue: its bounds, offsets by time, and who is in a group.

Queues carry full topic names here.
"""

from __future__ import annotations

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.engine.progress import broker_address
from cosmodrome.client.routes import Route
from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import CosmodromeError, ProtocolError, Unreachable
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import GetConsumerListByGroupResponseBody
from cosmodrome.wire.commands.client import GetConsumerListByGroup
from cosmodrome.wire.commands.offset import GetMaxOffset, GetMinOffset, SearchOffsetByTimestamp

MEMBERS_MAX = 65_536  # every member computes the shares of all


async def queue_address(instance: Instance, queue: MessageQueue) -> str:
    """Where to ask about a queue: the master, or a slave while there is none."""
    routes = instance.routes
    try:
        return broker_address(routes, queue.broker_name)
    except Unreachable:
        # A queue that the user named: its topic may not have been asked for yet.
        route = await routes.get(queue.topic, fresh=True)
    if queue.broker_name not in route.addresses:
        raise Unreachable(
            f"topic {queue.topic} has no queue on broker {queue.broker_name!r}; its"
            f" brokers are {', '.join(sorted(route.addresses)) or 'none'}"
        )
    return broker_address(routes, queue.broker_name)


async def begin_offset(instance: Instance, queue: MessageQueue) -> int:
    """Offset of the oldest message that is kept."""
    command = GetMinOffset(topic=queue.topic, queue_id=queue.queue_id)
    return (await instance.links.call(await queue_address(instance, queue), command)).offset


async def end_offset(instance: Instance, queue: MessageQueue) -> int:
    """Offset that the next message will have."""
    command = GetMaxOffset(topic=queue.topic, queue_id=queue.queue_id)
    return (await instance.links.call(await queue_address(instance, queue), command)).offset


async def offset_at(instance: Instance, queue: MessageQueue, when_ms: int) -> int:
    """Offset of the first message that was stored at or after a time."""
    command = SearchOffsetByTimestamp(topic=queue.topic, queue_id=queue.queue_id, timestamp=when_ms)
    return (await instance.links.call(await queue_address(instance, queue), command)).offset


async def members_of(group: str, instance: Instance, route: Route) -> list[str]:
    """The client ids of a group; any broker of the topic knows them."""
    names = list(route.addresses)
    instance.env.random.shuffle(names)
    failure: CosmodromeError | None = None
    for name in names:
        try:
            reply = await instance.links.call(
                broker_address(instance.routes, name), GetConsumerListByGroup(consumer_group=group)
            )
            found = bodies.decode(GetConsumerListByGroupResponseBody, reply.body).consumer_id_list
            if len(found) > MEMBERS_MAX:
                raise ProtocolError(
                    f"broker {name} says that group {group} has {len(found)} members; queues are"
                    f" shared among at most {MEMBERS_MAX}"
                )
            return found
        except CosmodromeError as error:
            failure = error
    raise failure or Unreachable(f"topic {route.topic} has no brokers")

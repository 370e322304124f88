"""Values as message bodies: JSON by type, protocol buffers, text, or functions of the user's.

    message = message_of("orders", Order(id=7))           # JSON, with its content type
    order = value_of(received, Order)                      # checked against the type

Types may be msgspec structs, dataclasses, typed dicts, plain containers, or pydantic models.
Neither pydantic nor protobuf is imported here; their types are recognised by their methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from cosmodrome.client.values import Message, ReceivedMessage
from cosmodrome.errors import ConfigError, CosmodromeError

T = TypeVar("T")

CONTENT_TYPE = "content-type"


class Undecodable(CosmodromeError):
    """A body is not what the type asks for; coming again will not change that."""


class Serializer(Protocol):
    """How values become bodies and back. `content_type` goes with the message."""

    @property
    def content_type(self) -> str: ...

    def encode(self, value: Any) -> bytes: ...

    def decode(self, data: bytes, kind: Any) -> Any:
        """Any exception means that the data is not of that kind."""


class Json:
    content_type = "application/json"

    def encode(self, value: Any) -> bytes:
        dump = getattr(value, "model_dump_json", None)
        if dump is not None:  # a pydantic model
            text: str = dump()
            return text.encode()
        return msgspec.json.encode(value)

    def decode(self, data: bytes, kind: Any) -> Any:
        validate = getattr(kind, "model_validate_json", None)
        if validate is not None:
            return validate(data)
        return msgspec.json.decode(data, type=kind)


class Text:
    content_type = "text/plain"

    def encode(self, value: Any) -> bytes:
        return str(value).encode()

    def decode(self, data: bytes, kind: Any) -> Any:
        return data.decode() if kind is str else kind(data.decode())


class Protobuf:
    """Generated message classes: their own methods do the work."""

    content_type = "application/protobuf"

    def encode(self, value: Any) -> bytes:
        data: bytes = value.SerializeToString()
        return data

    def decode(self, data: bytes, kind: Any) -> Any:
        return kind.FromString(data)


class Custom:
    """Two functions, for example of an Avro library with its schema bound to them."""

    def __init__(
        self,
        content_type: str,
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes, Any], Any],
    ) -> None:
        self.content_type = content_type
        self._encode = encode
        self._decode = decode

    def encode(self, value: Any) -> bytes:
        return self._encode(value)

    def decode(self, data: bytes, kind: Any) -> Any:
        return self._decode(data, kind)


JSON = Json()
TEXT = Text()
PROTOBUF = Protobuf()


def message_of(topic: str, value: Any, *, serializer: Serializer = JSON, **options: Any) -> Message:
    """A message whose body is the value. `options` are those of `Message`."""
    try:
        body = serializer.encode(value)
    except Exception as error:
        raise ConfigError(
            f"a {type(value).__name__} cannot become {serializer.content_type}: {error}"
        ) from error
    message = Message(topic, body, **options)
    message.properties.setdefault(CONTENT_TYPE, serializer.content_type)
    return message


def value_of(
    message: ReceivedMessage, kind: type[T] | Any, *, serializer: Serializer = JSON
) -> T | Any:
    """The body as a value of that type; Undecodable says which message and why."""
    try:
        return serializer.decode(message.body, kind)
    except Exception as error:
        name = getattr(kind, "__name__", str(kind))
        declared = message.properties.get(CONTENT_TYPE)
        differs = declared and declared != serializer.content_type
        hint = f" (it says it is {declared})" if differs else ""
        raise Undecodable(
            f"message {message.msg_id} of {message.topic} is no {name} in"
            f" {serializer.content_type}{hint}: {error}"
        ) from error

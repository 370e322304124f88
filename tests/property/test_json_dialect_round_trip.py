"""Whatever the dialect can write it reads back; whatever it is fed it answers or refuses."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cosmodrome.errors import ProtocolError
from cosmodrome.wire import fastjson, properties_text
from cosmodrome.wire.fastjson import ObjectKey

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = texts.filter(lambda name: name not in ("$ref", "@type"))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
object_keys = st.builds(
    ObjectKey.of,
    st.dictionaries(names, scalars | st.lists(scalars, max_size=2), max_size=3),
)
keys = names | st.integers(-(2**31), 2**31) | object_keys
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(values, st.booleans())
def test_round_trip(value: Any, pretty: bool) -> None:
    assert fastjson.loads(fastjson.dumps(value, pretty=pretty)) == value


@given(st.text('{}[]:,"01.e-\\ $reftnul', max_size=40) | st.binary(max_size=40))
def test_garbage_is_read_or_refused(text: str | bytes) -> None:
    try:
        value = fastjson.loads(text)
    except ProtocolError:
        return
    assert fastjson.loads(fastjson.dumps(value)) == value


@given(st.dictionaries(texts, texts, max_size=5))
def test_settings_round_trip(settings: dict[str, str]) -> None:
    assert properties_text.loads(properties_text.dumps(settings)) == settings


@given(st.text("\\u0n=:#! \t\r\nabc", max_size=40))
def test_settings_garbage_is_read_or_refused(text: str) -> None:
    try:
        settings = properties_text.loads(text)
    except ProtocolError:
        return
    assert properties_text.loads(properties_text.dumps(settings)) == settings

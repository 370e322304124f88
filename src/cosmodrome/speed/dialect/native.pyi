from typing import Any

from cosmodrome.speed.dialect.pure import Reference

def read(text: str) -> tuple[Any, list[Reference]]: ...

from collections.abc import Iterator

from cosmodrome.speed.core.pure import QueueEnd as QueueEnd
from cosmodrome.speed.core.pure import Run
from cosmodrome.speed.core.pure import Tail as Tail
from cosmodrome.speed.core.pure import chain as chain
from cosmodrome.speed.core.pure import decode_header as decode_header
from cosmodrome.speed.core.pure import encode_header as encode_header
from cosmodrome.speed.core.pure import encode_record as encode_record
from cosmodrome.speed.core.pure import gather as gather
from cosmodrome.speed.core.pure import gather_next as gather_next
from cosmodrome.speed.core.pure import java_hash as java_hash
from cosmodrome.speed.core.pure import key_hash as key_hash
from cosmodrome.speed.core.pure import select as select
from cosmodrome.speed.core.pure import spread as spread
from cosmodrome.speed.core.pure import walk as walk

class Runs:
    """Runs as the compiled lane makes them: `spread` knows their queues without looking them up."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Run]: ...
    def put_back(self) -> None: ...

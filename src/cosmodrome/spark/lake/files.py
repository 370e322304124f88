"""Small files beside a lake, on whatever file system Spark reaches: local, HDFS, object stores.

Everything goes through the JVM's Hadoop classes, so a path means the same here as in
`spark.read`. Names are relative to the root. On the local file system the checksum layer is
left out: its second file cannot be renamed together with the first, and a crash in between would
make a good file unreadable. On other file systems a plain rename fails when the target exists;
Hadoop's FileContext replaces the target, on HDFS in one step.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from cosmodrome.errors import ConfigError, StoreCorrupt, StoreError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SMALL_BYTES_MAX = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    name: str
    is_dir: bool
    size_bytes: int


class LakeFiles:
    """The directory `root` as Hadoop sees it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        if not root.strip():
            raise ConfigError("the path of the archive is empty")
        self.spark = spark
        session: Any = spark
        try:
            self._jvm: Any = session._jvm
            conf = session._jsparkSession.sessionState().newHadoopConf()
        except Exception:
            raise ConfigError(
                "an archive needs a session that owns its driver; Spark Connect does not give"
                " access to files: use cosmodrome.spark.runtime.session()"
            ) from None
        path = self._jvm.org.apache.hadoop.fs.Path(root)
        files = path.getFileSystem(conf)
        self.root = str(files.makeQualified(path).toString())
        self._context: Any = None
        if files.getScheme() == "file":
            files = files.getRawFileSystem()
        else:
            self._context = self._file_context(path, conf)
        self._files: Any = files

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._path(name)))

    def list(self, name: str = "") -> list[Entry]:
        """What is in a directory, sorted by name; empty when there is no such directory."""
        path = self._path(name)
        if not self._files.exists(path):
            return []
        found = [
            Entry(str(s.getPath().getName()), bool(s.isDirectory()), int(s.getLen()))
            for s in self._files.listStatus(path)
        ]
        return sorted(found, key=lambda entry: entry.name)

    def size_bytes(self, name: str) -> int:
        """Of everything below a directory."""
        return int(self._files.getContentSummary(self._path(name)).getLength())

    def read(self, name: str) -> str | None:
        """The text of a small file; None when there is none."""
        path = self._path(name)
        if not self._files.exists(path):
            return None
        if int(self._files.getFileStatus(path).getLen()) > _SMALL_BYTES_MAX:
            raise StoreCorrupt(f"{self.path(name)} is larger than any file of ours")
        stream = self._files.open(path)
        try:
            return bytes(stream.readAllBytes()).decode("utf-8", "replace")
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Write all of the text under the name, or nothing."""
        fresh = self._path(f"{name}.tmp")
        stream = self._files.create(fresh, True)
        try:
            stream.write(bytearray(text.encode()))
            stream.hsync()
        finally:
            stream.close()
        self._replace(fresh, self._path(name))

    def read_json(self, name: str) -> Any:
        """The document in a file; None when there is no file."""
        text = self.read(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise StoreCorrupt(f"{self.path(name)} is not JSON: {error}") from None

    def write_json(self, name: str, document: object) -> None:
        self.write(name, json.dumps(document, indent=1, sort_keys=True) + "\n")

    def move(self, name: str, to: str) -> None:
        target = self._path(to)
        self._files.mkdirs(target.getParent())
        self._moved(self._path(name), target)

    def remove(self, name: str) -> None:
        """A file, or a directory with everything below; nothing happens when it is not there."""
        path = self._path(name)
        if not self._files.delete(path, True) and self._files.exists(path):
            raise StoreError(f"{self.path(name)} cannot be removed; check its permissions")

    def _replace(self, fresh: Any, target: Any) -> None:
        if self._context is not None:
            rename = self._jvm.org.apache.hadoop.fs.Options.Rename
            choices = self.spark.sparkContext._gateway.new_array(rename, 1)  # type: ignore[union-attr]
            choices[0] = rename.OVERWRITE
            self._context.rename(fresh, target, choices)
        elif not self._files.rename(fresh, target):
            self._files.delete(target, False)
            self._moved(fresh, target)

    def _file_context(self, path: Any, conf: Any) -> Any:
        """None where the file system has none: then a replaced file is missing for a moment."""
        try:
            return self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(path.toUri(), conf)
        except Exception:  # of Java: no class is set for this scheme
            return None

    def _moved(self, path: Any, target: Any) -> None:
        if not self._files.rename(path, target):
            raise StoreError(f"{path.toString()} cannot be renamed to {target.toString()}")

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.path(name))

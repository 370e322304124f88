"""The real RocketMQ on the Java side: class paths, a name server with a broker, `mqadmin`.

    with JavaCluster(tmp_path, free_port(), free_port(-2, 1)) as cluster:
        ... cluster.namesrv_address, cluster.broker_address ...

Artifact sets are the folders of `peers/java` that hold a `pom.xml`: `client` (client library and
admin tools, 4.9.8), `server` (name server and broker, 4.9.7) and `server53` (the same, 5.3.3).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.process import Process, Running, accepts
from peers.raw import clusters
from peers.resolve import BUILD, SOURCES, make_once, require, run_with_tries

_CLASS_PATH_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:build-classpath"
_JAVA_SOURCES = SOURCES / "java" / "src" / "cosmodrome" / "peers"

# Versions this old reach into the JDK to unmap files and to sign the certificate of their TLS test
# mode; a newer JDK asks to be told.
_OPEN_JDK = [
    f"--add-{verb}=java.base/{package}=ALL-UNNAMED"
    for verb in ("exports", "opens")
    for package in ("java.nio", "sun.nio.ch", "jdk.internal.ref", "sun.security.x509")
]
_SMALL_JVM = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
SERVER_HEAP = ["-Xms256m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m"]

_LOGBACK = """<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d{HH:mm:ss.SSS} %-5level %logger{20} %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""


def class_path(*artifact_sets: str) -> str:
    """Class path of one or more artifact sets, resolved by Maven on first use."""
    paths: list[str] = []
    for name in artifact_sets:
        paths += _resolve(name).read_text().strip().split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(paths))


def _resolve(name: str) -> Path:
    folder = SOURCES / "java" / name
    product = BUILD / f"java-{name}.classpath"

    def make() -> None:
        require("mvn", "java")
        run_with_tries(
            [
                "mvn",
                "-B",
                "-q",
                f"-Dmaven.repo.local={BUILD / 'm2'}",
                _CLASS_PATH_GOAL,
                f"-Dmdep.outputFile={product}",
            ],
            cwd=folder,
        )

    return make_once(f"java-{name}", [folder / "pom.xml"], product, make)


def driver_classes() -> Path:
    """Folder with our compiled driver programs."""
    sources = sorted(_JAVA_SOURCES.glob("*.java"))
    libraries = class_path("client")
    folder = BUILD / "java-classes"

    def make() -> None:
        require("javac")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["javac", "-nowarn", "-encoding", "UTF-8", "-cp", libraries, "-d", str(folder)]
        run_with_tries([*command, *map(str, sources)], cwd=SOURCES)

    return make_once("java-classes", [*sources, libraries], folder, make)


def java_command(*options: str, header: str = "JSON") -> list[str]:
    """`java` with small-machine settings; `header` is JSON or ROCKETMQ (binary)."""
    require("java")
    return [
        "java",
        *_SMALL_JVM,
        "-Dfile.encoding=UTF-8",
        f"-Drocketmq.serialize.type={header}",
        *options,
    ]


def mqadmin(
    namesrv_address: str, *words: str, artifacts: str = "client", timeout_s: float = 60
) -> str:
    """Runs one verb of upstream's admin tool; returns what it printed, errors included."""
    home = BUILD / "mqadmin-home"
    write_home(home)
    done = subprocess.run(
        [
            *java_command(f"-Drocketmq.home.dir={home}", f"-Duser.home={home}", "-Xmx256m"),
            f"-Drocketmq.namesrv.addr={namesrv_address}",
            "-cp",
            class_path(artifacts),
            "org.apache.rocketmq.tools.command.MQAdminStartup",
            *words,
        ],
        env={**os.environ, "ROCKETMQ_HOME": str(home)},
        cwd=home,  # some verbs write files
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.stdout


class JavaCluster(Running):
    """One real name server and one real broker, with everything they write in `directory`.

    The store is `directory/store` and survives stop() and kill9(), so start() again is a restart.
    `settings` are added to broker.conf and win over what is chosen here; `artifacts` names the
    version. The broker also takes broker_port - 2 (VIP) and broker_port + 1 (replication).
    With `tls`, a folder that has cert.pem and key.pem, both serve TLS to those who have a
    certificate too, and the broker serves nothing else.
    """

    cluster_name = "DefaultCluster"
    broker_name = "broker-a"

    def __init__(
        self,
        directory: Path,
        namesrv_port: int,
        broker_port: int,
        *,
        settings: Mapping[str, str] | None = None,
        header: str = "JSON",
        heap: Sequence[str] = SERVER_HEAP,
        artifacts: str = "server",
        tls: Path | None = None,
    ) -> None:
        self.directory = directory
        self.store = directory / "store"
        self.namesrv_port = namesrv_port
        self.broker_port = broker_port
        self.namesrv_address = f"127.0.0.1:{namesrv_port}"
        self.broker_address = f"127.0.0.1:{broker_port}"
        self._settings = dict(settings or {})
        self._artifacts = artifacts
        self._tls = tls
        self.namesrv = self._process("namesrv", "namesrv.NamesrvStartup", header, heap)
        self.broker = self._process("broker", "broker.BrokerStartup", header, heap)

    @property
    def pids(self) -> tuple[int, int]:
        """Process ids of the name server and of the broker."""
        return self.namesrv.pid, self.broker.pid

    def begin(self, timeout_s: float = 60) -> None:
        """Starts both and does not wait for the broker; start() then does."""
        self.prepare()
        self.namesrv.start()
        self.namesrv.wait_until(lambda: accepts(self.namesrv_port), timeout_s)
        self.broker.start()

    def start(self, timeout_s: float = 60) -> None:
        """Returns when the name server knows the broker."""
        try:
            self.begin(timeout_s)
            self.broker.wait_until(self._registered, timeout_s)
        except BaseException:
            self.kill9()
            raise

    def prepare(self) -> None:
        """Writes the files that both processes read when they start."""
        write_home(self.directory)
        conf = self.directory / "conf"
        (conf / "namesrv.conf").write_text(
            _properties(
                {
                    "listenPort": str(self.namesrv_port),
                    "rocketmqHome": str(self.directory),
                    "kvConfigPath": str(self.directory / "namesrv" / "kvConfig.json"),
                    "configStorePath": str(self.directory / "namesrv" / "namesrv.properties"),
                }
            )
        )
        (conf / "broker.conf").write_text(_properties(self._broker_settings()))
        if self._tls is not None:
            (conf / "tls.properties").write_text(
                _properties(
                    {
                        "tls.test.mode.enable": "false",
                        "tls.server.certPath": str(self._tls / "cert.pem"),
                        "tls.server.keyPath": str(self._tls / "key.pem"),
                        "tls.server.need.client.auth": "require",
                    }
                )
            )

    def stop(self) -> None:
        """SIGTERM to both, broker first, and SIGKILL to what does not end."""
        self.broker.stop()
        self.namesrv.stop()

    def kill9(self) -> None:
        self.broker.kill9()
        self.namesrv.kill9()

    def _process(self, role: str, main: str, header: str, heap: Sequence[str]) -> Process:
        tls = [f"-Dtls.config.file={self.directory / 'conf' / 'tls.properties'}"]
        if role == "broker":
            # The second: it would use TLS towards the name server too, without a certificate.
            tls += ["-Dtls.server.mode=enforcing", "-Dtls.enable=false"]
        # user.home: both roles would otherwise leave files in the home of whoever runs this.
        return Process(
            f"java {role}",
            [
                *java_command(*heap, *_OPEN_JDK, *(tls if self._tls else ()), header=header),
                f"-Drocketmq.home.dir={self.directory}",
                f"-Duser.home={self.directory}",
                "-cp",
                class_path(self._artifacts),
                f"org.apache.rocketmq.{main}",
                "-c",
                str(self.directory / "conf" / f"{role}.conf"),
            ],
            self.directory / f"{role}.log",
            env={"ROCKETMQ_HOME": str(self.directory), "NAMESRV_ADDR": self.namesrv_address},
            cwd=self.directory,
        )

    def _broker_settings(self) -> dict[str, str]:
        return {
            "brokerClusterName": self.cluster_name,
            "brokerName": self.broker_name,
            "brokerId": "0",
            "brokerIP1": "127.0.0.1",
            "brokerIP2": "127.0.0.1",
            "namesrvAddr": self.namesrv_address,
            "rocketmqHome": str(self.directory),
            "listenPort": str(self.broker_port),
            "haListenPort": str(self.broker_port + 1),
            "storePathRootDir": str(self.store),
            "storePathCommitLog": str(self.store / "commitlog"),
            # A nearly full test disk must not look like a broken broker.
            "diskMaxUsedSpaceRatio": "95",
            **self._settings,
        }

    def _registered(self) -> bool:
        known = clusters(self.namesrv_port).get(self.cluster_name, [])
        return accepts(self.broker_port) and self.broker_name in known


def write_home(home: Path) -> None:
    """The least that upstream's start-up expects to find in its installation folder."""
    conf = home / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    for role in ("namesrv", "broker", "tools"):
        file = conf / f"logback_{role}.xml"
        if not file.exists():
            file.write_text(_LOGBACK)


def _properties(values: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in values.items())

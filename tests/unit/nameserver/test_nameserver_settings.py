from __future__ import annotations

from pathlib import Path

import pytest

from cosmodrome.env.options import NameServerOptions, SocketOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ProtocolError, Refused
from cosmodrome.nameserver.settings import Settings, edit_properties_text


def made(path: Path | str = "") -> Settings:
    options = NameServerOptions(config_store_path=str(path), rocketmq_home="/opt/mq")
    return Settings(options, SocketOptions(), real_env(seed=1))


def test_text_lists_every_setting() -> None:
    lines = made().text().decode().splitlines()
    assert "orderMessageEnable=false" in lines
    assert "productEnvName=center" in lines
    assert "listenPort=9876" in lines
    assert "rocketmqHome=/opt/mq" in lines
    assert "serverChannelMaxIdleTimeSeconds=120" in lines
    assert lines == sorted(lines)


async def test_update_acts_without_a_file() -> None:
    settings = made()
    await settings.update(b"orderMessageEnable=true\nproductEnvName=east \n")
    assert settings.options.order_message_enable is True
    assert settings.options.product_env_name == "east"
    await settings.update(b"brokerExpiredTime=60000")
    assert settings.options.broker_expired_time == 60_000
    assert settings.options.order_message_enable is True


async def test_an_empty_update_changes_nothing() -> None:
    settings = made()
    before = settings.options
    await settings.update(b"")
    await settings.update(b"# only a comment\n")
    assert settings.options is before


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"configStorePath=/etc/cron.d/x", Code.NO_PERMISSION),
        (b"kvConfigPath=/tmp/x", Code.NO_PERMISSION),
        (b"rocketmqHome=/tmp/x", Code.NO_PERMISSION),
        (b"configBlackList=", Code.NO_PERMISSION),
        (b"config\\u0053torePath=/tmp/x", Code.NO_PERMISSION),
        (b"storePathRootDir=/tmp/x", Code.NO_PERMISSION),
        (b"listenPort=1", Code.NO_PERMISSION),
        (b"bindAddress=0.0.0.0", Code.NO_PERMISSION),
        (b"serverSocketBacklog=1", Code.NO_PERMISSION),
        (b"noSuchThing=1", Code.SYSTEM_ERROR),
        (b"orderMessageEnable=perhaps", Code.SYSTEM_ERROR),
        (b"brokerExpiredTime=soon", Code.SYSTEM_ERROR),
        (b"brokerExpiredTime=0", Code.SYSTEM_ERROR),
        (b"scanNotActiveBrokerInterval=-5", Code.SYSTEM_ERROR),
        (b"productEnvName=a\\nlistenPort=1", Code.SYSTEM_ERROR),
        (b"productEnvName=" + b"x" * 1025, Code.SYSTEM_ERROR),
    ],
)
async def test_refusals_change_nothing(tmp_path: Path, text: bytes, code: int) -> None:
    path = tmp_path / "namesrv.conf"
    settings = made(path)
    before = settings.options
    with pytest.raises(Refused) as refusal:
        await settings.update(b"productEnvName=other\n" + text)
    assert refusal.value.code == code
    assert settings.options is before
    assert not path.exists()


async def test_text_that_is_none_is_refused() -> None:
    settings = made()
    for text in (b"productEnvName=\xff", b"productEnvName=\\u12"):
        with pytest.raises(ProtocolError):
            await settings.update(text)
    assert settings.options.product_env_name == "center"


async def test_a_settings_file_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text("a=\\u12\n")
    settings = made(path)
    with pytest.raises(Refused, match="fix the file"):
        await settings.update(b"orderMessageEnable=true")
    assert path.read_text() == "a=\\u12\n"
    assert settings.options.order_message_enable is False


async def test_update_is_saved_and_keeps_what_else_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text("# ours\nlistenPort = 9876\norderMessageEnable: false\n")
    await made(path).update(b"orderMessageEnable=true\nproductEnvName=a\\\\b")
    assert path.read_text() == (
        "# ours\nlistenPort = 9876\norderMessageEnable=true\nproductEnvName=a\\\\b\n"
    )
    assert Path(f"{path}.bak").read_text().startswith("# ours")


async def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    settings = made(tmp_path / "file" / "namesrv.conf")
    with pytest.raises(Refused, match="Nothing was changed"):
        await settings.update(b"orderMessageEnable=true")
    assert settings.options.order_message_enable is False


def test_edit_knows_continued_lines_comments_and_repetitions() -> None:
    text = "a=1\\\n  2\n#a=3\nb=4\na=5\nc=6"
    assert edit_properties_text(text, {"a": "x", "d": "y"}) == "a=x\n#a=3\nb=4\nc=6\nd=y\n"
    assert edit_properties_text("# not continued \\\na=1\n", {"a": "2"}) == (
        "# not continued \\\na=2\n"
    )
    assert edit_properties_text("", {}) == ""

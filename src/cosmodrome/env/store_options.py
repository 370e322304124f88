"""The settings of the message store; see `options.py`, which everybody imports them from."""

from __future__ import annotations

from typing import Annotated, Literal

from cosmodrome.env.option_fields import (
    DANGEROUS,
    DAY_MS,
    INT32_MAX,
    MIB,
    MINUTE_MS,
    Options,
)
from cosmodrome.env.option_fields import described as _help

PULL_BYTES_MAX = 15 * MIB  # of the messages in one answer; a frame has 16 MiB


class StoreOptions(Options, frozen=True, kw_only=True):
    """The message store."""

    store_path_root_dir: Annotated[str, _help("root of the store")] = ""
    store_path_commit_log: Annotated[
        str, _help("directory of the commit log; default is commitlog below the root")
    ] = ""
    mapped_file_size_commit_log: Annotated[int, _help("bytes per commit-log file", least=4096)] = (
        1024 * MIB
    )
    mapped_file_size_consume_queue: Annotated[
        int, _help("bytes per consume-queue file, rounded up to whole entries of 20", least=20)
    ] = 6_000_000
    flush_disk_type: Annotated[
        Literal["SYNC_FLUSH", "ASYNC_FLUSH"],
        _help(
            "what an acknowledgement means. SYNC_FLUSH, the default here: the message is synced"
            " to disk. ASYNC_FLUSH, upstream's default: the kernel has it"
        ),
    ] = "SYNC_FLUSH"
    sync_flush_timeout: Annotated[
        int, _help("ms a send waits for its sync before it is answered FLUSH_DISK_TIMEOUT", least=1)
    ] = 5000
    os_page_cache_busy_time_out_mills: Annotated[
        int,
        _help(
            "with SYNC_FLUSH: sends are answered busy while one sync takes longer than this"
            " many ms and more than 64 MiB wait for it, or while more than 256 MiB wait",
            least=1,
            most=10 * MINUTE_MS,
            live=True,
        ),
    ] = 1000
    flush_interval_commit_log: Annotated[
        int, _help("ms between syncs with ASYNC_FLUSH", least=1)
    ] = 500
    flush_interval_consume_queue: Annotated[
        int, _help("ms between writes of queue and index data held in memory", least=1)
    ] = 1000
    flush_consume_queue_thorough_interval: Annotated[
        int, _help("ms between syncs of queues and index followed by a checkpoint", least=1)
    ] = 60_000
    max_message_size: Annotated[int, _help("largest message body, in bytes", least=1)] = 4 * MIB
    message_index_enable: Annotated[bool, _help("index messages by key")] = True
    max_hash_slot_num: Annotated[int, _help("hash slots per index file", least=1)] = 5_000_000
    max_index_num: Annotated[int, _help("entries per index file", least=2)] = 20_000_000
    max_msgs_num_batch: Annotated[
        int, _help("most messages that one key query returns", least=1, most=1_024, live=True)
    ] = 64
    message_delay_level: Annotated[
        str,
        _help(
            "delays of the levels, level 1 first, each a number with s, m, h or d; a change"
            " also changes when messages that already wait are delivered"
        ),
    ] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    check_crc_on_recover: Annotated[bool, _help("verify body checksums while recovering")] = True
    access_message_in_memory_max_ratio: Annotated[
        int,
        _help(
            "messages within this distance of the log's end, in percent of RAM, count as being"
            " in memory",
            least=0,
            most=100,
            live=True,
        ),
    ] = 40
    max_transfer_bytes_on_message_in_memory: Annotated[
        int,
        _help(
            "bytes per pull of messages that are in memory", least=1, most=PULL_BYTES_MAX, live=True
        ),
    ] = 262_144
    # Upstream's is 32. The bytes bound a pull too, and only who asks for more gets more.
    max_transfer_count_on_message_in_memory: Annotated[
        int,
        _help(
            "messages per pull that are in memory; fewer when the client asks for fewer",
            least=1,
            most=32_768,
            live=True,
        ),
    ] = 1_024
    max_transfer_bytes_on_message_in_disk: Annotated[
        int,
        _help(
            "bytes per pull of messages that are only on disk",
            least=1,
            most=PULL_BYTES_MAX,
            live=True,
        ),
    ] = 65_536
    max_transfer_count_on_message_in_disk: Annotated[
        int, _help("messages per pull that are only on disk", least=1, most=32_768, live=True)
    ] = 8
    flush_delay_offset_interval: Annotated[
        int, _help("ms between saves of how far delayed messages were delivered", least=1)
    ] = 10_000
    timer_max_delay_sec: Annotated[
        int, _help("most seconds that a message with its own delivery time may wait", least=1)
    ] = 259_200
    offset_check_in_slave: Annotated[
        bool,
        _help(
            "a slave, too, tells consumers that their offset is outside of the queue; when off,"
            " consumers ask again, because the slave may only lag behind"
        ),
    ] = False
    broker_role: Annotated[
        Literal["ASYNC_MASTER", "SYNC_MASTER", "SLAVE"],
        _help(
            "ASYNC_MASTER answers a send when its own disk has it, SYNC_MASTER when a slave has it"
            " too. SLAVE follows a master and refuses sends"
        ),
    ] = "ASYNC_MASTER"
    ha_listen_port: Annotated[
        int,
        _help(
            "port where slaves connect; 0 is listenPort + 1. Upstream's default is 10912",
            least=0,
            most=65535,
        ),
    ] = 0
    ha_master_address: Annotated[
        str,
        _help(
            "slave: host:port of the master's HA port; when empty, the name servers say where the"
            " master is"
        ),
    ] = ""
    ha_send_heartbeat_interval: Annotated[
        int, _help("ms of silence after which either end of a link says that it is there", least=1)
    ] = 5000
    ha_housekeeping_interval: Annotated[
        int,
        _help("ms after which a link is closed on which nothing was read from the peer", least=1),
    ] = 20_000
    ha_transfer_batch_size: Annotated[
        int,
        _help(
            "most bytes of the log in one frame to a slave. Upstream's default is 32768",
            least=1,
            most=2 * MIB,
        ),
    ] = 1 * MIB
    ha_slave_fallbehind_max: Annotated[
        int,
        _help(
            "SYNC_MASTER: a slave that is further behind than this many bytes is not waited for;"
            " sends are answered SLAVE_NOT_AVAILABLE",
            least=0,
            most=INT32_MAX,
            live=True,
        ),
    ] = 256 * MIB
    slave_timeout: Annotated[
        int,
        _help(
            "SYNC_MASTER: ms that a send waits for a slave before it is answered"
            " FLUSH_SLAVE_TIMEOUT",
            least=1,
        ),
    ] = 3000
    sync_from_last_file: Annotated[
        bool,
        _help(
            "a slave without messages begins with the last file of its master's log; when off, it"
            " copies the whole log"
        ),
    ] = False
    file_reserved_time: Annotated[
        int,
        _help(
            "hours that a commit-log file is kept after its last write. Queues and index follow"
            " the log. The time is the same for all topics",
            least=0,
            most=100 * 366 * 24,
            live=DANGEROUS,
        ),
    ] = 72
    delete_when: Annotated[
        str,
        _help(
            "hours of the day, separated by ;, at which expired files are removed", live=DANGEROUS
        ),
    ] = "04"
    disk_max_used_space_ratio: Annotated[
        int,
        _help(
            "when more than this percentage of the disk is used, expired files are removed at"
            " any hour; held between 10 and 95",
            least=0,
            most=100,
            live=DANGEROUS,
        ),
    ] = 75
    disk_space_clean_forcibly_ratio: Annotated[
        int,
        _help(
            "when more than this percentage of the disk is used, the oldest files are removed"
            " even if they have not expired",
            least=10,
            most=100,
            live=DANGEROUS,
        ),
    ] = 85
    clean_file_forcibly_enable: Annotated[
        bool,
        _help(
            "allow the removal of files that have not expired when the disk is full", live=DANGEROUS
        ),
    ] = True
    disk_space_warning_level_ratio: Annotated[
        int,
        _help(
            "when this percentage of the disk is used, sends are refused",
            least=10,
            most=100,
            live=DANGEROUS,
        ),
    ] = 90
    clean_resource_interval: Annotated[
        int,
        _help(
            "ms between checks for files to remove; the first check comes after 60 s",
            least=100,
            most=DAY_MS,
            live=True,
        ),
    ] = 10_000
    delete_commit_log_files_interval: Annotated[
        int,
        _help(
            "ms between the removals of two commit-log files",
            least=0,
            most=10 * MINUTE_MS,
            live=True,
        ),
    ] = 100
    delete_consume_queue_files_interval: Annotated[
        int,
        _help(
            "ms between the removals of two queue files", least=0, most=10 * MINUTE_MS, live=True
        ),
    ] = 100
    delete_file_batch_max: Annotated[
        int, _help("most commit-log files removed per check", least=1, most=10_000, live=True)
    ] = 10
    redelete_hanged_file_interval: Annotated[
        int,
        _help(
            "ms until a failed removal of a file is tried again", least=1, most=DAY_MS, live=True
        ),
    ] = 120_000
    transient_store_pool_enable: Annotated[
        bool,
        _help(
            "acknowledge messages that are only in the memory of this process. A kill -9 or a"
            " crash of the broker then loses up to commitIntervalCommitLog of acknowledged"
            " messages; no other mode does that. Takes effect on a master with ASYNC_FLUSH"
        ),
    ] = False
    transient_store_pool_size: Annotated[
        int,
        _help(
            "sends are answered busy while more than this many times mappedFileSizeCommitLog,"
            " and at most 256 MiB, are held in memory",
            least=1,
        ),
    ] = 5
    commit_interval_commit_log: Annotated[
        int, _help("ms between writes of what transientStorePoolEnable holds in memory", least=1)
    ] = 200
    fast_fail_if_no_buffer_in_store_pool: Annotated[
        bool,
        _help("answer busy at once when the next commit-log file is not ready, instead of waiting"),
    ] = False
    warm_maped_file_enable: Annotated[
        bool,
        _help(
            "fill the next commit-log file with zeros ahead of time, so that appends never"
            " allocate disk blocks; this stops when the disk is nearly full"
        ),
    ] = False
    commit_log_zeros_ahead: Annotated[
        int,
        _help(
            "with SYNC_FLUSH: write this many bytes of zeros behind the data from time to time,"
            " so that a sync need not record new blocks in the file system's journal. Everything"
            " is then written twice. Use 0 on file systems that copy on write: they gain nothing"
        ),
    ] = 1 * MIB

"""Every byte layout of the wire and the store, written once. All integers are big-endian.

Frame:   length u32 (counts what follows it) | serialize u8, header length u24 | header | body

Record, with IPv4 hosts (an IPv6 host is 16+4 bytes and moves everything behind it):

    0 size i32            20 queueOffset i64     40 bornTime i64      72 reconsumeTimes i32
    4 magic i32           28 logOffset i64       48 bornHost 4+4      76 preparedOffset i64
    8 bodyCRC i32         36 sysFlag i32         56 storeTime i64     84 bodyLength i32, body
   12 queueId i32                                64 storeHost 4+4        topicLength i8, topic
   16 flag i32                                                           propertiesLength i16, text
"""

from __future__ import annotations

import struct

# --- frame ---------------------------------------------------------------------------------
FRAME_BYTES_MAX = 16 * 1024 * 1024  # including the length word
FRAME_LENGTH = struct.Struct(">I")
FRAME_PREFIX = struct.Struct(">II")  # length, serialize << 24 | header length
HEADER_BYTES_MAX = 64 * 1024  # of one frame; the longest properties of a message fit
HEADER_LENGTH_MASK = 0xFFFFFF
SERIALIZE_JSON = 0
SERIALIZE_BINARY = 1

FLAG_RESPONSE = 1
FLAG_ONEWAY = 2

# Binary header: code, language, version, opaque, flag, remark length
BINARY_HEADER = struct.Struct(">hbhiii")
assert BINARY_HEADER.size == 17

# Signed requests: who signs, with what, and which fields are not among what is signed.
ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
UNSIGNED_FIELDS = frozenset({SIGNATURE, "_UNIQUE_KEY_QUERY"})
SIGNED_HEADER_BYTES_MAX = 64 * 1024  # of a header that the fast lane checks
RIGHTS_KEPT_MAX = 4096  # what it knows that accounts may do

# --- record --------------------------------------------------------------------------------
MAGIC_RECORD = 0xDAA320A7 - (1 << 32)
MAGIC_RECORD_V2 = 0xDAA320AB - (1 << 32)  # Compat: 5.x, topic length in two bytes
MAGIC_BLANK = 0xCBD43194 - (1 << 32)

# size, magic, crc, queueId, flag, queueOffset, logOffset, sysFlag, bornTime
RECORD_HEAD = struct.Struct(">iiiiiqqiq")
# reconsumeTimes, preparedOffset, bodyLength
RECORD_MIDDLE = struct.Struct(">iqi")
HOST_V4_BYTES = 8
HOST_V6_BYTES = 20
BLANK = struct.Struct(">ii")  # bytes left, MAGIC_BLANK
BLANK_BYTES = BLANK.size

RECORD_QUEUE_OFFSET_AT = 20
RECORD_LOG_OFFSET_AT = 28
RECORD_SYS_FLAG_AT = 36
RECORD_BORN_HOST_AT = 48
# Fixed bytes of a record with two IPv4 hosts: head, hosts, storeTime, middle, two lengths.
RECORD_BYTES_MIN = RECORD_HEAD.size + 2 * HOST_V4_BYTES + 8 + RECORD_MIDDLE.size + 1 + 2
assert RECORD_HEAD.size == RECORD_BORN_HOST_AT
assert RECORD_BYTES_MIN == 91

TOPIC_BYTES_MAX = 127
PROPERTIES_BYTES_MAX = 32767
CRC_MASK = 0x7FFFFFFF
SECTOR_BYTES = 512  # what a disk writes whole or not at all

# --- sysFlag bits --------------------------------------------------------------------------
SYS_COMPRESSED = 0x1
SYS_MULTI_TAGS = 0x2
SYS_TRANSACTION_MASK = 0xC
SYS_PREPARED = 0x4
SYS_COMMIT = 0x8
SYS_ROLLBACK = 0xC
SYS_BORN_V6 = 0x10
SYS_STORE_V6 = 0x20
SYS_COMPRESSION_MASK = 0x700
SYS_LZ4 = 0x100
SYS_ZSTD = 0x200
SYS_ZLIB = 0x300

# --- sysFlag bits of a pull ----------------------------------------------------------------
PULL_COMMIT = 0x1  # the pull also commits an offset
PULL_SUSPEND = 0x2  # the broker may hold the pull until something arrives
PULL_SUBSCRIPTION = 0x4  # the pull brings its own subscription
PULL_CLASS_FILTER = 0x8  # that subscription is a class on a filter server
PULL_LITE = 0x10  # from a pull consumer that is assigned its queues

# --- requests that the fast lane knows --------------------------------------------------------
CODE_SEND = 10
CODE_PULL = 11
CODE_COMMIT = 15
CODE_SEND_V2 = 310
CODE_SEND_BATCH = 320

# --- sysFlag bits of a topic ---------------------------------------------------------------
TOPIC_UNIT = 0x1  # its messages belong to units
TOPIC_UNIT_SUBSCRIPTION = 0x2  # consumers with a unit read it

# --- properties text -----------------------------------------------------------------------
NAME_END = "\x01"
PAIR_END = "\x02"

# --- batch item of a send-batch body ---------------------------------------------------------
BATCH_ITEM_HEAD = struct.Struct(">iiiii")  # size, magic 0, crc 0, flag, bodyLength
assert BATCH_ITEM_HEAD.size == 20

# --- consume queue ---------------------------------------------------------------------------
QUEUE_ENTRY = struct.Struct(">qiq")  # log offset, size, tags code
QUEUE_ENTRY_BYTES = QUEUE_ENTRY.size
QUEUE_OFFSET_LIMIT = (1 << 62) // QUEUE_ENTRY_BYTES  # positions in a queue are 64-bit numbers
assert QUEUE_ENTRY_BYTES == 20
QUEUE_FILLER_SIZE = 0x7FFFFFFF  # size field of entries that stand for "before the first"

# --- index -----------------------------------------------------------------------------------
INDEX_HEADER = struct.Struct(">qqqqii")  # begin/end time, begin/end offset, used slots, count
INDEX_SLOT = struct.Struct(">i")
INDEX_KEY = struct.Struct(">iqq")  # hash, log offset, store time: an entry before it has a place
INDEX_ENTRY = struct.Struct(">iqii")  # hash, log offset, seconds since begin, previous entry
assert INDEX_HEADER.size == 40 and INDEX_ENTRY.size == 20

# --- checkpoint ------------------------------------------------------------------------------
CHECKPOINT = struct.Struct(">qqq")  # times of the last flushed log, queue and index data
CHECKPOINT_BYTES = 4096

# --- why a walk ended --------------------------------------------------------------------------
# Over records.
WALK_MORE = 0  # reached the end or the limit
WALK_BLANK = 1  # a blank record: the log goes on in the next file
WALK_EMPTY = 2  # zeros: never written
WALK_CORRUPT = 3  # bad magic, size, checksum or log offset

# Over records that become columns.
STOP_END = 0  # consumed exactly
STOP_FULL = 1  # take the columns first
STOP_PARTIAL = 2  # the record reaches beyond the end
STOP_BLANK = 3  # the log goes on in the next file
STOP_EMPTY = 4  # zeros: never written
STOP_CORRUPT = 5  # `fault` says why

# Over the frames of a buffer.
LANE_NOTHING = 0  # no whole frame is left
LANE_PULL = 1  # the frame there is a pull
LANE_COMMIT = 2  # a commit of an offset
LANE_OTHER = 3  # something for the slow lane
LANE_FULL = 4  # as many requests as were allowed, or as much as may wait to be written
LANE_HOLD = 5  # a pull that waits for messages

# --- replication -----------------------------------------------------------------------------
# A broker that speaks our own stream says so among its runtime figures.
HA_STREAM_KEY = "haStream"
HA_STREAM = "cosmodrome-1"
# Settings that a master and its slaves must have in common. They are runtime figures too, under
# this prefix, because peers may read those but not the configuration.
SETTING_FIGURE = "setting_"
PAIR_SETTINGS = frozenset(
    (
        "autoCreateTopicEnable",
        "brokerClusterName",
        "deleteWhen",
        "fileReservedTime",
        "flushDiskType",
        "mappedFileSizeCommitLog",
        "maxMessageSize",
        "messageDelayLevel",
        "timerMaxDelaySec",
        "transactionCheckMax",
        "transactionTimeOut",
    )
)

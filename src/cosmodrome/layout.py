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
HEADER_LENGTH_MASK = 0xFFFFFF
SERIALIZE_JSON = 0
SERIALIZE_BINARY = 1

FLAG_RESPONSE = 1
FLAG_ONEWAY = 2

# Binary header: code, language, version, opaque, flag, remark length
BINARY_HEADER = struct.Struct(">hbhiii")
assert BINARY_HEADER.size == 17

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

# --- properties text -----------------------------------------------------------------------
NAME_END = "\x01"
PAIR_END = "\x02"

# --- batch item of a send-batch body ---------------------------------------------------------
BATCH_ITEM_HEAD = struct.Struct(">iiiii")  # size, magic 0, crc 0, flag, bodyLength
assert BATCH_ITEM_HEAD.size == 20

# --- consume queue ---------------------------------------------------------------------------
QUEUE_ENTRY = struct.Struct(">qiq")  # log offset, size, tags code
QUEUE_ENTRY_BYTES = QUEUE_ENTRY.size
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

"""Settings that RocketMQ knows and this version does nothing with, each with its reason.

A `broker.conf` that names one is accepted with one log line that quotes the reason. Keys in
`REFUSED` would promise something that is not kept; switching one on stops the start instead.
"""

from __future__ import annotations

_REASONS: dict[str, str] = {
    "one event loop serves every request; there are no thread pools to size": """
        serverWorkerThreads serverSelectorThreads serverCallbackExecutorThreads
        clientWorkerThreads clientCallbackExecutorThreads sendMessageThreadPoolNums
        putMessageFutureThreadPoolNums pullMessageThreadPoolNums
        processReplyMessageThreadPoolNums queryMessageThreadPoolNums adminBrokerThreadPoolNums
        clientManageThreadPoolNums consumerManageThreadPoolNums heartbeatThreadPoolNums
        endTransactionThreadPoolNums sendThreadPoolQueueCapacity putThreadPoolQueueCapacity
        pullThreadPoolQueueCapacity replyThreadPoolQueueCapacity queryThreadPoolQueueCapacity
        clientManagerThreadPoolQueueCapacity consumerManagerThreadPoolQueueCapacity
        heartbeatThreadPoolQueueCapacity endTransactionPoolQueueCapacity
        waitTimeMillsInPullQueue waitTimeMillsInHeartbeatQueue waitTimeMillsInTransactionQueue
        fsServerAsyncSemaphoreValue fsServerCallbackExecutorThreads fsServerWorkerThreads
    """,
    "the kernel and the event loop size socket buffers": """
        serverOnewaySemaphoreValue serverAsyncSemaphoreValue serverSocketSndBufSize
        serverSocketRcvBufSize writeBufferHighWaterMark writeBufferLowWaterMark
        serverPooledByteBufAllocatorEnable useEpollNativeSelector clientOnewaySemaphoreValue
        clientAsyncSemaphoreValue connectTimeoutMillis channelNotActiveInterval
        clientChannelMaxIdleTimeSeconds clientCloseSocketIfTimeout clientSocketSndBufSize
        clientSocketRcvBufSize transferMsgByHeap
    """,
    "appends are one pwrite per batch; there is no mapped file to tune": """
        flushCommitLogTimed flushCommitLogLeastPages flushCommitLogThoroughInterval
        commitCommitLogLeastPages commitCommitLogThoroughInterval
        flushConsumeQueueLeastPages useReentrantLockWhenPutMessage
        flushLeastPagesWhenWarmMapedFile debugLockEnable putMsgIndexHightWater
    """,
    "a file is removed at once and readers keep what they have mapped": """
        destroyMapedFileIntervalForcibly diskFallRecorded
    """,
    "the feature it belongs to is not served yet": """
        enableCalcFilterBitMap expectConsumerNumUseFilter maxErrorRateOfBloomFilter
        disableConsumeIfConsumerReadSlowly consumerFallbehindThreshold
        enableConsumeQueueExt
        mappedFileSizeConsumeQueueExt bitMapLengthConsumeQueueExt
        messageIndexSafe duplicationEnable readOnlyCommitLogStorePaths
        haListenPort haSendHeartbeatInterval haHousekeepingInterval haTransferBatchSize
        haMasterAddress haSlaveFallbehindMax slaveTimeout
        enableScheduleAsyncDeliver
        scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked
        enableLmq enableMultiDispatch maxLmqConsumeQueueNum useTLS
    """,
    "operators start filter servers (`cosmo filtersrv run`), the broker starts nothing": """
        filterServerNums
    """,
    "a filter server delivers records as they are stored": """
        compressMsgBodyOverHowmuch zipCompressLevel
    """,
    "filters are installed by operators and not fetched": "filterClassRepertoryUrl",
    "statistics that were idle for a day are always dropped": "autoDeleteUnusedStats",
    "delayed messages are always counted when they are delivered": "enableScheduleMessageStats",
    "DLedger's Raft log is not part of this system": """
        dLegerGroup dLegerPeers dLegerSelfId preferredLeaderId isEnableBatchPush
        storePathDLedgerCommitLog
    """,
    "metrics are on the health port (--http-port) for whoever asks; see docs/metrics.md": """
        metricsExporterType metricsPromExporterHost metricsPromExporterPort metricsInDelta
        metricsOtelCardinalityLimit
    """,
    "only steers log output of upstream": """
        isolateLogEnable highSpeedMode maxDelayTime
    """,
    "it steers a part of upstream that does not exist here": """
        commercialEnable commercialTimerCount commercialTransCount commercialBigCount
        commercialBaseCount messageStorePlugIn rmqAddressServerDomain rmqAddressServerSubGroup
        fetchNamesrvAddrByAddressServer flushConsumerOffsetHistoryInterval clusterTest
        brokerConfigPath configBlackList rocketmqHome storePathConsumeQueue storePathIndex
        storeCheckpoint abortFile
    """,
}

UNUSED: dict[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}

# key → what to do instead, when the file switches it on
REFUSED: dict[str, str] = {
    "clientUploadFilterClassEnable": (
        "code that clients send is never run; remove the line and install the filters in filterPath"
    ),
    "aclEnable": (
        "access control is not served yet, and starting without it would leave the broker open;"
        " remove the line and keep the broker on a trusted network"
    ),
    "enableDLegerCommitLog": (
        "DLedger's Raft log is not part of this system; remove the line to use the plain log"
    ),
}

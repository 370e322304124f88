"""Settings of RocketMQ that do nothing here, each with its reason.

A `broker.conf` with such a key is accepted, and one log line gives the reason. Keys in `REFUSED`
would promise something that is not kept: a server does not start when one is switched on.
"""

from __future__ import annotations

_REASONS: dict[str, str] = {
    "one event loop serves all requests; there are no thread pools": """
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
    "the log is written with one pwrite per batch; there is no mapped file to tune": """
        flushCommitLogTimed flushCommitLogLeastPages flushCommitLogThoroughInterval
        commitCommitLogLeastPages commitCommitLogThoroughInterval
        flushConsumeQueueLeastPages useReentrantLockWhenPutMessage
        flushLeastPagesWhenWarmMapedFile debugLockEnable putMsgIndexHightWater
    """,
    "a file is removed at once; readers can finish what they have mapped": """
        destroyMapedFileIntervalForcibly diskFallRecorded
    """,
    "the feature it belongs to is not served yet": """
        enableCalcFilterBitMap expectConsumerNumUseFilter maxErrorRateOfBloomFilter
        disableConsumeIfConsumerReadSlowly consumerFallbehindThreshold
        enableConsumeQueueExt
        mappedFileSizeConsumeQueueExt bitMapLengthConsumeQueueExt
        messageIndexSafe duplicationEnable readOnlyCommitLogStorePaths
        enableScheduleAsyncDeliver
        scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked
        enableLmq enableMultiDispatch maxLmqConsumeQueueNum
    """,
    "tls.enable says whether the broker calls others over TLS": "useTLS",
    "no certificate is made up; name one in tls.server.certPath": "tls.test.mode.enable",
    "a certificate that tls.server.need.client.auth asks for is always checked": """
        tls.server.authClient
    """,
    "the broker starts no filter servers; operators do (`cosmo filtersrv run`)": """
        filterServerNums
    """,
    "a filter server delivers records as they are stored": """
        compressMsgBodyOverHowmuch zipCompressLevel
    """,
    "operators install the filters; nothing is downloaded": "filterClassRepertoryUrl",
    "statistics without traffic for a day are always dropped": "autoDeleteUnusedStats",
    "delayed messages are always counted when they are delivered": "enableScheduleMessageStats",
    "DLedger's Raft log is not part of this system": """
        dLegerGroup dLegerPeers dLegerSelfId preferredLeaderId isEnableBatchPush
        storePathDLedgerCommitLog
    """,
    "metrics are served on the health port (--http-port); see docs/metrics.md": """
        metricsExporterType metricsPromExporterHost metricsPromExporterPort metricsInDelta
        metricsOtelCardinalityLimit
    """,
    "it only controls log output of upstream": """
        isolateLogEnable highSpeedMode maxDelayTime
    """,
    "it controls a part of upstream that does not exist here": """
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
    "enableDLegerCommitLog": (
        "DLedger's Raft log is not part of this system; remove the line to use the plain log"
    ),
}

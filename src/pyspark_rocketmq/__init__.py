"""Spark finds the data source `rocketmq` here by itself: it imports every package `pyspark_*`."""

from cosmodrome.spark.source import RocketMQSource as DefaultSource

__all__ = ["DefaultSource"]

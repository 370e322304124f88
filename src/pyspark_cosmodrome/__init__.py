"""Spark finds the data source `cosmodrome` here by itself: it imports every package `pyspark_*`."""

from cosmodrome.spark.source import CosmodromeSource as DefaultSource

__all__ = ["DefaultSource"]

"""Cosmodrome: a message system that speaks the Apache RocketMQ remoting protocol."""

__version__ = "0.1.0"

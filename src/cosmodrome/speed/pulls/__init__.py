"""Pulls and commits served by compiled code. It has no pure twin: the slow lane serves them too."""

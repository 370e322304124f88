"""Headers, records, entries of queues and index. `cosmodrome.speed` offers the twin that runs."""

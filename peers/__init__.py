"""Real RocketMQ servers and clients, and our own node, as test subjects.

Nothing here imports `cosmodrome`: what judges the system must not share code with it.

- `java.py`    name server and broker of upstream, `mqadmin`, class paths
- `node.py`    `cosmo up` as a subprocess
- `clients.py` one small driver program per client language, with one interface
- `resolve.py` downloads and builds, once, under `build/peers`
- `raw.py`     a few hand-made requests, to prepare and observe
- `process.py` a child process that can be awaited, stopped and killed
"""

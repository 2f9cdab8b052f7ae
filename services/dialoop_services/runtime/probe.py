"""Ask a service of this container whether it is ready: exit code 0 for yes, 1 for anything else.

python -I -S probe.py 127.0.0.1:8002         # GET /readyz
python -I -S probe.py 127.0.0.1:8002 60      # and kill a service that is silent for a minute

With the seconds it also kills a service in a container that has answered once and then nothing for
so long, so that the container is started again: Docker only calls it unhealthy.

It runs every ten seconds in every container, so it imports as little as it can: no package, and
nothing of ours.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

SILENT = "SILENT"
"""Nothing that answers HTTP."""
_STATES = {b"200": "SERVING", b"503": "NOT_SERVING"}
_INIT = 1
_MAX_HEAD = 4096


def status_of(address: str, *, timeout_s: float = 5.0) -> str:
    """Return "SERVING", "NOT_SERVING", "HTTP 404" or the like, or SILENT."""
    host, _, port = address.rpartition(":")
    request = f"GET /readyz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    head = b""
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as plain:
            connection = _with_tls(plain) if os.environ.get("DIALOOP_TLS_CERTIFICATE") else plain
            with connection:
                connection.sendall(request.encode())
                while b"\r\n" not in head and len(head) < _MAX_HEAD:
                    chunk = connection.recv(_MAX_HEAD)
                    if not chunk:
                        break
                    head += chunk
    except OSError:  # of TLS too
        return SILENT
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        return SILENT
    return _STATES.get(words[1], f"HTTP {words[1].decode('latin-1')}")


def _with_tls(plain: socket.socket) -> socket.socket:
    """Return the connection under TLS: to this container, so nobody's certificate is checked."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # A service that answers only callers with a certificate takes its own.
    context.load_cert_chain(
        os.environ["DIALOOP_TLS_CERTIFICATE"], os.environ.get("DIALOOP_TLS_KEY") or None
    )
    return context.wrap_socket(plain)


def kill_if_hung(status: str, pid: int, after_s: float, *, folder: str = "/tmp") -> bool:
    """Kill a process whose service answers nothing any more; return whether it was killed.

    "NOT_SERVING" is an answer. When it answered last is kept in a file of `folder`, since every
    probe is a new process. A process that has never answered is still starting.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123
        # Another process may have the number later.
        started_at = file.read().rpartition(")")[2].split()[19]
    last = f"{folder}/dialoop-answered-{pid}-{started_at}"
    if status != SILENT:
        with open(last, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(str(time.monotonic()))
        return False
    try:
        with open(last, encoding="utf-8") as file:  # noqa: PTH123
            silent_s = time.monotonic() - float(file.read())
    except FileNotFoundError:
        return False
    if silent_s < after_s:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def _service_in_container() -> int | None:
    """Return the process that the container's init has started; None without an init."""
    with open(f"/proc/{_INIT}/task/{_INIT}/children", encoding="utf-8") as file:  # noqa: PTH123
        children = file.read().split()
    return int(children[0]) if children else None


def main(words: list[str]) -> int:
    """Return the exit code of a probe: words are host:port, and the seconds of silence or none."""
    address, *after = words
    status = status_of(address)
    sys.stdout.write(f"{status}\n")
    pid = _service_in_container() if after else None
    if pid is not None and kill_if_hung(status, pid, float(after[0])):
        sys.stdout.write(f"It has not answered for {after[0]} s and was killed.\n")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

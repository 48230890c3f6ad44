"""A `python` that has loaded torch and kltest's grader, for tests that run commands: that takes longer than most do.

`started(folder)` puts executables there. They send their arguments, folder, environment and streams to a server that
has loaded the grader, nothing of the command line, and end as the fork of it ends that runs them.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

CLIENT = """#!{python} -SEs
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([{first} + sys.argv[1:], os.getcwd(), dict(os.environ)])
socket.send_fds(server, [request.encode() + b"\\n"], [0, 1, 2])
sys.exit(int(server.recv(9) or 1))
"""


@contextmanager
def started(folder):
    """Put `python` and `kltest` into a folder; the server ends with the block."""
    address = str(folder / "server")
    server = subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE)
    try:
        server.stdout.readline()
        for name, first in (("python", []), ("kltest", ["-m", "kltest.cli"])):
            client = folder / name
            client.write_text(CLIENT.format(python=sys.executable, address=address, first=first))
            client.chmod(0o755)
        yield
    finally:
        server.kill()
        server.communicate()


def serve(address):
    """Return in every fork the command line that it is to run."""
    import pytest  # noqa: F401

    import kltest.grading.grader
    import kltest.render.markdown  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    os.close(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        request, streams, *_ = socket.recv_fds(connection, 2**16, 3)
        while not request.endswith(b"\n"):
            request += connection.recv(2**16)
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            connection.send(str(code if code >= 0 else 128 - code).encode())
            os._exit(0)
        connection.close()
        arguments, directory, environment = json.loads(request)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        return arguments


if __name__ == "__main__":
    arguments = serve(sys.argv[1])
    safe = arguments[0] == "-P"  # no folder of the script or of the call on the path
    kind, *sys.argv = arguments[safe:]
    assert kind == "-m"
    sys.path[:1] = [] if safe else [os.getcwd()]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

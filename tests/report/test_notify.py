import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from scripts.report.notify import notify


@pytest.fixture
def webhook():
    """A server on this machine that keeps what is posted to it."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            received.append((self.headers["Content-Type"], json.loads(self.rfile.read(length))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()


def test_a_command_gets_the_message_and_the_event(tmp_path):
    command = f'cat > "{tmp_path}/$EVENT.txt"'
    assert notify({"command": command, "url": ""}, "failure", "phase 3 stopped")
    assert (tmp_path / "failure.txt").read_text() == "phase 3 stopped"


def test_a_webhook_gets_json(webhook):
    url, received = webhook
    assert notify({"command": "", "url": url}, "success", "done")
    assert received == [("application/json", {"event": "success", "text": "done"})]


@pytest.mark.parametrize(
    "settings",
    [
        {"command": "exit 3", "url": ""},
        {"command": "", "url": "http://127.0.0.1:9/nobody"},
        {"command": "", "url": "file:///etc/passwd"},
        {"command": "", "url": "not an address"},
    ],
)
def test_what_cannot_be_delivered_is_said_and_stops_nothing(settings, capsys):
    assert not notify(settings, "start", "hello")
    assert "in config.yaml did not work" in capsys.readouterr().err


def test_nobody_is_told_where_nobody_is_named(capsys):
    assert notify({"command": "", "url": ""}, "start", "hello")
    assert capsys.readouterr() == ("", "")

"""Does a download arrive complete and verified, or leave nothing but a clear error?"""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from fedbilevel import data
from fedbilevel.data import files
from refusals import raises_with

CONTENT = np.random.default_rng(0).bytes(700_000)  # more than two chunks
FILE = files.File("thing.gz", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def server():
    """Yield a server on this machine that behaves as the path of a request says, and counts requests in `asked`."""
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            httpd.asked += 1
            how = self.path.split("/")[1]
            body = httpd.content
            if how == "missing":
                self.send_error(404)
                return
            if how == "garbage":
                self.wfile.write(b"no status line\r\n\r\n")
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + (how == "longer")))
            self.end_headers()
            if how in ("short", "stalled"):
                body = body[:-1]
            if how == "altered":
                body = body[:-1] + bytes([body[-1] ^ 1])
            if how == "longer":
                body += b"x"
            self.wfile.write(body)
            if how == "stalled":
                self.wfile.flush()
                release.wait(10)

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.asked, httpd.content, httpd.url = 0, CONTENT, f"http://127.0.0.1:{httpd.server_port}/"
    threading.Thread(target=httpd.serve_forever, args=[0.01], daemon=True).start()  # shutdown() waits for a poll
    yield httpd
    release.set()
    httpd.shutdown()
    httpd.server_close()


def fetch(server, how, path, **options):
    options.setdefault("progress", lambda done, total: None)
    files.download(f"{server.url}{how}/thing.gz", path, FILE, **options)


def test_a_good_download_is_there_and_reported(server, tmp_path):
    seen = []
    fetch(server, "good", tmp_path / "new" / "thing.gz", progress=lambda *args: seen.append(args))
    assert (tmp_path / "new" / "thing.gz").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["thing.gz"]
    done = [args[0] for args in seen]
    assert done == sorted(done)
    assert (seen[0], seen[-1]) == ((0, FILE.size), (FILE.size, FILE.size))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("missing", "404"),
        ("short", f"{FILE.size - 1:,} bytes, expected {FILE.size:,}"),
        ("altered", f"expected {FILE.sha256}"),
        ("longer", f"more than {FILE.size:,} bytes"),
        ("stalled", "timed out"),
        ("garbage", "BadStatusLine"),
    ],
)
def test_a_failed_download_leaves_nothing_and_says_what_to_do(server, tmp_path, how, why):
    with pytest.raises(data.DataError) as error:
        fetch(server, how, tmp_path / "cache" / "thing.gz", timeout=0.2 if how == "stalled" else 10.0)
    assert list((tmp_path / "cache").iterdir()) == []
    told = str(error.value)
    assert all(
        word in told for word in (f"{server.url}{how}/thing.gz", why, "FEDBILEVEL_DATA=FOLDER", "cache/thing.gz")
    )


def test_a_dead_server_and_a_cache_that_cannot_be_written_are_told(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with raises_with(data.DataError, str(tmp_path / "file"), path=f"{server.url}good/thing.gz"):
        fetch(server, "good", tmp_path / "file" / "thing.gz")
    with raises_with(data.DataError, "Connection refused", path="http://127.0.0.1:9/thing.gz"):
        files.download("http://127.0.0.1:9/thing.gz", tmp_path / "thing.gz", FILE, lambda *_: None)


def test_an_interrupt_leaves_nothing_and_an_old_file_stays(server, tmp_path):
    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    (tmp_path / "thing.gz").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        fetch(server, "good", tmp_path / "thing.gz", progress=interrupt)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"thing.gz": "old"}


def test_load_downloads_once_into_the_cache(server, cifar_archive, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    server.content = cifar_archive()
    file = files.File("cifar-10-binary.tar.gz", len(server.content), hashlib.sha256(server.content).hexdigest())
    here = files.DataSource(f"{server.url}good/", (file,), (0.5,) * 3, (0.5,) * 3)
    monkeypatch.setitem(files.SOURCES, "cifar-10", here)
    seen = []
    first = data.load("cifar-10", progress=lambda *args: seen.append(args))
    second = data.load("cifar-10")
    assert (tmp_path / "fedbilevel" / "data" / "cifar-10" / file.name).stat().st_size == file.size
    assert (server.asked, seen[-1]) == (1, (file.size, file.size))
    np.testing.assert_array_equal(first.train_images, second.train_images)


def test_the_bar_is_silent_off_a_terminal_and_ends_its_line_on_one(capsys, monkeypatch):
    files.bar("thing")(0, 10)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show = files.bar("thing")
    for done in (0, 5, 5, 10):
        show(done, 10)
    lines = capsys.readouterr().err
    assert lines.count("\r") == 3
    assert lines.endswith("\n")

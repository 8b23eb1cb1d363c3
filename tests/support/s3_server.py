"""A real S3 protocol server on the loopback (moto), which answers some requests with 503 SlowDown."""

import logging
import re
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_ERROR = "<Error><Code>{}</Code><Message>{}</Message><RequestId>1</RequestId></Error>"
_SLOW_DOWN = "503 Slow Down", _ERROR.format("SlowDown", "Please reduce your request rate.").encode()
_EXPIRED = "403 Forbidden", _ERROR.format("ExpiredToken", "The provided token has expired.").encode()


class S3Server:
    """host: the address at which it listens. `refuses`: given `METHOD PATH` of a request, whether it is answered with
    503. `expired`: names of access keys that are answered with 403. `requests`: all of them."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.refuses: Callable[[str], bool] = lambda request: False
        self.expired: set[str] = set()
        self.requests: list[str] = []
        self.refused = 0
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(host, 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://{host}:{self._server.port}"

    def _answer(self, environment: dict[str, Any], start: Any) -> Iterable[bytes]:
        request = f"{environment['REQUEST_METHOD']} {environment['PATH_INFO']}"
        self.requests.append(request)
        key = re.search("Credential=([^/]+)", environment.get("HTTP_AUTHORIZATION", ""))
        if (expired := key is not None and key[1] in self.expired) or self.refuses(request):
            self.refused += 1
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            status, body = _EXPIRED if expired else _SLOW_DOWN
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        answer: Iterable[bytes] = self._moto(environment, start)
        return answer

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def serving_s3(monkeypatch: pytest.MonkeyPatch, bucket: str, host: str = "127.0.0.1") -> Iterator[S3Server]:
    """A server with an empty bucket, and the environment by which fsspec finds it."""
    import s3fs

    server = S3Server(host)
    try:
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/moto-api/reset", method="POST")).close()
        for name, value in {
            "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
        yield server
    finally:
        server.close()

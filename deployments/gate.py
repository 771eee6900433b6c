"""The servers of `virnuc server up`, for requests to this machine and from their own pages alone: `-m deployments.gate NAME PORT`."""

import hmac
import sys
from base64 import b64encode
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

from virnuc_core.env_config import value_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

HOST: Final = "127.0.0.1"


class Gate:
    """Refuses requests with a foreign Host (DNS rebinding) or Origin (pages of other sites), and those without a password.

    Args:
        credentials: user:password of HTTP basic authentication; None where the application itself asks.
    """

    def __init__(self, app: "ASGIApp", port: int, credentials: str | None) -> None:
        self._app = app
        self._hosts = [f"{name}:{port}".removesuffix(":80") for name in (HOST, "localhost")]
        self._origins = [None, *(f"http://{host}" for host in self._hosts)]
        self._authorization = credentials and b"Basic " + b64encode(credentials.encode())

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answers a request, or passes it on."""
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: "Scope") -> "ASGIApp | None":
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts or headers.get("origin") not in self._origins:
            return PlainTextResponse("Requests to other host names or from other sites are refused.", 403)
        given = headers.get("authorization", "").encode()
        if (
            not self._authorization
            or scope["path"] == "/health"
            or hmac.compare_digest(given, self._authorization)
        ):
            return None
        wanted = {"WWW-Authenticate": 'Basic realm="virnuc"'}
        return PlainTextResponse("The password is in the output of `virnuc server up`.", 401, wanted)


def serve(name: str, port: int) -> None:
    """Serves Prefect or MLflow, which take their settings from the environment, until SIGTERM."""
    credentials = value_of("PREFECT_API_AUTH_STRING")
    if name == "prefect":  # its page has a form for the password, and its API asks for it
        gate = Gate(resolve_name("prefect.server.api.server:create_app")(final=True), port, None)
    else:
        gate = Gate(resolve_name("mlflow.server.fastapi_app:app"), port, credentials)
    uvicorn.run(gate, host=HOST, port=port, log_level="warning")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))

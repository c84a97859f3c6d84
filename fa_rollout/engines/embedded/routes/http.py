"""What the HTTP handlers share: JSON in and out, and errors in SGLang's words."""

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from fa_rollout.engines.embedded.errors import EngineStopped, RefusedRequest
from fa_rollout.engines.embedded.routes.protocol import bad_body

Body = TypeVar("Body", bound=msgspec.Struct)


def json_response(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """The JSON object of a body; no body is an empty one."""
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_body(str(error)) from error


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Our own errors as SGLang words them; others are aiohttp's 500."""
    try:
        response: web.StreamResponse = await handler(request)
    except RefusedRequest as error:
        return json_response(error.body, status=error.status)
    except EngineStopped as error:
        return json_response({"error": {"message": str(error)}}, status=503)
    return response

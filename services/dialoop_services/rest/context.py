"""The part of gRPC's context that a servicer's method may use, for calls over REST."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from dialoop.errors import ERRORS_BY_STATUS, InternalError, Status

if TYPE_CHECKING:
    import grpc


class RestContext:
    """One call's context; holds a status once the method has set one."""

    def __init__(self) -> None:
        self._code: Any = None
        self._details = ""

    def invocation_metadata(self) -> tuple[()]:
        """No metadata: headers are REST's own business."""
        return ()

    def set_code(self, code: grpc.StatusCode) -> None:
        """Keep the status, as the generated class does before it raises NotImplementedError."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Keep the text."""
        self._details = details

    def code(self) -> Any:
        """The status that was set; None before."""
        return self._code

    def details(self) -> str:
        """The text that was set."""
        return self._details

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call with the error of that status; the trailing metadata are gRPC's own."""
        number = code.value[0]
        known = number in set(Status)
        raise (ERRORS_BY_STATUS[Status(number)] if known else InternalError)(details)

"""Name a server of OpenAI's API that Dialoop does not run: an engine's, or a teacher's.

engine = "openai"

[inference.engine]
url = "http://127.0.0.1:8000/v1"
model = "my-model"

[scorer.reference_server]
url = "http://127.0.0.1:8000/v1"
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dialoop.clients.completions import Completions
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from pydantic import Field, ValidationError

from dialoop_services.config.values import Section

if TYPE_CHECKING:
    from dialoop.tokens.tokenizer import Tokenizer


class OutsideServer(Section):
    """A server of OpenAI's completions."""

    url: str = Field(pattern=r"^https?://")
    """Address of its API, as "http://127.0.0.1:8000/v1"."""
    model: str = ""
    """Name of the model it serves; empty: the only one."""
    key_variable: str = "OPENAI_API_KEY"
    """Variable of the environment that holds its key; a server without keys needs none."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that one request may take."""

    @property
    def api_key(self) -> str:
        """Return the key, empty if the variable is not set."""
        return os.environ.get(self.key_variable, "")

    def completions(self, tokenizer: Tokenizer) -> Completions:
        """Return the client of its completions; InvalidConfig (PACKAGE_MISSING) without openai."""
        return Completions(
            self.url,
            tokenizer=tokenizer,
            model=self.model,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
        )


def outside_server(options: Mapping[str, Any]) -> OutsideServer:
    """Return the server that [inference.engine] names; InvalidConfig where it names none."""
    try:
        return OutsideServer(**options)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidConfig(
            f"{'.'.join(map(str, first['loc']))} in [inference.engine]: {first['msg']}.",
            reason=Reason.ENGINE_NOT_FOUND,
            remedy='engine = "openai" needs the server\'s address: url = "http://host:port/v1".',
        ) from error

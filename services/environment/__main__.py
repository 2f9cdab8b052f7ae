"""`python -m services.environment`: serve until told to stop."""

from __future__ import annotations

from services.environment.serving import serving
from services.environment.settings import EnvironmentSettings
from services.runtime import load, run


async def main() -> None:
    """Serve the environments of the settings."""
    async with serving(load(EnvironmentSettings)) as server:
        await server.wait_until_stopped()


if __name__ == "__main__":
    run(main, name="environment")

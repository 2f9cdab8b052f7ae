"""`python -m dialoop_services.environment`: serve until told to stop."""

from __future__ import annotations

from dialoop_services.environment.serving import serving_on
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.hosting import Host, OwnProcess
from dialoop_services.runtime import load, run


async def main() -> None:
    """Serve the environments of the settings."""
    settings = load(EnvironmentSettings)
    await serve_in(OwnProcess(settings), settings)


async def serve_in(host: Host, settings: EnvironmentSettings) -> None:
    """Serve until the host stops the service."""
    async with serving_on(host.server, settings, connect=host.connect):
        await host.server.wait_until_stopped()


if __name__ == "__main__":
    run(main, name="environment", settings=EnvironmentSettings)

"""Run `dialoop completion`: print a shell's script that completes commands, options and files.

eval "$(dialoop completion bash)" completes in this shell; a line of ~/.bashrc does so in each.
"""

from __future__ import annotations

import argparse

from dialoop_ops.cli.console import say
from dialoop_ops.cli.main import parser


def completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab  # here, since no other command needs it

    say(shtab.complete(parser(), shell=arguments.shell))
    return 0

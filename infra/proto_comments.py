"""Print the comments of the protos as JSON, by full name: what REST's documents say of each field.

python infra/proto_comments.py descriptors.binpb > client/dialoop/v1/comments.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb

# Field numbers of descriptor.proto that make up the path of a comment.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _NESTED, _VALUE, _METHOD = 2, 3, 2, 2

Path_ = tuple[int, ...]


def comments_of(file: pb.FileDescriptorProto) -> dict[str, str]:
    """Return every comment of a file, by the full name of what it stands above."""
    names = dict(_names(file))
    return {
        f"{file.package}.{names[tuple(place.path)]}": " ".join(place.leading_comments.split())
        for place in file.source_code_info.location
        if place.leading_comments and tuple(place.path) in names
    }


def _names(file: pb.FileDescriptorProto) -> Iterator[tuple[Path_, str]]:
    for index, message in enumerate(file.message_type):
        yield from _names_of_message((_MESSAGE, index), message.name, message)
    for index, enum in enumerate(file.enum_type):
        yield (_ENUM, index), enum.name
        for place, value in enumerate(enum.value):
            yield (_ENUM, index, _VALUE, place), f"{enum.name}.{value.name}"
    for index, service in enumerate(file.service):
        yield (_SERVICE, index), service.name
        for place, method in enumerate(service.method):
            yield (_SERVICE, index, _METHOD, place), f"{service.name}.{method.name}"


def _names_of_message(
    path: Path_, name: str, message: pb.DescriptorProto
) -> Iterator[tuple[Path_, str]]:
    yield path, name
    for index, field in enumerate(message.field):
        yield (*path, _FIELD, index), f"{name}.{field.name}"
    for index, nested in enumerate(message.nested_type):
        yield from _names_of_message((*path, _NESTED, index), f"{name}.{nested.name}", nested)


def main() -> None:
    """Read the descriptor set named on the command line, and print its comments."""
    files = pb.FileDescriptorSet.FromString(Path(sys.argv[1]).read_bytes()).file
    comments = {name: text for file in files for name, text in comments_of(file).items()}
    sys.stdout.write(json.dumps(comments, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Domain values to protobuf messages and back; the only place that knows both.

A domain value or a message enters, and its counterpart leaves. Nothing here calls a service.
"""

"""Domain values to protobuf messages and back; the only place that knows both.

A domain value or a message enters, and its counterpart leaves. Nothing here calls a service.
"""

from dialoop.wire.messages import chat_history_from_proto as chat_history_from_proto
from dialoop.wire.messages import chat_history_to_proto as chat_history_to_proto
from dialoop.wire.messages import history_from_proto as history_from_proto
from dialoop.wire.messages import history_to_proto as history_to_proto
from dialoop.wire.messages import log_probs_from_proto as log_probs_from_proto
from dialoop.wire.messages import log_probs_to_proto as log_probs_to_proto
from dialoop.wire.messages import logprobs_from_proto as logprobs_from_proto
from dialoop.wire.messages import logprobs_to_proto as logprobs_to_proto
from dialoop.wire.messages import masks_from_proto as masks_from_proto
from dialoop.wire.messages import masks_to_proto as masks_to_proto
from dialoop.wire.messages import message_from_proto as message_from_proto
from dialoop.wire.messages import message_to_proto as message_to_proto
from dialoop.wire.messages import text_from_proto as text_from_proto
from dialoop.wire.messages import text_to_proto as text_to_proto
from dialoop.wire.messages import token_ids_to_proto as token_ids_to_proto
from dialoop.wire.messages import tokens_from_proto as tokens_from_proto
from dialoop.wire.messages import tokens_to_proto as tokens_to_proto
from dialoop.wire.messages import tool_from_proto as tool_from_proto
from dialoop.wire.messages import tool_to_proto as tool_to_proto
from dialoop.wire.records import failure_from_proto as failure_from_proto
from dialoop.wire.records import failure_to_proto as failure_to_proto
from dialoop.wire.records import group_from_proto as group_from_proto
from dialoop.wire.records import group_to_proto as group_to_proto
from dialoop.wire.records import policy_version_from_proto as policy_version_from_proto
from dialoop.wire.records import policy_version_to_proto as policy_version_to_proto
from dialoop.wire.records import reward_from_proto as reward_from_proto
from dialoop.wire.records import reward_to_proto as reward_to_proto
from dialoop.wire.records import sampling_from_proto as sampling_from_proto
from dialoop.wire.records import sampling_to_proto as sampling_to_proto
from dialoop.wire.records import task_from_proto as task_from_proto
from dialoop.wire.records import task_to_proto as task_to_proto
from dialoop.wire.records import token_values_from_proto as token_values_from_proto
from dialoop.wire.records import token_values_to_proto as token_values_to_proto
from dialoop.wire.records import trajectory_from_proto as trajectory_from_proto
from dialoop.wire.records import trajectory_to_proto as trajectory_to_proto
from dialoop.wire.sequences import column_to_proto as column_to_proto
from dialoop.wire.sequences import columns_of as columns_of
from dialoop.wire.sequences import sequence_from_proto as sequence_from_proto
from dialoop.wire.sequences import sequence_to_proto as sequence_to_proto

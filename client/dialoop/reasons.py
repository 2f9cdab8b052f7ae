"""Every reason for which something is refused, or a group dropped: names for programs to match.

error.reason is Reason.SESSION_LOST  # also true of an error that came over the wire
Reason.SESSION_LOST.meaning          # "There is no such session (any more)."

Product code names reasons by these members. `OtherReason` is for reasons that are none of them: an
environment's own, or a newer service's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class _Named(StrEnum):
    """A reason that goes over the wire as its value, with its meaning in a sentence."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class OtherReason(str):
    """A reason that this release does not know: `OtherReason("BOARD_LOCKED")`."""

    __slots__ = ()


def reason_of(text: str) -> Reason | OtherReason:
    """Return the reason that came over the wire as `text`, known here or not."""
    try:
        return Reason(text)
    except ValueError:
        return OtherReason(text)


class DropReason(_Named):
    """Why the queue dropped a group or played trajectories.

    A group that a scorer or trainer refuses is dropped under the refusal's `Reason` in lower case;
    so is one whose answers took too long, or under which an engine or service died.
    """

    ABANDONED = "abandoned", "The evaluation that the group belongs to was given up."
    COLLECTOR_FAILED = "collector_failed", "The collector failed while it played the group."
    CONSTRAINED_SAMPLING = (
        "constrained_sampling",
        "Answers were held to a form, so their tokens are no draws from the policy.",
    )
    DEAD_LETTER = "dead_letter", "The group was delivered too often, or could not be used."
    DEAD_LETTER_FORGOTTEN = (
        "dead_letter_forgotten",
        "A dead letter that was dropped to make room for newer ones.",
    )
    DROPPED_OLDEST = (
        "dropped_oldest",
        "The group waited longest when another came and max_waiting_groups were waiting.",
    )
    LEASE_EXPIRED = "lease_expired", "The holder of the lease did not come back."
    MEMBER_FAILED = "member_failed", "A member of the group could not be played."
    MEMBER_RETRIED = "member_retried", "Members that were played again; counted in trajectories."
    NO_FEEDBACK = "no_feedback", "The loss learns from failed checks, and no reward names one."
    NO_REWARD = "no_reward", "Fewer than two members have a reward to compare: functions gave None."
    NO_ROOM = (
        "no_room",
        "The group was played while max_waiting_groups were waiting, and found no room.",
    )
    NO_TRAINABLE_TOKEN = "no_trainable_token", "No token of the group was sampled."
    REFUSED = "refused", "Every update on its batch was refused, since one was not finite."
    SCORER_FAILED = "scorer_failed", "The scorer could not score the group."
    SERVICE_AWAY = "service_away", "A service that the group needed was away for too long."
    SHUTDOWN = "shutdown", "The worker stopped."
    STALE = "stale", "The group's oldest token lags too far behind the policy."
    SUCCESS_RATE = (
        "success_rate",
        "The share of successes is outside the bounds of [train.candidates].",
    )
    TRAINER_RESTARTED = "trainer_restarted", "The trainer that held the group was started again."
    TRAINER_STOPPED = "trainer_stopped", "The trainer ended before the group's turn."
    TRUNCATED_SAMPLING = (
        "truncated_sampling",
        "The sampling parameters cut off part of the distribution.",
    )
    TURNS_SPENT = (
        "turns_spent",
        "The collector had played [collector] total_turns; the limit follows: turns_spent_200.",
    )
    UNIFORM_REWARD = (
        "uniform_reward",
        "All members have the same reward: there is nothing to learn.",
    )


class Reason(_Named):
    """Why a call or a config was refused, or an episode failed."""

    ADAPTERS_DISABLED = "ADAPTERS_DISABLED", "The replica serves no adapters."
    ADAPTERS_NEED_16_BITS = "ADAPTERS_NEED_16_BITS", "vLLM on CUDA has none in float32."
    ADAPTER_LOST = "ADAPTER_LOST", "New weights were loaded; the adapter belonged to those before."
    ADAPTER_MISMATCH = "ADAPTER_MISMATCH", "The adapter does not fit the model."
    ADAPTER_NOT_FINITE = "ADAPTER_NOT_FINITE", "The adapter has numbers that are not finite."
    ADAPTER_NOT_FOUND = "ADAPTER_NOT_FOUND", "No adapter of that name is loaded."
    ADAPTER_NOT_IN_USE = "ADAPTER_NOT_IN_USE", "The engine took the adapter and ignores it."
    ADAPTER_REFUSED = "ADAPTER_REFUSED", "PEFT does not take the adapter."
    ADAPTER_UNSUPPORTED = "ADAPTER_UNSUPPORTED", "The adapter uses an unsupported feature."
    ADMIN_ONLY = "ADMIN_ONLY", "Only the holder of the admin token may do this."
    GGUF_UNREADABLE = (
        "GGUF_UNREADABLE",
        "The GGUF file is torn, or its architecture or quantisation is not read.",
    )
    MODEL_LARGER_THAN_MEMORY = (
        "MODEL_LARGER_THAN_MEMORY",
        "The model does not fit the memory that is free.",
    )
    SCOPE_MISSING = "SCOPE_MISSING", "The token may do other things, and not this."
    AGENT_FAILED = "AGENT_FAILED", "The agent failed."
    AGENT_NOT_FOUND = "AGENT_NOT_FOUND", "The agent cannot be imported."
    AGENT_TIMED_OUT = "AGENT_TIMED_OUT", "The agent did not finish in time."
    ALREADY_CONSUMED = "ALREADY_CONSUMED", "The group was consumed before."
    ALREADY_DROPPED = "ALREADY_DROPPED", "The group was dropped before."
    ALREADY_EXISTS = "ALREADY_EXISTS", "The id is taken by something different."
    ALREADY_SCORED = "ALREADY_SCORED", "The group has a scored copy."
    ANSWER_TIMED_OUT = (
        "ANSWER_TIMED_OUT",
        "Sampling the answer took longer than the replica allows for its max_new_tokens.",
    )
    ASLEEP = "ASLEEP", "The trainer has the replica's device for now."
    ATTENTION_NOT_PLAIN = (
        "ATTENTION_NOT_PLAIN",
        "Packed attention cannot do what the model asks of it.",
    )
    ATTENTION_PLAN_MISSING = (
        "ATTENTION_PLAN_MISSING",
        "Packed attention needs a packed row and its plan.",
    )
    BAD_ANSWER = "BAD_ANSWER", "The task's reference answer is malformed."
    BAD_PARTIAL_ANSWER = (
        "BAD_PARTIAL_ANSWER",
        "What another replica sampled of the answer cannot begin it.",
    )
    BAD_COMPAT = "BAD_COMPAT", "`compat` names no known format."
    BAD_COLUMN = (
        "BAD_COLUMN",
        "A column of a sequence has bytes, a shape or a name that do not fit.",
    )
    BAD_CONTEXT = "BAD_CONTEXT", "num_context_messages is out of range."
    BAD_EXTRA = "BAD_EXTRA", "The request's extra field is malformed."
    BAD_GZIP = "BAD_GZIP", "The body is not one whole gzip member."
    BAD_OPTIONS = "BAD_OPTIONS", "The environment does not take these options."
    BAD_PADDING = "BAD_PADDING", "These turns cannot be padded so."
    BAD_PAGE_SIZE = "BAD_PAGE_SIZE", "page_size is out of range."
    BAD_PAGE_TOKEN = "BAD_PAGE_TOKEN", "page_token was not given out by this source."
    BAD_RECORDING_ID = "BAD_RECORDING_ID", "The recording_id cannot be part of a URL."
    BAD_ROW = "BAD_ROW", "A row of the data set is malformed, or lacks a column."
    BAD_RUN = "BAD_RUN", "The run's name is empty, too long or has other characters."
    BAD_SANDBOX_LEVEL = "BAD_SANDBOX_LEVEL", "No sandbox level has that name."
    BASE_MISMATCH = "BASE_MISMATCH", "The adapter was trained on other weights than the replica's."
    BATCH_OF_HISTORIES = (
        "BATCH_OF_HISTORIES",
        "A batch of histories was given where one is expected.",
    )
    BATCH_SIZE = "BATCH_SIZE", "The TorchRL environment is a batch."
    BEAMS_UNSUPPORTED = "BEAMS_UNSUPPORTED", "Beam search gives no sample of the policy."
    BROWSER_MISSING = "BROWSER_MISSING", "A browser needs the package playwright."
    BUSY = "BUSY", "Another request is at work on the same thing."
    CALLER_LEFT = "CALLER_LEFT", "The caller ended the call."
    CANCELLED = "CANCELLED", "The call was cancelled."
    CANNOT_LISTEN = "CANNOT_LISTEN", "The address cannot be listened on."
    CAPACITY = "CAPACITY", "There is no room now."
    CHANNEL_CLOSED = "CHANNEL_CLOSED", "The client was closed."
    CHECKPOINT_MISMATCH = "CHECKPOINT_MISMATCH", "The checkpoint is of another model or optimiser."
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH", "Bytes arrived that are not those that were sent."
    CLIENT_CLOSED = "CLIENT_CLOSED", "The blocking client is closed."
    CLOSE_FAILED = "CLOSE_FAILED", "The environment failed while it closed."
    CONFIRM_RUN = "CONFIRM_RUN", "A purge must repeat the run's name."
    CONTAINER_LOST = "CONTAINER_LOST", "The sandbox's container is gone."
    CONTEXT_FULL = "CONTEXT_FULL", "The tokens do not fit the model's context."
    CONTEXT_LENGTH_EXCEEDED = (
        "CONTEXT_LENGTH_EXCEEDED",
        "The prompt does not fit the model's context.",
    )
    CORRECTION_AGAINST_REFERENCE = (
        "CORRECTION_AGAINST_REFERENCE",
        "This correction compares with the sampler only.",
    )
    CORRECTION_WITHOUT_ADVANTAGES = (
        "CORRECTION_WITHOUT_ADVANTAGES",
        "The loss reads no advantages to correct.",
    )
    CURSOR_MOVED = "CURSOR_MOVED", "Another collector offered that page."
    DATA_KEY_MISSING = "DATA_KEY_MISSING", "The reset's data lacks the key with the question."
    DATA_MISSING = "DATA_MISSING", "The reset brings no question."
    DATA_PLANE_FAILED = "DATA_PLANE_FAILED", "A data plane of the user's own failed."
    DATA_PLANE_NOT_FOUND = "DATA_PLANE_NOT_FOUND", "The data plane cannot be imported, or is none."
    DATA_PLANE_UNAVAILABLE = "DATA_PLANE_UNAVAILABLE", "The engine does not take weights that way."
    DATA_UNREADABLE = "DATA_UNREADABLE", "The path holds no data set that can be read."
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED", "The answer did not come in time."
    DELTA_BASE_MISSING = "DELTA_BASE_MISSING", "The replica lacks the policy that a delta changes."
    DENSE_REWARD_NOT_SUMMED = (
        "DENSE_REWARD_NOT_SUMMED",
        "A reward has one number for each token, and rewards are not summed.",
    )
    DIGEST_MISMATCH = "DIGEST_MISMATCH", "A group of that id has other content."
    EMPTY_BATCH = "EMPTY_BATCH", "There is no sequence to pack."
    EMPTY_PROMPT = "EMPTY_PROMPT", "A sequence must begin with a token that is not trained."
    EMPTY_SEGMENT = "EMPTY_SEGMENT", "A segment has text or tokens, not both."
    EMPTY_SEQUENCE = "EMPTY_SEQUENCE", "A sequence has too few tokens."
    ENGINE_DIED = "ENGINE_DIED", "The engine failed while it worked on the request."
    ENGINE_FAILED = "ENGINE_FAILED", "The inference engine failed."
    ENGINE_NOT_FOUND = "ENGINE_NOT_FOUND", "The engine cannot be imported."
    ENVIRONMENT_FAILED = "ENVIRONMENT_FAILED", "The foreign environment failed."
    ENVIRONMENT_NOT_FOUND = "ENVIRONMENT_NOT_FOUND", "No environment of that name can be loaded."
    ENVIRONMENT_UNAVAILABLE = (
        "ENVIRONMENT_UNAVAILABLE",
        "The foreign environment cannot be reached.",
    )
    EPISODE_DONE = "EPISODE_DONE", "The episode is over."
    EPISODE_TIMED_OUT = "EPISODE_TIMED_OUT", "The episode did not end in time."
    EPISODE_MISSING = "EPISODE_MISSING", "The step names no episode."
    ESTIMATOR_FAILED = "ESTIMATOR_FAILED", "The advantage estimator failed."
    ESTIMATOR_NOT_FOUND = "ESTIMATOR_NOT_FOUND", "The advantage estimator cannot be imported."
    EVENT_LOOP_RUNNING = (
        "EVENT_LOOP_RUNNING",
        "A blocking client would stop the running event loop.",
    )
    EVERY_GROUP_FAILED = (
        "EVERY_GROUP_FAILED",
        "Many groups failed while they were played, and none was ever finished.",
    )
    EXPORT_EXISTS = "EXPORT_EXISTS", "The export's folder exists."
    EXPORT_FAILED = "EXPORT_FAILED", "The policy could not be exported."
    FAILED_PRECONDITION = "FAILED_PRECONDITION", "The request does not fit the present state."
    FIELD_MISSING = "FIELD_MISSING", "A required field is missing."
    FIRST_TOKEN_HAS_LOGPROB = "FIRST_TOKEN_HAS_LOGPROB", "The first token has a log-prob."
    FOREIGN_HOST = "FOREIGN_HOST", "Without a token only loopback names are answered."
    FOREIGN_ORIGIN = "FOREIGN_ORIGIN", "A browser page of another origin sent the request."
    FULL_MISSING = "FULL_MISSING", "The history has no `full`."
    FULL_NOT_PROMPT_AND_RESPONSE = (
        "FULL_NOT_PROMPT_AND_RESPONSE",
        "`full` is not the prompt and then the response.",
    )
    FUNCTION_FAILED = "FUNCTION_FAILED", "The function in the sandbox failed."
    FUNCTION_TIMEOUT = "FUNCTION_TIMEOUT", "The function in the sandbox took too long."
    FOREIGN_STACK = (
        "FOREIGN_STACK",
        "Another user has named the addresses to which a token would go.",
    )
    FUTURE_VERSION = "FUTURE_VERSION", "Tokens claim a policy version that was never announced."
    GPU_IN_USE = "GPU_IN_USE", "Another stack has the GPU."
    GPU_MEMORY_TAKEN = "GPU_MEMORY_TAKEN", "The GPU has less free memory than the job needs."
    GREEDY_SAMPLING = "GREEDY_SAMPLING", "Tokens sampled at temperature 0 have no probability."
    GROUP_INCOMPLETE = "GROUP_INCOMPLETE", "The group lacks trajectories that can be scored."
    GROUP_MISMATCH = "GROUP_MISMATCH", "The trajectory names another group."
    GROUP_NOT_FOUND = "GROUP_NOT_FOUND", "There is no such dead letter."
    GROUP_TOO_SMALL = "GROUP_TOO_SMALL", "A group of one trajectory has no other to compare with."
    HALF_CHARACTER = "HALF_CHARACTER", "A text has half of a surrogate pair."
    HISTORY_MODE_ONLY = "HISTORY_MODE_ONLY", "The environment's transforms need messages."
    HISTORY_REWRITTEN = "HISTORY_REWRITTEN", "The history does not begin with the prompt."
    INPUT_ENDED = "INPUT_ENDED", "The input ended before the episode did."
    INTERNAL = "INTERNAL", "A bug in Dialoop: look up the error_id in the service's log."
    INVALID_ADAPTER_CONFIG = "INVALID_ADAPTER_CONFIG", "adapter_config_json is malformed."
    INVALID_ADAPTER_NAME = "INVALID_ADAPTER_NAME", "The manifest names no adapter."
    INVALID_CONFIG = "INVALID_CONFIG", "A setting is unknown, missing or out of range."
    INVALID_FIELDS = "INVALID_FIELDS", "Several fields are malformed."
    INVALID_CONSTRAINT = "INVALID_CONSTRAINT", "The engine cannot hold answers to that form."
    INVALID_FIELD = "INVALID_FIELD", "A field is malformed."
    INVALID_HISTORY = "INVALID_HISTORY", "The history breaks its contract."
    INVALID_INPUT = "INVALID_INPUT", "The request or value is wrong."
    INVALID_HTTP = "INVALID_HTTP", "What was sent is not HTTP/1.1."
    INVALID_JSON = "INVALID_JSON", "The body is no JSON object."
    INVALID_PROTOBUF = "INVALID_PROTOBUF", "The body is no message of the expected type."
    INVALID_SAMPLING = "INVALID_SAMPLING", "A sampling parameter is out of range."
    INVALID_SEQUENCE = "INVALID_SEQUENCE", "Token ids, segments and log-probs do not agree."
    INVALID_TEMPERATURE = "INVALID_TEMPERATURE", "Log-probs at this temperature are undefined."
    INVALID_TURN = "INVALID_TURN", "A turn spans messages that are not there."
    JOB_FAILED = "JOB_FAILED", "The training job ended before it was done."
    KERNEL_NEEDS_HALF_PRECISION = (
        "KERNEL_NEEDS_HALF_PRECISION",
        "The log-prob kernel needs half precision.",
    )
    KERNEL_NOT_INSTALLED = "KERNEL_NOT_INSTALLED", "The log-prob kernel's package is missing."
    KERNEL_NEEDS_PLAIN_HEAD = (
        "KERNEL_NEEDS_PLAIN_HEAD",
        "The log-prob kernel computes neither biases nor soft caps of a head.",
    )
    KERNEL_WITHOUT_ENTROPY = "KERNEL_WITHOUT_ENTROPY", "The log-prob kernel gives no entropy."
    LEASE_LOST = "LEASE_LOST", "The lease ran out, or belongs to another attempt."
    LENGTHS_MISSING = "LENGTHS_MISSING", "Padded rows came without their lengths."
    LINEAGE_MISMATCH = "LINEAGE_MISMATCH", "The policy version is of another lineage."
    LOCKS_OF_OTHERS = "LOCKS_OF_OTHERS", "The folder of locks is not this user's alone."
    LORA_TARGET = "LORA_TARGET", "The model has no linear layer of that name."
    LOSS_FAILED = "LOSS_FAILED", "The loss function raised, or returned no scalar to differentiate."
    LOSS_INPUT_MISSING = "LOSS_INPUT_MISSING", "The loss needs an input that is not there."
    MANIFEST_MISMATCH = "MANIFEST_MISMATCH", "The weights do not fit their manifest."
    MASK_UNAVAILABLE = "MASK_UNAVAILABLE", "The template cannot tell which tokens are whose."
    MCP_GONE = "MCP_GONE", "The MCP server ended."
    MCP_MISSING = "MCP_MISSING", "MCP tools need the package mcp."
    MCP_TOOL_MISSING = "MCP_TOOL_MISSING", "The MCP server lacks a tool."
    MCP_UNREACHABLE = "MCP_UNREACHABLE", "The MCP server cannot be used."
    MEMBER_NOT_FOUND = "MEMBER_NOT_FOUND", "No instance of that name and epoch is there."
    MEMBER_MOVED = "MEMBER_MOVED", "The addresses of an instance that has joined do not change."
    MEMBER_REPLACED = "MEMBER_REPLACED", "Another instance has taken the name."
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE", "The message is larger than the limit."
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED", "The route has no such method."
    MLGYM_FAILED = "MLGYM_FAILED", "MLGym failed."
    MODEL_FAILED = "MODEL_FAILED", "The tiny model could not be made."
    MODEL_INCOMPLETE = "MODEL_INCOMPLETE", "The model directory lacks a file."
    MODEL_IS_ADAPTER = "MODEL_IS_ADAPTER", "The model directory holds an adapter, not a model."
    MODEL_MISSING = "MODEL_MISSING", "There is no model directory."
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND", "No model or adapter has that name."
    MODEL_NOT_PACKABLE = "MODEL_NOT_PACKABLE", "The model cannot be trained on packed rows."
    MODEL_NOT_PUBLISHABLE = (
        "MODEL_NOT_PUBLISHABLE",
        "The model's weights have no place in its checkpoint.",
    )
    MODEL_NOT_SHARDABLE = "MODEL_NOT_SHARDABLE", "The model has no list of layers to shard."
    MODEL_READ_OTHERWISE = "MODEL_READ_OTHERWISE", "vLLM would compute another model."
    MODEL_TENSORS_DIFFER = (
        "MODEL_TENSORS_DIFFER",
        "The checkpoint lacks tensors of its architecture, or holds others.",
    )
    MODEL_UNKNOWN = "MODEL_UNKNOWN", "The installed transformers has no class for the model."
    MOVED = "MOVED", "A process came back on another machine, so the job starts again."
    NCCL_UNUSABLE = "NCCL_UNUSABLE", "vLLM would send and receive no weights over this NCCL."
    NEEDS_CUDA = "NEEDS_CUDA", "The data plane needs a CUDA device."
    NEEDS_SESSION = "NEEDS_SESSION", "The environment remembers more than the messages."
    NON_FINITE_REWARD = "NON_FINITE_REWARD", "A reward is not finite."
    NON_FINITE = "NON_FINITE", "A number is not finite."
    NOT_AN_ADAPTER = "NOT_AN_ADAPTER", "The policy is whole: there is no adapter to merge."
    NOT_AN_AGENT = "NOT_AN_AGENT", "The agent is not a function."
    NOTHING_SAMPLED = "NOTHING_SAMPLED", "The policy sampled no token in the episode."
    NODES_DIFFER = "NODES_DIFFER", "The trainer's machines cannot train with each other."
    NODE_MISSING = "NODE_MISSING", "A machine of the trainer did not come, or is not reached."
    NOT_AN_ENVIRONMENT = "NOT_AN_ENVIRONMENT", "The object is not an environment."
    NOT_A_GAME = "NOT_A_GAME", "The environment is not a game."
    NOT_A_RUN = "NOT_A_RUN", "The folder is no run of Dialoop."
    NOT_A_TEXT_ENVIRONMENT = "NOT_A_TEXT_ENVIRONMENT", "The object is not a text environment."
    NOT_FOUND = "NOT_FOUND", "The named thing does not exist (any more)."
    NOT_OK = "NOT_OK", "The program ended with an error."
    NOT_PARSEABLE = "NOT_PARSEABLE", "Give either text or token_ids to parse."
    NOT_READY = "NOT_READY", "The service is not ready yet, or no longer."
    NOT_RESET = "NOT_RESET", "No episode runs."
    NOT_SCORED = "NOT_SCORED", "The group has no scored copy yet."
    NOT_SERVED = "NOT_SERVED", "The rpc is not served here."
    NOT_THE_FIRST_RANK = "NOT_THE_FIRST_RANK", "Only the first rank calls collective methods."
    NO_ADDRESS = "NO_ADDRESS", "No service of that kind was named."
    NO_ADVANTAGE = "NO_ADVANTAGE", "Sampled tokens have no advantage."
    NO_CHECKPOINT = "NO_CHECKPOINT", "There is no checkpoint."
    NO_DEMONSTRATIONS = "NO_DEMONSTRATIONS", "The environment demonstrates nothing."
    NO_DEVICE = "NO_DEVICE", "A GPU was named, and driver or torch have none like it."
    NO_DEVICE_LOCK = "NO_DEVICE_LOCK", "The device's lock file cannot be locked."
    NO_END_OF_TURN = "NO_END_OF_TURN", "Nothing ends an answer but its length."
    NO_INFERENCE = "NO_INFERENCE", "The environments have no inference service to sample from."
    NO_EPISODE = "NO_EPISODE", "No tool of an episode is running."
    NO_FEEDBACK = "NO_FEEDBACK", "The loss learns from failed checks, and no reward names one."
    NO_PARSER = "NO_PARSER", "The chat template has no parser that reads its text back."
    NO_RAY = "NO_RAY", "Ray is not installed, or its cluster does not take the job."
    NO_REDIS = "NO_REDIS", "There is no Redis to use or to start."
    NO_REFERENCE_MODEL = "NO_REFERENCE_MODEL", "The scorer has no reference model."
    NO_REST_ADDRESS = "NO_REST_ADDRESS", "Agents need a REST address of each replica."
    NO_REWARD = "NO_REWARD", "Fewer than two of the group's trajectories have a reward to compare."
    NO_SLURM = "NO_SLURM", "Slurm is not here, or does not take the job."
    NO_STACK = "NO_STACK", "No stack is serving."
    NO_TASKS = "NO_TASKS", "The split is empty."
    NO_TOKENS = "NO_TOKENS", "There are no token ids."
    NO_ROOM = "NO_ROOM", "As many groups wait in the queue as it may keep."
    NO_TRAINABLE_TOKEN = "NO_TRAINABLE_TOKEN", "No token of the group was sampled."
    NO_ROUTED_EXPERTS = (
        "NO_ROUTED_EXPERTS",
        "The engine or the model cannot say which experts compute a token, or take them.",
    )
    NO_VLLM = "NO_VLLM", "vLLM is not installed."
    NO_WEIGHTS_ROOT = "NO_WEIGHTS_ROOT", "The replica has no weights root to read from."
    NO_WEIGHTS = "NO_WEIGHTS", "The model directory has no .safetensors file."
    OPENS_SLOWLY = "OPENS_SLOWLY", "Beginning an episode takes a call to another program."
    OPEN_FAILED = "OPEN_FAILED", "The environment failed while it opened."
    OPEN_TIMEOUT = "OPEN_TIMEOUT", "The environment did not open in time."
    OPTIMIZER_MISMATCH = "OPTIMIZER_MISMATCH", "The checkpoint is of another optimiser."
    OPTIMIZER_NOT_FOUND = "OPTIMIZER_NOT_FOUND", "The optimiser cannot be imported, or is none."
    OPTION_RESERVED = (
        "OPTION_RESERVED",
        "The name is an argument of rendering, not a template option.",
    )
    OTHER_INCARNATION = (
        "OTHER_INCARNATION",
        "Another incarnation of the service listens at the address.",
    )
    OTHER_WEIGHTS = "OTHER_WEIGHTS", "A replica's log-probs are not those of the policy it loaded."
    OUTPUT_TOO_LARGE = (
        "OUTPUT_TOO_LARGE",
        "An environment adds more text than any policy reads.",
    )
    OUT_OF_RANGE = "OUT_OF_RANGE", "A number is out of range."
    PACKAGE_MISSING = "PACKAGE_MISSING", "An optional package is missing."
    PARTS_UNSUPPORTED = "PARTS_UNSUPPORTED", "A message has a part that is not text."
    PATH_MISMATCH = "PATH_MISMATCH", "A field in the body differs from the path."
    PAUSED = "PAUSED", "The replica is paused."
    PEFT_MISSING = "PEFT_MISSING", "Adapters need the package peft."
    PERMISSION_DENIED = "PERMISSION_DENIED", "The caller may not do this."
    PLAN_TOO_LARGE = "PLAN_TOO_LARGE", "The processes of the job do not fit on the machines."
    POLICY_GONE = "POLICY_GONE", "The weights of the policy were deleted."
    POLICY_NOT_FOUND = "POLICY_NOT_FOUND", "No policy, or several, match the version."
    PORT_TAKEN = "PORT_TAKEN", "No port is free."
    POSITIONS_NOT_RESTARTED = (
        "POSITIONS_NOT_RESTARTED",
        "position_ids do not restart with every sequence.",
    )
    PROBE_MISMATCH = "PROBE_MISMATCH", "The probe's log-probs are not those announced."
    PROMPT_AMBIGUOUS = "PROMPT_AMBIGUOUS", "Give exactly one form of the prompt."
    PROMPT_MISSING = "PROMPT_MISSING", "There is no prompt to respond to."
    PROMPT_NOT_PREFIX = "PROMPT_NOT_PREFIX", "The chat template rewrites earlier messages."
    PROMPT_NOT_RENDERED = (
        "PROMPT_NOT_RENDERED",
        "The recorded prompt is not what the chat template makes of its messages.",
    )
    QUERIES_MISSING = "QUERIES_MISSING", "There is no query."
    QUERY_UNSUPPORTED = "QUERY_UNSUPPORTED", "The environment plays its own tasks only."
    PUBLISH_TIMED_OUT = "PUBLISH_TIMED_OUT", "No replica loaded the policy in time."
    RAGGED = "RAGGED", "Lists that belong together differ in length."
    RANKS_DIFFER = "RANKS_DIFFER", "The ranks hold different policies."
    RANKS_OUT_OF_STEP = "RANKS_OUT_OF_STEP", "The ranks are closed or out of step."
    RANK_FAILED = "RANK_FAILED", "Another rank failed."
    RANK_REFUSED = "RANK_REFUSED", "Another rank refused the command."
    READ_FAILED = "READ_FAILED", "A file of the run could not be read."
    RECORDING_CLOSED = "RECORDING_CLOSED", "The recording is closed."
    RECORDING_EMPTY = "RECORDING_EMPTY", "No call of the recording was answered."
    RECORDING_EXISTS = "RECORDING_EXISTS", "There is another recording of that id."
    RECORDING_FULL = "RECORDING_FULL", "The recording takes no more calls."
    RECORDING_NOT_FOUND = "RECORDING_NOT_FOUND", "The replica has no such recording (any more)."
    REDIS_EVICTS = "REDIS_EVICTS", "Redis would delete the ledger when its memory is full."
    REDIS_TOO_OLD = "REDIS_TOO_OLD", "Redis is older than 6.2."
    REDO_DIFFERS = (
        "REDO_DIFFERS",
        "A step that was taken again got another answer than the first time.",
    )
    REQUEST_TOO_SLOW = "REQUEST_TOO_SLOW", "The request did not come in time."
    RESPONSE_MISSING = "RESPONSE_MISSING", "The response has no message of the policy's role."
    REWARD_BEFORE_END = (
        "REWARD_BEFORE_END",
        "A transform gave the episode's reward at a step that does not end the episode.",
    )
    RESULTS_DIFFER = "RESULTS_DIFFER", "Two evaluations are not of the same tasks."
    REWARD_FAILED = "REWARD_FAILED", "The reward function failed."
    REWARD_NOT_FINITE = "REWARD_NOT_FINITE", "A reward is not finite."
    REWARD_FORM = "REWARD_FORM", "The reward function has another form than its name says."
    REWARD_NOT_FOUND = "REWARD_NOT_FOUND", "The reward function cannot be imported."
    REWARD_TIMEOUT = "REWARD_TIMEOUT", "The reward function took too long."
    ROUTE_NOT_FOUND = "ROUTE_NOT_FOUND", "There is no such route."
    ROW_DOES_NOT_FIT = "ROW_DOES_NOT_FIT", "The sequences do not fit the packed row."
    ROW_LARGER_THAN_CACHE = (
        "ROW_LARGER_THAN_CACHE",
        "The longest row has no room in the engine's cache of keys and values.",
    )
    ROW_LARGER_THAN_MEMORY = (
        "ROW_LARGER_THAN_MEMORY",
        "A job with rows of that length needs more memory than there is.",
    )
    RUN_EXISTS = "RUN_EXISTS", "The run's folder exists and cannot be resumed."
    RUN_IN_USE = "RUN_IN_USE", "Another process uses the run's folder."
    RUN_NOT_FOUND = "RUN_NOT_FOUND", "The folder is no run of Dialoop."
    SAME_FAILURE = "SAME_FAILURE", "The trainer failed twice in the same way at one train step."
    SAMPLING_UNSUPPORTED = "SAMPLING_UNSUPPORTED", "The engine does not sample that way."
    SANDBOX_BUSY = "SANDBOX_BUSY", "All sandboxes are in use."
    SANDBOX_FAILED = "SANDBOX_FAILED", "The sandbox itself failed."
    SANDBOX_FULL = "SANDBOX_FULL", "Too many calls wait for a sandbox."
    SANDBOX_LEVEL_MISSING = "SANDBOX_LEVEL_MISSING", "The machine has no sandbox of that level."
    SCRIPT_ENDED = "SCRIPT_ENDED", "The scripted policy has no more answers."
    SEQUENCE_TOO_LONG = "SEQUENCE_TOO_LONG", "No sequence fits a row."
    SERVICE_AWAY = "SERVICE_AWAY", "A service was away for too long."
    SERVICE_CONFIG = "SERVICE_CONFIG", "A service refused its settings."
    SERVICE_DIED = (
        "SERVICE_DIED",
        "The connection to the service broke while it worked on the request.",
    )
    SERVICE_FAILED = "SERVICE_FAILED", "A service ended before it was ever ready."
    SESSION_BUSY = "SESSION_BUSY", "The session is at work on a step."
    SESSION_CONFLICT = "SESSION_CONFLICT", "The session is of another environment."
    SESSION_EXPIRED = "SESSION_EXPIRED", "The session expired unused."
    SESSION_LOST = "SESSION_LOST", "There is no such session (any more)."
    SEVERAL_AGENTS = "SEVERAL_AGENTS", "The foreign environment has several agents."
    SHARED_DEVICE = "SHARED_DEVICE", "Processes that have devices of their own cannot share one."
    SLEEP_DISABLED = "SLEEP_DISABLED", "The replica does not sleep."
    SNAPSHOT_TORN = (
        "SNAPSHOT_TORN",
        "An episode has no snapshot, or none that its environment can go on from.",
    )
    SPECIAL_TOKEN_SPELLED = (
        "SPECIAL_TOKEN_SPELLED",
        "A message or a tool spells out a special token.",
    )
    SPLIT_NOT_FOUND = "SPLIT_NOT_FOUND", "There is no such split."
    STEP_CANCELLED = "STEP_CANCELLED", "The step was cancelled."
    STEP_CONFLICT = "STEP_CONFLICT", "The step was asked for before, with other content."
    STEP_FAILED = "STEP_FAILED", "The environment failed in a step."
    STEP_GAP = "STEP_GAP", "The step comes too early."
    STEP_NOT_KEPT = "STEP_NOT_KEPT", "The run has not kept that train step."
    STEP_TIMEOUT = "STEP_TIMEOUT", "The step took too long."
    STILL_RUNNING = "STILL_RUNNING", "The program was still running when its time ran out."
    STILL_STOPPING = "STILL_STOPPING", "The stack is still stopping."
    STOPPING = "STOPPING", "The service is stopping."
    STORE_FORMAT = "STORE_FORMAT", "The queue's store has the run in another version's format."
    STORE_FULL = "STORE_FULL", "The queue's store is out of memory."
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE", "The queue's store does not answer."
    STREAM_CUT = "STREAM_CUT", "A stream of requests ended without its mark."
    STREAM_ENDED = "STREAM_ENDED", "The stream ended."
    TASK_AND_QUERY = "TASK_AND_QUERY", "Give a task or a question, not both."
    TASK_EMPTY = "TASK_EMPTY", "The task has no question."
    TASK_FILE_EMPTY = "TASK_FILE_EMPTY", "The task file has no tasks."
    TASK_NOT_FOUND = "TASK_NOT_FOUND", "The split has no such task."
    TEMPERATURE_DIFFERS = "TEMPERATURE_DIFFERS", "A turn was sampled at another temperature."
    TEMPLATE_CONFLICT = "TEMPLATE_CONFLICT", "The template's name is taken by other content."
    TEMPLATE_DROPS_FIELD = (
        "TEMPLATE_DROPS_FIELD",
        "The chat template leaves a text of a message out of the prompt.",
    )
    TEMPLATE_HIDES_ANSWERS = (
        "TEMPLATE_HIDES_ANSWERS",
        "The chat template does not show what the assistant wrote.",
    )
    TEMPLATE_INVALID = "TEMPLATE_INVALID", "The chat template does not parse."
    TEMPLATE_LIMIT = (
        "TEMPLATE_LIMIT",
        "The registered template takes more time or memory than it may.",
    )
    TEMPLATE_MISSING = "TEMPLATE_MISSING", "The tokenizer has no chat template."
    TEMPLATE_NOT_FOUND = "TEMPLATE_NOT_FOUND", "There is no such template."
    TEMPLATE_REFUSED = "TEMPLATE_REFUSED", "The chat template refuses the conversation."
    TEMPLATE_REWRITES_PAST = (
        "TEMPLATE_REWRITES_PAST",
        "The chat template rewrites earlier messages.",
    )
    TEMPLATE_UNSUPPORTED = (
        "TEMPLATE_UNSUPPORTED",
        "The template cannot show a spelled-out special token.",
    )
    TENSORDICT_MISSING = "TENSORDICT_MISSING", "TorchRL's containers do not import."
    TLS_FILE = "TLS_FILE", "A certificate, key or list of authorities cannot be used."
    TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH", "The service has another tokenizer."
    TOKENIZER_LARGER = (
        "TOKENIZER_LARGER",
        "The tokenizer has ids for which the model has no embedding.",
    )
    TOKENIZER_MISSING = "TOKENIZER_MISSING", "The environment has no tokenizer to render with."
    TOKENS_MODE_ONLY = "TOKENS_MODE_ONLY", "The environment's transforms read tokens."
    TICKET_EXPIRED = "TICKET_EXPIRED", "The ticket or its proof has ended, or a clock is wrong."
    TICKET_FOR_OTHER_SERVICE = (
        "TICKET_FOR_OTHER_SERVICE",
        "The proof was signed for a service of another role.",
    )
    TICKET_INVALID = "TICKET_INVALID", "The ticket was changed, or not signed for this job."
    TICKET_MISSING = "TICKET_MISSING", "Only an instance with a ticket of that role may do this."
    TICKET_NOT_YET_VALID = (
        "TICKET_NOT_YET_VALID",
        "The ticket or its proof was signed in the future: a clock is wrong.",
    )
    TICKET_OF_OTHER_MEMBER = (
        "TICKET_OF_OTHER_MEMBER",
        "The ticket is of another role or name.",
    )
    TICKET_OF_OTHER_RUN = "TICKET_OF_OTHER_RUN", "The ticket is of another run."
    TOKEN_FILE = "TOKEN_FILE", "The file of tokens and their scopes cannot be used."
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE", "A token id is outside the vocabulary."
    TOKEN_REQUIRED = "TOKEN_REQUIRED", "Without a token anyone on the network could call."
    TOKEN_WITHOUT_PREDICTOR = (
        "TOKEN_WITHOUT_PREDICTOR",
        "loss_mask counts a first token or padding.",
    )
    TOOLS_UNSUPPORTED = "TOOLS_UNSUPPORTED", "The chat template writes no tools."
    TOOL_FAILED = "TOOL_FAILED", "The tool failed."
    TOOL_INVALID = "TOOL_INVALID", "A tool is malformed."
    TOOL_TIMEOUT = "TOOL_TIMEOUT", "The tool took too long."
    TOOL_UNANNOTATED = "TOOL_UNANNOTATED", "The tool's function lacks an annotation or docstring."
    TOO_LARGE = "TOO_LARGE", "The groups do not fit one message."
    TOO_MANY_ADAPTERS = "TOO_MANY_ADAPTERS", "The replica holds no more adapters."
    TOO_MANY_ITEMS = "TOO_MANY_ITEMS", "The request has more items than may be sent at once."
    TOO_MANY_RECORDINGS = "TOO_MANY_RECORDINGS", "The replica holds no more recordings."
    TOP_K_TOO_LARGE = "TOP_K_TOO_LARGE", "k is less than 1, or more than there are to choose from."
    TRACKER_MISSING = "TRACKER_MISSING", "The tracker's package is missing."
    TRACKER_NOT_FOUND = "TRACKER_NOT_FOUND", "The tracker cannot be imported, or is none."
    TRACKER_REFUSED = "TRACKER_REFUSED", "The tracker cannot begin a run."
    TRAJECTORY_NOT_DONE = "TRAJECTORY_NOT_DONE", "The trajectory is not finished."
    TRAJECTORY_REPEATED = "TRAJECTORY_REPEATED", "Two trajectories of a group have one id."
    TRANSFER_FAILED = "TRANSFER_FAILED", "vLLM's transfer between devices failed."
    TRANSFER_NOT_CONNECTED = "TRANSFER_NOT_CONNECTED", "The replica has to be connected first."
    TRANSFORM_FAILED = "TRANSFORM_FAILED", "A transform of the environment failed."
    TRIAL_FAILED = "TRIAL_FAILED", "The trial failed."
    TURN_NOT_FOUND = "TURN_NOT_FOUND", "Nothing was sampled in that turn."
    UNAUTHENTICATED = "UNAUTHENTICATED", "The bearer token is missing or wrong."
    UNAVAILABLE = "UNAVAILABLE", "The service cannot be reached, or is not ready."
    UNIFORM_REWARD = "UNIFORM_REWARD", "No advantage of the group differs from 0."
    UNKNOWN_COLUMN = "UNKNOWN_COLUMN", "Rows have a column that nothing reads."
    UNKNOWN_FIELD = "UNKNOWN_FIELD", "A message has a field that is not known."
    UNKNOWN_INSTRUCTION = "UNKNOWN_INSTRUCTION", "There is no such instruction."
    UNKNOWN_KEY = "UNKNOWN_KEY", "The config has a key that is not known."
    UNKNOWN_LOSS_OPTION = "UNKNOWN_LOSS_OPTION", "The loss has no such option."
    UNKNOWN_LOSS = "UNKNOWN_LOSS", "There is no such loss."
    UNKNOWN_PART_TYPE = "UNKNOWN_PART_TYPE", "A content part has an unknown type."
    UNKNOWN_ROLE = "UNKNOWN_ROLE", "A message's role is a misspelt one."
    UNKNOWN_MODE = "UNKNOWN_MODE", "There is no such input mode."
    UNKNOWN_PARAMETERS = "UNKNOWN_PARAMETERS", "The weights' parameters are not the model's."
    UNKNOWN_REDO = "UNKNOWN_REDO", "An environment declares a redo that there is not."
    UNKNOWN_TASK = "UNKNOWN_TASK", "No task of that id and purpose was offered."
    UNSCORABLE_TRAJECTORY = "UNSCORABLE_TRAJECTORY", "The trajectory cannot be scored."
    UNSUPPORTED_ENCODING = "UNSUPPORTED_ENCODING", "The body's content-encoding is not read."
    UNSUPPORTED_LOGPROBS = "UNSUPPORTED_LOGPROBS", "Log-probs cannot be given that way."
    UNSUPPORTED_MEDIA_TYPE = "UNSUPPORTED_MEDIA_TYPE", "The body's media type is not read."
    UNSUPPORTED_RESPONSE_FORMAT = (
        "UNSUPPORTED_RESPONSE_FORMAT",
        "The answer cannot be held to that form here.",
    )
    UNSUPPORTED_TOOL_CHOICE = "UNSUPPORTED_TOOL_CHOICE", "tool_choice cannot be forced."
    UNSUPPORTED = "UNSUPPORTED", "The service does not support this."
    UPDATES_REFUSED = (
        "UPDATES_REFUSED",
        "Many updates in a row were refused: the loss or its gradients are not finite.",
    )
    VALUE_NOT_FINITE = "VALUE_NOT_FINITE", "A value is not finite."
    VERSION_NOT_NEWER = "VERSION_NOT_NEWER", "The policy version is not newer than the present one."
    VLLM_MISSING = "VLLM_MISSING", "vLLM does not import."
    WEIGHTS_BAD = "WEIGHTS_BAD", "The last load of weights failed, so the replica serves nothing."
    WEIGHTS_BROKEN = "WEIGHTS_BROKEN", "A file is not a safetensors file."
    WEIGHTS_DIFFER = "WEIGHTS_DIFFER", "The engine does not hold the weights that were published."
    WEIGHTS_MISMATCH = "WEIGHTS_MISMATCH", "The checkpoint's adapter is of another shape."
    WHICH_STACK = "WHICH_STACK", "There are several stacks: name one."
    WRITE_FAILED = "WRITE_FAILED", "A file of the run could not be written; nothing has changed."
    WRONG_MODE = "WRONG_MODE", "The environment reads another input mode."
    WRONG_SIZE = "WRONG_SIZE", "The number of trajectories is not the one that the task asks for."
    WRONG_TYPE = "WRONG_TYPE", "A field does not have the expected type."

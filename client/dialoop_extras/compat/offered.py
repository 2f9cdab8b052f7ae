"""The sources' names, and where each is at home with us; the package's attributes come from here.

OFFERED["GRPOLoss"]         # "dialoop_extras.source_names:grpo_loss"
LEFT_OUT["vLLMWorker"]      # why there is none, and what to use

docs/compat.md shows both tables. Homes are texts because they are imported when first used: the
SDK alone needs neither torch nor the services.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TORCHRL = {
    "AddThinkingPrompt": "dialoop_extras.compat.transforms:add_thinking_prompt",
    "BrowserTransform": "dialoop_extras.compat.transforms:browser_transform",
    "ChatEnv": "dialoop_extras.compat.environments:chat_env",
    "ChatHistory": "dialoop.chat:ChatHistory",
    "ContentBase": "dialoop.messages:content_part",
    "DAPO": "dialoop_extras.source_names:dapo",
    "DataLoadingPrimer": "dialoop_extras.compat.transforms:data_loading_primer",
    "DatasetChatEnv": "dialoop_extras.compat.environments:dataset_chat_env",
    "ExecuteToolsInOrder": "dialoop_extras.compat.transforms:execute_tools_in_order",
    "GRPOLoss": "dialoop_extras.source_names:grpo_loss",
    "GRPOLossOutput": "dialoop_learning.loss.losses:LossOutput",
    "GSM8KEnv": "dialoop_extras.compat.environments:gsm8k_env",
    "GSM8KRewardParser": "dialoop_extras.compat.environments:gsm8k_reward_parser",
    "History": "dialoop_extras.compat.history:SourceHistory",
    "IFEvalEnv": "dialoop_extras.compat.environments:ifeval_env",
    "IfEvalScorer": "dialoop_extras.compat.environments:ifeval_scorer",
    "JSONCallParser": "dialoop.environments.tools.tool_syntaxes:JsonCalls",
    "KLComputation": "dialoop_extras.compat.kl:KlComputation",
    "KLRewardTransform": "dialoop_extras.compat.kl:kl_reward_transform",
    "LLMCollector": "dialoop_extras.compat.collectors:TrajectoryCollector",
    "LLMEnv": "dialoop_extras.compat.environments:llm_env",
    "LogProbs": "dialoop.views.views:LogProbs",
    "MCAdvantage": "dialoop_extras.source_names:mc_advantage",
    "MCPToolTransform": "dialoop_extras.compat.transforms:mcp_tool_transform",
    "Masks": "dialoop.views.views:Masks",
    "PolicyVersion": "dialoop_extras.compat.transforms:VersionStamp",
    "PythonInterpreter": "dialoop_extras.compat.transforms:python_interpreter",
    "RetrieveKL": "dialoop_extras.compat.kl:RetrieveKl",
    "RetrieveLogProb": "dialoop_extras.compat.kl:RetrieveLogProb",
    "SFTLoss": "dialoop_extras.source_names:sft_loss",
    "SFTLossOutput": "dialoop_learning.loss.losses:LossOutput",
    "SimpleToolTransform": "dialoop_extras.compat.transforms:simple_tool_transform",
    "StepCounter": "dialoop.environments.stamps:StepCounter",
    "TemplateTransform": "dialoop_extras.compat.transforms:template_transform",
    "Text": "dialoop.views.views:Text",
    "Tokenizer": "dialoop.environments.stamps:TokenizeTransform",
    "Tokens": "dialoop.views.views:Tokens",
    "TopKRewardSelector": "dialoop_extras.source_names:TopKRewardSelector",
    "TransformersWrapper": "dialoop_extras.compat.wrappers:PolicyWrapper",
    "XMLBlockParser": "dialoop.environments.tools.tool_syntaxes:XmlCalls",
    "add_chat_template": "dialoop_extras.compat.names:add_default_template",
    "as_nested_tensor": "dialoop_extras.collates:as_nested_tensor",
    "as_padded_tensor": "dialoop_extras.collates:as_padded_tensor",
    "lazy_stack": "dialoop_extras.compat.history:lazy_stack",
    "make_gsm8k_env": "dialoop_extras.compat.environments:gsm8k_env",
    "make_mlgym": "dialoop_extras.compat.environments:make_mlgym",
    "vLLMWrapper": "dialoop_extras.compat.wrappers:PolicyWrapper",
}

_TRL = {
    "TextEnvironment": "dialoop_extras.compat.trl_text:text_environment",
    "TextHistory": "dialoop_extras.compat.trl_text:text_history",
}

_TORCHTUNE = {
    "GRPOStats": "dialoop_extras.source_names:ChunkedLossStats",
    "GRPOWithChunkedOutputLoss": "dialoop_extras.source_names:ChunkedGrpoLoss",
    "PackedTrajectory": "dialoop_extras.seed_interface:PackedTrajectory",
    "TrajectoryData": "dialoop_extras.seed_interface:TrajectoryData",
    "VLLMOutput": "dialoop_extras.seed_interface:VLLMOutput",
    "create_response_mask": "dialoop_extras.seed_interface:create_response_mask",
    "create_sample_mask": "dialoop_extras.seed_interface:create_sample_mask",
    "extract_response_logprobs_from_pack": (
        "dialoop_extras.seed_interface:extract_response_logprobs_from_pack"
    ),
    "pack_sequences": "dialoop_extras.seed_interface:pack_sequences",
}

_METARLGYM = {
    "DirectOutputAgent": "dialoop_extras.compat.trials:OutputAgent",
    "MultistepEnv": "dialoop_extras.compat.trials:TrialEnvironment",
    "TwentyQuestionsEnv": "dialoop_extras.compat.trials:twenty_questions_env",
}

OFFERED: Mapping[str, str] = MappingProxyType(_TORCHRL | _TRL | _TORCHTUNE | _METARLGYM)
"""Each name of a source that works here, and its home as `module:attribute`."""

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "GRPOTrainer": (
            "Training is a service: set `loss` in `[train]` and run `dialoop_ops.train(config)`."
        ),
        "GRPOEnvTrainer": (
            "Training is a service: play trials as an environment and run "
            "`dialoop_ops.train(config)`."
        ),
        "GSM8KPrepareQuestion": "`dialoop.tasks.gsm8k.gsm8k` reads the question as it loads rows.",
        "IFEvalScoreData": (
            "Each score is a named reward of the step; `dialoop.tasks.ifeval.Followed` holds them."
        ),
        "LLMHashingEnv": (
            "It needs no environment: `prefix_hash` of `dialoop.Sequence` names a chain of tokens."
        ),
        "LLMOnDevice": "The inference service places its engine; set `[inference]` in the config.",
        "LLMWrapperBase": (
            "It is abstract; a policy is anything with the methods of `dialoop.episode.Policy`."
        ),
        "MLGymEnv": "Use `make_mlgym(tasks=[...])`, which opens the package's environments.",
        "MLGymWrapper": "Use `make_mlgym(tasks=[...], make=...)`, which takes your own maker.",
        "PPOTrainer": (
            "Training is a service: name a loss in the config and run `dialoop_ops.train(config)`."
        ),
        "PyTorchActorModel": "It is the trainer service: run `dialoop_ops.train(config)`.",
        "RayLLMCollector": "Collectors are processes; docs/scale.md says how to start more.",
        "RefActor": "It is the scorer service: see `dialoop.ScorerClient`.",
        "ReplayBuffer": "It is the replay service: see `dialoop.ReplayClient`.",
        "SyncLLMCollector": "Use `LLMCollector`; the workers of torchtune are services here.",
        "batched_rewards": (
            "Rewards are transforms of the environment: `dialoop.environments.Rewards`."
        ),
        "grpo_step": (
            "The trainer takes the step; by hand it is `loss = GRPOWithChunkedOutputLoss()(...)` "
            "with the pack's tensors, and `loss.loss.backward()`."
        ),
        "load_tool": (
            "It runs code from the network. Give any function of a text, or an MCP server's tools."
        ),
        "make_vllm_worker": "The inference service starts vLLM itself; set `engine` in the config.",
        "stateless_init_process_group": (
            "The trainer and the engine open their own group; set `[inference] data_plane`."
        ),
        "vLLMUpdater": (
            "The trainer publishes weights with a manifest; `LLMCollector.update_policy_weights_` "
            "takes one."
        ),
        "vLLMWorker": "It is a part of the vLLM engine of the inference service.",
    }
)
"""Each name of a source that does not exist here: the reason, and what to use."""

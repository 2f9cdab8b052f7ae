// What the console's routes answer.

export type Progress = {
  num_trajectories: number;
  num_bad_lines: number;
  num_bytes: number;
  num_bytes_of_run: number;
};
export type Run = {
  name: string;
  path: string;
  run_id: string;
  started: number | null;
  variant: string; // runs of one differ in their seeds alone
  progress: Progress;
};
export type Summary = {
  number: number;
  trajectory_id: string;
  group_id: string;
  task_key: string;
  environment: string;
  outcome: string;
  label: string;
  train_step: number;
  reward: number | null;
  advantage: number | null;
  done_reason: string;
  stop_reasons: string[];
  owners: string[];
  num_turns: number;
  num_tool_calls: number;
  num_sequences: number;
  num_tokens: number;
  num_sampled: number;
  lineage: string;
  oldest: number | null;
  newest: number | null;
  staleness: number | null;
  preview: string;
};
export type Page = { total: number; summaries: Summary[] };
export type Message = { role: string; content: unknown; [field: string]: unknown };
export type Turn = {
  message_start: number;
  num_messages: number;
  rewards?: Record<string, unknown>;
  feedback?: Record<string, string>; // what a scorer said beside its reward
  stop_reason?: string;
};
export type Failure = { owner: string; reason: string; message: string };
export type Member = { summary: Summary; messages: Message[]; turns: Turn[]; failures: Failure[] };
export type Trajectory = Member & {
  temperature?: unknown;
  update_mode?: string;
  sequences: { num_tokens: number; fork_cause: string; advantage: unknown }[];
};
export type Evaluated = {
  label: string;
  train_step: number;
  value: number;
  low: number | null;
  high: number | null;
  num_trajectories: number;
};
export type Answer = {
  number: number;
  label: string;
  reward: number | null;
  messages: Message[];
};
export type StepPart = { name: string; seconds: number };
export type Overview = {
  has_ended: boolean;
  num_train_steps: number;
  max_train_steps: number;
  num_trajectories: number;
  wall_s: number | null;
  learning: {
    verdict: string;
    is_loss: boolean;
    of: string;
    before: number | null;
    after: number | null;
    low: number | null;
    high: number | null;
    num_pairs: number;
    evaluations: Record<string, Evaluated[]>;
    training: [number, number][];
    trials: Record<string, number[]>;
  };
  checks: { name: string; holds: boolean | null; says: string }[];
  parts: StepPart[];
  answers: {
    kind: string;
    task_key: string;
    prompt: Message[];
    before: Answer | null;
    after: Answer;
  }[];
  settings: { key: string; value: string; default: string }[];
};
// A number may come as "NaN", "Infinity" or "-Infinity".
export type Value = number | string | null;
export type Tokens = {
  sequence: number;
  num_sequences: number;
  fork_cause: string;
  start: number;
  num_tokens: number;
  ids: number[];
  texts: string[] | null;
  special: boolean[];
  sources: string[];
  turns: (number | null)[];
  messages: (number | null)[];
  versions: (string | null)[];
  logprobs: Value[];
  trainer_logprobs: Value[];
  ref_logprobs: Value[];
  advantages: Value[];
  trained: boolean[];
};
export type Series = {
  run: string;
  name: string;
  time: number[];
  train_step: number[];
  policy_version: (number | null)[];
  samples?: number[];
  value: Value[];
  low: (number | null)[] | null;
  high: (number | null)[] | null;
};
export type ConfigLines = {
  runs: string[];
  lines: { key: string; values: string[]; differs: boolean }[];
};
export type Publishes = {
  bound: number | null;
  publishes: {
    time: number;
    train_step: number;
    lineage: string;
    policy_version: number | null;
    publish_s: Value;
    max_logprob_difference: Value;
    num_replicas: Value;
    num_bytes: Value;
    is_on_disk: boolean;
  }[];
};
export type Wait = {
  target: string;
  what: string;
  seconds: number;
  count: number;
  is_idle: boolean;
};
export type ServiceNow = {
  name: string;
  address: string;
  rest_address: string;
  health: string;
  silent_s: number;
  incarnation: string;
  process: { state?: string; pid?: number | null; num_restarts?: number; alarm?: string };
  waits: Wait[];
};
export type Blocked = {
  waiter: string;
  target: string;
  what: string;
  seconds: number;
  count: number;
  because: string[];
  is_stall: boolean;
  text: string;
};
export type Now = {
  pid: number;
  run_id: string;
  time: number;
  is_healthy: boolean;
  services: ServiceNow[];
  trainer: {
    phase: string;
    policy_version: string;
    num_train_steps: number;
    max_train_steps: number;
    num_warm_start_steps: number;
    max_warm_start_steps: number;
    failure: string;
    metrics: Record<string, Value>;
    busy_share: number | null;
  } | null;
  queue: {
    training: Record<string, number>;
    evaluation: Record<string, number>;
    oldest_s: Record<"training" | "evaluation", Record<string, number>>;
    dropped: Record<string, number>;
    credits: number;
    max_outstanding_groups: number;
    num_dead_letters: number;
    num_redelivered: number;
    is_full: boolean;
    store: string;
  } | null;
  replicas: Record<
    string,
    {
      policy_version: string;
      engine: string;
      ready: boolean;
      reason: string;
      num_requests_running: number;
      num_sampled_tokens: number;
      busy_share: number | null;
    }
  >;
  sampled_tokens_per_s: number | null;
  blocked: Blocked[];
  alarms: string[];
};
export type DeadLetter = {
  group_id: string;
  stage: string;
  reason: string;
  num_deliveries: number;
  task_key: string;
  environment: string;
  rewards: Value[];
  num_tokens: number;
};
export type Branch = {
  sequence: number;
  parent: number | null;
  cause: string;
  num_tokens: number;
  num_shared: number;
  turns: number[];
  before: string;
  after: string;
};
export type Choices = Record<string, string[]>;

export class Refusal extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

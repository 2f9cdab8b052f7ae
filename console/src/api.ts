// What the console's routes answer, and how they are called.

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
  stop_reason?: string;
};
export type Failure = { owner: string; reason: string; message: string };
export type Member = { summary: Summary; messages: Message[]; turns: Turn[]; failures: Failure[] };
export type Trajectory = Member & {
  temperature?: unknown;
  update_mode?: string;
  sequences: { num_tokens: number; fork_cause: string; advantage: unknown }[];
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
  value: Value[];
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
export type Choices = Record<string, string[]>;

export class Refusal extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

const TOKEN = "dialoop-token";

export function setToken(token: string): void {
  sessionStorage.setItem(TOKEN, token);
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const token = sessionStorage.getItem(TOKEN);
  const headers: Record<string, string> = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch(`api/${path}`, { headers, signal });
  const body = await answer.json();
  if (!answer.ok) {
    throw new Refusal(answer.status, `${body.detail ?? answer.statusText} ${body.remedy ?? ""}`);
  }
  return body as T;
}

export function query(values: [string, string][]): string {
  return new URLSearchParams(values.filter(([, value]) => value !== "")).toString();
}
